"""Record the module of each instruction with PyTorch's hooks. Most labels are derived from these records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import djinn
from djinn_client.interception.recording.recorder import current
from evaluation.semantics.ground_truth import ModuleRun


@attrs.define
class ModuleRuns:
    """Module calls and instructions that were recorded inside a block.

    Attributes:
        runs: module calls in the order of their start.
        captured: the captured program.
        marks: number of recorded instructions at the call of `mark`, by name.
        here: function that returns the number of instructions so far.
    """

    runs: list[ModuleRun] = attrs.field(factory=list)
    captured: Any = None
    marks: dict[str, int] = attrs.field(factory=dict)
    here: Callable[[], int] = int

    def mark(self, name: str) -> None:
        """Record the current number of instructions under a name."""
        self.marks[name] = self.here()

    def children(self, index: int | None) -> list[ModuleRun]:
        """Return the runs called in the run with that index."""
        return [run for run in self.runs if run.parent == index]


@contextmanager
def recording(model: nn.Module) -> Iterator[ModuleRuns]:
    """Capture the program of the block, and record its module calls."""
    names = {id(module): name for name, module in model.named_modules()}
    open_runs: list[int] = []
    recorder = current()
    first = len(recorder.entries)

    def here() -> int:
        return len(recorder.captures[-1].entries) + len(recorder.entries) - first

    recording_state = ModuleRuns(here=here)

    def enter(module: nn.Module, _: Any) -> None:
        at = here()
        run = ModuleRun(module, names.get(id(module), ""), at, at, open_runs[-1] if open_runs else None)
        open_runs.append(len(recording_state.runs))
        recording_state.runs.append(run)

    def leave(_: nn.Module, __: Any, ___: Any) -> None:
        recording_state.runs[open_runs.pop()].end = here()

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        with djinn.capture() as capture:
            recording_state.captured = capture
            yield recording_state
            count = here()
    finally:
        for hook in hooks:
            hook.remove()
    if len(capture.program) != count:
        raise RuntimeError(f"the program has {len(capture.program)} instructions, but {count} were counted")


def ancestors(runs: Sequence[ModuleRun], index: int) -> Iterator[int]:
    """Yield the run with that index and its enclosing runs, inner first."""
    at: int | None = index
    while at is not None:
        yield at
        at = runs[at].parent
