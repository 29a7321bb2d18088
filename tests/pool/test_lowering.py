"""Frees: they go with the next part that an executor runs, unless the memory has to be free before that."""

from __future__ import annotations

import pytest

from djinn_core.ir.handles import make_handle
from djinn_pool.lowering import _join_frees
from djinn_pool.parts import AwaitStep, FreeStep, RunPart, TransferStep, UploadStep

ONE, OTHER = make_handle(1, 0), make_handle(2, 0)
FREE = FreeStep(0, (ONE,))
RUN = RunPart(0, None)
JOINED = RunPart(0, None, free=(ONE,))


def await_step(value):
    return AwaitStep(0, TransferStep(1, 0, value, move=False))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([FREE, RUN], [JOINED]),
        ([FREE, await_step(OTHER), RUN, RUN], [await_step(OTHER), JOINED, RUN]),
        ([FREE, FreeStep(0, (OTHER,)), RUN], [RunPart(0, None, free=(ONE, OTHER))]),
        ([FREE, await_step(ONE), RUN], [FREE, await_step(ONE), RUN]),  # it would free what has arrived
        ([FREE, await_step(ONE + 1), RUN], [FREE, await_step(ONE + 1), RUN]),  # another view of the same memory
        ([FREE, UploadStep(0, OTHER), RUN], [FREE, UploadStep(0, OTHER), RUN]),  # it may need the room
        ([FREE, RunPart(1, None)], [RunPart(1, None), FREE]),  # another executor's
        ([RUN, FREE], [RUN, FREE]),
    ],
)
def test_frees_join_the_next_run_of_their_executor(parts, expected):
    assert _join_frees(parts) == expected
