"""Random messages of every type."""

from __future__ import annotations

import functools
import random
import re
from typing import Any

import msgspec
from msgspec import inspect

from djinn_core.wire import messages

INTEGERS = (0, 1, 2, 3, 7, 64, 255, 2**31, 2**32 + 1, 2**63 - 1)
NEGATIVE = (-1, -2, -(2**31), -(2**63))
FLOATS = (0.0, 0.5, -1.5, 1e300, float("inf"), float("nan"))
WORDS = ("", "x", "float32", "bfloat16", "aten::add.Tensor", "aten::relu", "cpu", "planes+zstd", "dtype", "a" * 200)
DEPTH = 6


def message_types() -> tuple[type[msgspec.Struct], ...]:
    """Return every type that `decode` returns."""
    return messages.MESSAGES


@functools.cache
def _described(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def generated(kind: Any, draw: random.Random) -> Any:
    """Return a random value of a type."""
    return _value(_described(kind), draw, 0)


def _value(kind: inspect.Type, draw: random.Random, depth: int) -> Any:
    if isinstance(kind, inspect.StructType):
        if depth > DEPTH and not any(f.required for f in kind.fields):
            return kind.cls()
        return kind.cls(**{f.name: _value(f.type, draw, depth + 1) for f in kind.fields if _given(f, draw)})
    if isinstance(kind, inspect.VarTupleType | inspect.ListType):
        least, most = kind.min_length or 0, min(kind.max_length or 5, 5)
        count = least if depth > DEPTH else draw.randint(least, max(most, least))
        return tuple(_value(kind.item_type, draw, depth + 1) for _ in range(count))
    if isinstance(kind, inspect.TupleType):
        return tuple(_value(item, draw, depth + 1) for item in kind.item_types)
    if isinstance(kind, inspect.DictType):
        return {
            _value(kind.key_type, draw, depth): _value(kind.value_type, draw, depth) for _ in range(draw.randint(0, 3))
        }
    if isinstance(kind, inspect.UnionType):
        return _value(draw.choice(kind.types if depth <= DEPTH else kind.types[:1]), draw, depth)
    return _plain(kind, draw)


def _given(field: inspect.Field, draw: random.Random) -> bool:
    return field.required or draw.random() < 0.7


def _plain(kind: inspect.Type, draw: random.Random) -> Any:
    if isinstance(kind, inspect.IntType):
        return _within(kind, INTEGERS if kind.ge is not None or draw.random() < 0.7 else NEGATIVE, draw)
    if isinstance(kind, inspect.StrType):
        fitting = [word for word in WORDS if kind.pattern is None or re.search(kind.pattern, word)]
        return draw.choice(fitting)[: kind.max_length]
    if isinstance(kind, inspect.BytesType):
        return draw.randbytes(kind.min_length or draw.choice((0, 16, 32)))
    if isinstance(kind, inspect.LiteralType):
        return draw.choice(kind.values)
    if isinstance(kind, inspect.BoolType):
        return draw.random() < 0.5
    return _within(kind, FLOATS, draw) if isinstance(kind, inspect.FloatType) else None


def _within(kind: inspect.IntType | inspect.FloatType, numbers: tuple[Any, ...], draw: random.Random) -> Any:
    least, most = kind.ge if kind.ge is not None else kind.gt, kind.le if kind.le is not None else kind.lt
    fitting = [n for n in numbers if (least is None or n >= least) and (most is None or n <= most)]
    return draw.choice(fitting or [least if least is not None else most])
