"""Pass float scalars that vary between runs, such as a scheduled learning rate, as an input tensor.

Compiled code treats scalars as constants. Arithmetic with a 0-dim tensor gives equal results. Therefore the varying
floats become elements of one additional input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from djinn_core.ir.form import Argument, Form, ListArg, SlotArg, slots_taken
from djinn_server.running.template_compiler import CompiledTemplate
from djinn_strategies.compiling.region import Region

aten: Final = torch.ops.aten
_NAME: Final = re.compile(
    r"aten::(?P<lists>_foreach_)?(?P<name>[a-z]+)(?P<in_place>_)?(\.(Scalar|ScalarList|Tensor|List))?"
)
_ARITHMETIC: Final = frozenset({"add", "sub", "mul", "div"})
_BINARY_PART: Final[Mapping[str, Any]] = {"addcmul": aten.mul.Tensor, "addcdiv": aten.div.Tensor}
_WEIGHTS: Final = {"add": (2, "alpha"), "sub": (2, "alpha"), "addcmul": (3, "value"), "addcdiv": (3, "value")}
Call = Callable[..., Any]


def liftable_slots(template: CompiledTemplate, region: Region) -> frozenset[int]:
    """Return the slots of a region that can become 0-dim tensors in `call_with_tensors`."""
    slots: list[int] = []
    first = 0
    for index, code in enumerate(template.source.code[: region.stop]):
        form = template.source.forms[code]
        if index >= region.start:
            slots += [first + offset for offset in _liftable(form)]
        first += form.slot_count
    return frozenset(slots)


def _liftable(form: Form) -> Iterator[int]:
    """Return the liftable slots of one call, as offsets within the call's slots."""
    match = _NAME.fullmatch(form.op)
    name = match["name"] if match else ""
    if name not in _ARITHMETIC and name not in _BINARY_PART:
        return
    weight_position, weight = _WEIGHTS.get(name, (None, None))
    if len(form.args) > 4 or any(key != weight for key, _ in form.kwargs):  # a rounding mode, for example
        return
    slot_count = 0
    for position, argument in (*enumerate(form.args), *form.kwargs):
        if position in {weight_position, weight} or (position == 1 and name in _ARITHMETIC):
            yield from [slot_count + offset for offset, item in enumerate(_items(argument)) if type(item) is SlotArg]
        slot_count += _slots(argument)


def _items(argument: Argument) -> Sequence[Argument]:
    return argument.items if isinstance(argument, ListArg) else (argument,)


def _slots(argument: Argument) -> int:
    return sum([slots_taken(item) for item in _items(argument)])


def call_with_tensors(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], call: Call) -> Any:
    """Call `op` with 0-dim tensors in place of numbers, by means of `call`, and return its result.

    If `op` works on lists of tensors (`_foreach`), return a list.
    """
    match = _NAME.fullmatch(op)
    assert match is not None
    if not match["lists"]:
        return _call_one(match["name"], bool(match["in_place"]), args, kwargs, call)
    rows = zip(*[_row(argument, len(args[0])) for argument in args], strict=True)
    return [_call_one(match["name"], bool(match["in_place"]), row, kwargs, call) for row in rows]


def _row(argument: Any, count: int) -> Iterable[Any]:
    return argument if isinstance(argument, list | tuple) else [argument] * count


def _call_one(name: str, in_place: bool, args: Sequence[Any], kwargs: Mapping[str, Any], call: Call) -> Any:
    weight_position, key = _WEIGHTS.get(name, (len(args), ""))
    weight = args[weight_position] if weight_position < len(args) else kwargs.get(key)
    operand = args[1] if weight is None else call(aten.mul.Tensor, (args[1], weight))
    if name in _BINARY_PART:  # in the order of PyTorch's kernels for CPUs, so that results have the same bits there
        operand = call(_BINARY_PART[name], (operand, args[2]))
    packet = getattr(aten, ("add" if name in _BINARY_PART else name) + "_" * in_place)
    return call(packet.Tensor, (args[0], operand))
