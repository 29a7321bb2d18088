"""Types of the ground truth of a recorded program, which is derived from the recording."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import nn

from djinn.planning import DataResidency, ExecutionPhase, Modality, Program, WorkloadType


@attrs.define
class ModuleRun:
    """One call of a module, with the instructions recorded during it.

    Attributes:
        module: the module.
        path: name of the module in the model, or "" for the model itself and for modules outside of it.
        start, end: index of the first instruction, and of the instruction after the last.
        parent: index of the enclosing run, or None.
    """

    module: nn.Module
    path: str
    start: int
    end: int
    parent: int | None

    @property
    def kind(self) -> str:
        """Return the name of the module's class."""
        return type(self.module).__name__

    @property
    def span(self) -> range:
        """Indices of the instructions."""
        return range(self.start, self.end)


@attrs.frozen
class Instance:
    """A subgraph that a pattern should find.

    Attributes:
        pattern: name of the pattern, as in `scoring.NAMES`.
        core: ids of the nodes that a match must cover.
        span: ids of the nodes that may belong to the instance. At least half of a match must lie inside.
        values: storages of keys and values, for caches. Otherwise it is empty.
        required: True if a miss is an error, False if a match and no match are both right.
        where: path of the module, for messages.
        enough: share of the core that a match must cover. None selects the pattern's default.
    """

    pattern: str
    core: frozenset[int]
    span: frozenset[int]
    values: frozenset[int] = frozenset()
    required: bool = True
    where: str = ""
    enough: float | None = None


@attrs.frozen
class Truth:
    """Ground truth of one program. If a field holds a set of answers, each of them is right.

    Attributes:
        workloads: the right workload types.
        phases: the right phases by node; other nodes do not count.
        modalities: right modality by node, for nodes that known inputs lead to.
        residency: right residency by value, for values that the harness knows.
        instances: subgraphs that patterns should find.
    """

    workloads: frozenset[WorkloadType]
    phases: Mapping[int, frozenset[ExecutionPhase]]
    modalities: Mapping[int, Modality]
    residency: Mapping[int, DataResidency]
    instances: tuple[Instance, ...]


@attrs.frozen
class Labelled:
    """A program with its ground truth.

    Attributes:
        architecture: name of the entry. situation: way of calling the model.
        flops: FLOPs of the same call on the CPU, by `torch.utils.flop_counter`, or None if they were not counted.
    """

    architecture: str
    family: str
    situation: str
    program: Program
    truth: Truth
    flops: int | None = None
