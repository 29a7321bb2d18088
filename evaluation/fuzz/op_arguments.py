"""Arguments for ops: mutated real calls, and random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from djinn_core import torch_private
from djinn_core.ir.operators import split_name

Call = tuple[tuple[Any, ...], dict[str, Any]]
NUMBERS = (-(2**63), -(2**31) - 1, -1000, -3, -2, -1, 0, 1, 2, 3, 4, 5, 7, 8, 33, 1000, 2**20, 2**31, 2**40, 2**63 - 1)
SMALL = (-1, 0, 1, 2, 3)
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 2.5, 1e30, -1e30, float("inf"), float("-inf"), float("nan"))
SHAPES = (
    (),
    (0,),
    (1,),
    (3,),
    (8,),
    (2, 3),
    (4, 4),
    (3, 0),
    (2, 3, 4),
    (1, 2, 5, 5),
    (2, 2, 3, 3, 3),
    (1, 1, 2, 1, 2, 2),
)
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
INTEGRAL = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.int8, torch.int16)
WORDS = (
    "none",
    "mean",
    "sum",
    "linear",
    "constant",
    "reflect",
    "tanh",
    "ij",
    "xy",
    "floor",
    "trunc",
    "left",
    "reduced",
    "amax",
    "",
)
FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last)


def tensor(draw: random.Random, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a random tensor with random strides."""
    shape = draw.choice(SHAPES) if shape is None else tuple(shape)
    dtype = dtype or draw.choice(FLOATING if draw.random() < 0.6 else INTEGRAL)
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    output = _filled(draw, torch.empty(shape, dtype=dtype), generator)
    way = draw.random()
    if way < 0.1 and output.dim() > 1:
        return output.transpose(0, -1)
    if way < 0.15 and output.dim():
        return output[:1].expand(shape)
    if way < 0.2 and output.dim() and shape[0] > 1:
        return output[1:]
    return output


def _filled(draw: random.Random, made: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if made.dtype.is_floating_point or made.dtype.is_complex:
        return made.copy_(torch.randn(made.shape, generator=generator))
    if draw.random() < 0.6:
        return made.copy_(torch.randint(0, 4, made.shape, generator=generator))
    choice = [n for n in NUMBERS if made.dtype == torch.int64 or abs(n) < 2**31]
    picked = torch.randint(0, len(choice), made.shape, generator=generator)
    return made.copy_(torch.tensor(choice)[picked])


def _list(draw: random.Random, kind: str, theme: Any) -> list[Any]:
    return [argument(draw, kind, theme) for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 4, 5)))]


def argument(draw: random.Random, kind: str, theme: Any) -> Any:
    """Return a value of a schema type. `theme`: shape and dtype of most tensors of the call."""
    if kind.startswith("Optional["):
        return None if draw.random() < 0.4 else argument(draw, kind[9:-1], theme)
    if kind.startswith("List["):
        return _list(draw, kind[5:-1], theme)
    if kind == "Tensor":
        return tensor(draw, *theme) if draw.random() < 0.6 else tensor(draw)
    if kind == "int":
        return draw.choice(SMALL if draw.random() < 0.6 else NUMBERS)
    if kind == "bool":
        return draw.random() < 0.5
    if kind == "float":
        return draw.choice(FLOATS)
    if kind == "number":
        return draw.choice((draw.choice(NUMBERS), draw.choice(FLOATS), draw.choice(SMALL), True, 1j))
    if kind == "str":
        return draw.choice(WORDS)
    return torch.device("cpu") if kind == "Device" else None


def special(draw: random.Random, name: str) -> Any:
    """Return a value for arguments that schemas call `int` although they are enumerations."""
    if name == "dtype" or name.endswith("_dtype"):
        return draw.choice((*FLOATING, *INTEGRAL))
    if name == "memory_format":
        return draw.choice(FORMATS)
    return torch.strided if name == "layout" else None


def call(draw: random.Random, name: str) -> Call:
    """Return random arguments that an overload's schema allows."""
    packet, overload = split_name(name)
    schema = torch_private.schema_named(f"aten::{packet}", "" if overload == "default" else overload)
    theme = (draw.choice(SHAPES), draw.choice((*FLOATING, *INTEGRAL)))
    positional, keywords = [], {}
    for a in schema.arguments:
        if a.has_default_value() and draw.random() < 0.5:
            continue
        value = special(draw, a.name)
        if value is None:
            value = argument(draw, str(a.type), theme)
        if a.kwarg_only or len(positional) < schema.arguments.index(a):
            keywords[a.name] = value
        else:
            positional.append(value)
    return tuple(positional), keywords


def mutate(draw: random.Random, given: Call) -> Call:
    """Return a real call with one to three changed arguments."""
    positional, keywords = list(given[0]), dict(given[1])
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places: list[Any] = [*range(len(positional)), *keywords]
        if not places:
            break
        place = draw.choice(places)
        holder: Any = keywords if isinstance(place, str) else positional
        holder[place] = _other(draw, holder[place])
    return tuple(positional), keywords


def _other(draw: random.Random, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _other_tensor(draw, value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice((value + 1, value - 1, -value, value * 2, draw.choice(NUMBERS), draw.choice(SMALL)))
    if isinstance(value, float):
        return draw.choice(FLOATS)
    if isinstance(value, list | tuple):
        return _other_list(draw, list(value))
    if isinstance(value, torch.dtype):
        return draw.choice((*FLOATING, *INTEGRAL))
    if value is None:
        return draw.choice((None, draw.choice(SMALL), tensor(draw), True))
    return draw.choice(WORDS) if isinstance(value, str) else value


def _other_list(draw: random.Random, items: list[Any]) -> list[Any]:
    way = draw.random()
    if items and way < 0.6:
        place = draw.randrange(len(items))
        items[place] = _other(draw, items[place])
    elif items and way < 0.75:
        items.pop(draw.randrange(len(items)))
    elif items and way < 0.9:
        items.insert(draw.randrange(len(items)), draw.choice(items))
    else:
        items.append(draw.choice(SMALL))
    return items


def _other_tensor(draw: random.Random, value: torch.Tensor) -> torch.Tensor:
    way = draw.random()
    shape = list(value.shape)
    if way < 0.35 and shape:  # another size
        place = draw.randrange(len(shape))
        shape[place] = draw.choice((0, 1, max(0, shape[place] - 1), shape[place] + 1, 7))
        return tensor(draw, shape, value.dtype)
    if way < 0.5:  # another number of dimensions
        shape = draw.choice((shape[1:], [1, *shape], [2, *shape], shape[:-1], []))
        return tensor(draw, shape, value.dtype)
    if way < 0.65:
        return tensor(draw, shape, draw.choice((*FLOATING, *INTEGRAL)))
    if way < 0.9:  # other contents, for ops that read them
        return tensor(draw, shape, value.dtype)
    return tensor(draw)
