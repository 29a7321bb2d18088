"""Checks of arguments and results against the message limits (`wire/limits.py`), made when an op is recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.program import Call, Slot
from djinn_core.ir.values import TensorMeta
from djinn_core.wire import limits

# PyTorch keeps a copy of all sizes for each view of a `split`; this many take a gigabyte.
_PIECES: Final = 1 << 13


def check_given(func: Any, args: Iterable[Any], operands: Sequence[Any], slots: Sequence[Slot]) -> None:
    """Raise an error for arguments of `func` that cannot be sent.

    `args` are all arguments, `operands` the tensors and `slots` the numbers among them.

    Raises:
        UnsupportedOperation: there are too many tensors, numbers or shifts, an integer has more than 64 bits, a text is
            too long, or the degree of a polynomial is too high.
    """
    count = len(operands) + len(slots)
    if count > limits.ARGUMENTS_OF_AN_OP:
        raise UnsupportedOperation(
            f"{func.name()} got {count:,} tensors and numbers, but an executor accepts at most "
            f"{limits.ARGUMENTS_OF_AN_OP:,} in one op. Call the op for parts of the lists"
        )
    for slot in slots:
        if type(slot) is int and not limits.MIN_INTEGER <= slot <= limits.MAX_INTEGER:
            raise UnsupportedOperation(f"{func.name()} got an integer of more than 64 bits, which no kernel accepts")
    for argument in args:
        if isinstance(argument, (int, float)) and argument > limits.DEGREE and "_polynomial_" in func.name():
            raise UnsupportedOperation(
                f"{func.name()} got the degree {argument:,}, but an executor accepts at most {limits.DEGREE:,}"
            )
        if (
            func is torch.ops.aten.roll.default
            and isinstance(argument, (list, tuple))
            and len(argument) > limits.SHIFTS
        ):
            raise UnsupportedOperation(
                f"{func.name()} got {len(argument):,} shifts, but an executor accepts at most {limits.SHIFTS:,}"
            )
        if isinstance(argument, str) and len(argument) > limits.TEXT:
            raise UnsupportedOperation(
                f"{func.name()} got a text of {len(argument):,} characters, but an executor accepts at most "
                f"{limits.TEXT:,}"
            )


def check_made(func: Any, call: Call) -> None:
    """Raise an error for results or reshaped operands that exceed the limits of a message.

    Raises:
        UnsupportedOperation: the op returns too many tensors, or a tensor has too many dimensions.
    """
    if len(call.results) > limits.ARGUMENTS_OF_AN_OP:
        raise UnsupportedOperation(
            f"{func.name()} returns {len(call.results):,} tensors; an executor returns at most {limits.ARGUMENTS_OF_AN_OP:,} from one op"
        )
    if func is torch.ops.aten.split_with_sizes.default and len(call.results) > _PIECES:
        raise UnsupportedOperation(
            f"{func.name()} makes {len(call.results):,} views, which would take {16 * len(call.results) ** 2:,} "
            f"bytes of the client's memory; one op can make at most {_PIECES:,}. Split the tensor in two steps"
        )
    metas: list[TensorMeta | None] = [*call.results, *[meta for _, meta in call.changes]]
    check_dimensions(func.name(), max((len(meta.shape) for meta in metas if meta is not None), default=0))


def check_dimensions(what: str, count: int) -> None:
    """Raise an error for a tensor with too many dimensions.

    Raises:
        UnsupportedOperation: `count` is too large.
    """
    if count > limits.DIMENSIONS:
        raise UnsupportedOperation(
            f"{what} makes a tensor of {count} dimensions; remote tensors have at most {limits.DIMENSIONS}. Do this on the CPU"
        )
