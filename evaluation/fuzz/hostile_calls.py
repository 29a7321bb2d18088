"""Calls of entries of PyTorch's operator database with some hostile arguments."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

REMOTE = "remote_accelerator:0"
# No size that a machine might just have memory for: an executor killed by the system is not a finding.
SIZES = (0, 1, 2, 3, -1, -7, 1 << 44, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 70, -(1 << 63), -(1 << 70))
COUNTS = (0, 1, 2, 64, 65, 128, 129, 300, 1000, 5000, 100_000)
NUMBERS = (*SIZES, 0.5, -0.0, 1e308, float("nan"), float("inf"), 1j, complex("nan"), True, None, "text", 10**40)
TEXTS = ("", "floor", "x" * 300, "é" * 70_000, "\ud800", "\0", "a,b->c" * 9000)
DTYPES = (torch.float32, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.bfloat16, torch.float64)
SAMPLES = 4  # samples per entry and dtype
LARGEST = 4096  # maximum elements of a sample's tensors in total
# PyTorch's own loop for the power -2**63 never ends.
LEFT_OUT = frozenset({"linalg.matrix_power", "matrix_power"})

Pool = Sequence[torch.Tensor]


def many(rng: random.Random) -> int:
    """Return a random list length. The largest length is rare, because an error message shows each element."""
    return COUNTS[-1] if rng.random() < 0.02 else rng.choice(COUNTS[:-1])


def nested(depth: int) -> Any:
    """Return a nested list."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@functools.cache
def entries() -> tuple[OpInfo, ...]:
    """Return the entries of the operator database, except those in `LEFT_OUT`."""
    return tuple(op for op in op_db if op.name not in LEFT_OUT)


@functools.cache
def samples_of(position: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return some samples of an entry on the CPU. The tuple is empty for an unsupported dtype."""
    op = entries()[position]
    state = torch.get_rng_state()
    torch.manual_seed(position)
    try:
        output = op.sample_inputs_func(op, "cpu", dtype, requires_grad=False)
        return tuple(s for s in itertools.islice(output, SAMPLES) if _elements((s.input, s.args, s.kwargs)) <= LARGEST)
    except Exception:  # the entry may raise anything
        return ()
    finally:
        torch.set_rng_state(state)


def _elements(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, dict):
        return sum(map(_elements, value.values()))
    return sum(map(_elements, value)) if isinstance(value, (list, tuple)) else 0


def remote(value: Any) -> Any:
    """Return a sample's argument on the device."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(REMOTE) if value.layout == torch.strided and not value.is_quantized else value
    if isinstance(value, (list, tuple)):
        return type(value)(map(remote, value)) if type(value) in {list, tuple} else value
    if isinstance(value, dict):
        return {key: remote(one) for key, one in value.items()}
    return torch.device(REMOTE) if isinstance(value, torch.device) or value == "cpu" else value


# --- hostile values for one argument
# -----------------------------------------------------------------------------------


def _filled(rng: random.Random, value: torch.Tensor) -> torch.Tensor:
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return torch.full_like(value, rng.choice((float("nan"), float("inf"), -float("inf"), 0.0)))
    if value.dtype == torch.bool:
        return torch.zeros_like(value)
    return torch.full_like(value, rng.choice((-1, 99, 127)))


HOSTILE_TENSORS: tuple[Callable[[random.Random, torch.Tensor], Any], ...] = (
    _filled,
    lambda rng, one: one.new_empty((0,)),
    lambda rng, one: one.new_empty((*one.shape[1:], 0)),
    lambda rng, one: one.new_empty((2, 0, 1 << rng.choice((40, 60)))),
    lambda rng, one: one.reshape(-1)[:1].expand(rng.choice((3, 7, 64))),
    lambda rng, one: one.reshape(-1)[:1].reshape([1] * rng.choice((5, 64, 65, 128, 129))),
    lambda rng, one: one.reshape(-1)[:1].expand([1] * 20 + [2] * rng.choice((1, 3, 10))),
    lambda rng, one: one.new_zeros(9).as_strided((4, 4), (1, 1)),
    lambda rng, one: one.new_zeros(4).as_strided((1 << rng.choice((10, 60)), 4), (0, 1))[:0],
    lambda rng, one: one.to(rng.choice(DTYPES)),
    lambda rng, one: one.cpu(),
    lambda rng, one: one.to("meta"),
    lambda rng, one: one.cpu().to_sparse() if one.dim() else one,
    lambda rng, one: one.unsqueeze(0),
    lambda rng, one: one.mT if one.dim() > 1 else one,
    lambda rng, one: one[..., ::2] if one.dim() else one,
    lambda rng, one: one.reshape(-1)[:-1],
    lambda rng, one: torch.nn.Parameter(one.detach().to(torch.float32)),
    lambda rng, one: one.clone().requires_grad_() if one.is_floating_point() else one,
    lambda rng, one: [one] * many(rng),
    lambda rng, one: (one, (one, [one])),
    lambda rng, one: rng.choice(NUMBERS),
    lambda rng, one: nested(rng.choice((1, 3, 17, 70))),
    lambda rng, one: rng.choice(TEXTS),
    lambda rng, one: object(),
    lambda rng, one: None,
)


def hostile_list(rng: random.Random, value: list[Any]) -> Any:
    """Return a hostile value for a list or tuple."""
    way = rng.randrange(8)
    if way == 0:
        return []
    if way == 1:
        return [*value, *value]
    if way == 2:
        return (value[:1] or [1]) * many(rng)
    if way == 3:
        return [value]
    if way == 4:
        return nested(rng.choice((1, 17, 70)))
    if way == 5:
        return [rng.choice(SIZES) for _ in range(rng.choice((1, 2, 65, 129)))]
    if way == 6:
        return [*value[:1], rng.choice(NUMBERS)]
    return value[0] if value else None


def hostile(rng: random.Random, value: Any) -> Any:
    """Return a hostile value for an argument."""
    if isinstance(value, torch.Tensor):
        return rng.choice(HOSTILE_TENSORS)(rng, value)
    if isinstance(value, (list, tuple)):
        if value and rng.random() < 0.5:
            place = rng.randrange(len(value))
            return [hostile(rng, one) if n == place else one for n, one in enumerate(value)]
        return hostile_list(rng, list(value))
    if isinstance(value, str):
        return rng.choice((*TEXTS, None, 1, 1 << 70))
    if isinstance(value, torch.dtype):
        return rng.choice((*DTYPES, "float32", 1, None))
    return rng.choice((*NUMBERS, *SIZES, [], nested(17), rng.choice(TEXTS)))


# Common argument names, and values to add if a call lacks them.
ADDED: tuple[tuple[str, Callable[[random.Random, torch.Tensor], Any]], ...] = (
    ("dim", lambda rng, one: rng.choice((*SIZES, [0, 0], list(range(65)), nested(3)))),
    ("dtype", lambda rng, one: rng.choice(DTYPES)),
    ("device", lambda rng, one: rng.choice((REMOTE, "cpu", "meta", "remote_accelerator:99", "\ud800", -1))),
    ("out", lambda rng, one: rng.choice((one, one.cpu(), one.new_empty(0), one.reshape(-1)[:1].expand(5), [one], 1))),
    ("keepdim", lambda rng, one: rng.choice(NUMBERS)),
    ("no_such_argument", lambda rng, one: one),
    ("generator", lambda rng, one: rng.choice((torch.Generator(), torch.Generator(REMOTE), 1))),
)


def mutate(rng: random.Random, given: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the arguments after up to three of them were replaced, removed or added."""
    positional, keywords = [given, *args], dict(kwargs)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        way = rng.random()
        if way < 0.75:
            places: list[Any] = [*range(len(positional)), *keywords]
            if places:
                place = rng.choice(places)
                holder: Any = keywords if isinstance(place, str) else positional
                holder[place] = hostile(rng, holder[place])
        elif way < 0.9:
            name, make = rng.choice(ADDED)
            first = next((item for item in positional if isinstance(item, torch.Tensor)), None)
            keywords[name] = make(rng, first if first is not None else torch.ones(3, device=REMOTE))
        elif len(positional) > 1 and way < 0.95:
            positional.pop()
        else:
            positional.append(hostile(rng, rng.choice((1, "text", [1]))))
    return positional, keywords


def variant_of(rng: random.Random, op: OpInfo) -> Callable[..., Any]:
    """Return one of the variants of an entry."""
    ways = [op.op, op.op, op.inplace_variant, op.method_variant, op.operator_variant]
    return rng.choice([way for way in ways if way is not None])


def call(rng: random.Random, pool: Pool = ()) -> tuple[str, Callable[[], Any]]:
    """Return the name of a random entry, and a function that calls it with hostile arguments.

    Tensors of `pool` replace some operands, and may be written.

    Raises:
        Exception: creating a hostile tensor may raise any exception.
    """
    position = rng.randrange(len(entries()))
    op = entries()[position]
    samples: tuple[Any, ...] = ()
    for dtype in rng.sample(DTYPES, 3):
        samples = samples or samples_of(position, dtype)
    if not samples:
        return op.name, lambda: None
    sample = rng.choice(samples)
    inputs, args, kwargs = remote(sample.input), remote(list(sample.args)), remote(sample.kwargs)
    if pool and rng.random() < 0.5 and isinstance(inputs, torch.Tensor):
        inputs = rng.choice(pool)
    positional, keywords = mutate(rng, inputs, args, kwargs)
    function = variant_of(rng, op)
    return op.name, lambda: function(*positional, **keywords)
