"""Ground truth of a recorded program, stated when it was recorded: the types of the labelled zoo."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import nn

from djinn.planning import DataResidency, ExecutionPhase, Modality, Program, WorkloadType


@attrs.define
class ModuleRun:
    """One call of a module: which instructions were recorded between its beginning and its end.

    Attributes:
        module: what was called.
        path: its name in the model; empty for the model itself and for modules that are not part of it.
        start, end: the first instruction, and the one after the last.
        parent: index of the run that it was called in, or None.
    """

    module: nn.Module
    path: str
    start: int
    end: int
    parent: int | None

    @property
    def kind(self) -> str:
        """The name of the module's class."""
        return type(self.module).__name__

    @property
    def span(self) -> range:
        """The instructions."""
        return range(self.start, self.end)


@attrs.frozen
class Instance:
    """Something that a pattern ought to find.

    Attributes:
        pattern: what it is, in the words of `scoring.NAMES`.
        core: ids of the nodes that make it what it is; those that a match must cover.
        span: ids of the nodes that may belong to it; a match lies mostly inside.
        values: for caches, the storages of its keys and values; empty for others.
        required: whether not finding it is a mistake. Where the model's modules leave it open, finding it or not is right.
        facts: what the configuration says of it, in the words of `PatternMatch.details`.
        where: path of the module, for people.
        enough: the share of the core that a match must cover; None where the pattern says it.
    """

    pattern: str
    core: frozenset[int]
    span: frozenset[int]
    values: frozenset[int] = frozenset()
    required: bool = True
    facts: Mapping[str, object] = attrs.field(factory=dict)
    where: str = ""
    enough: float | None = None


@attrs.frozen
class Truth:
    """Ground truth of one program. More than one answer is right where the field itself has more than one word.

    Attributes:
        workloads: the workload types that are right.
        phases: the phases that are right, by node; nodes that are not listed count for nothing.
        modalities: what a node works on, for nodes that certain inputs lead to.
        residency: by value, where the harness knows it.
        instances: what the patterns ought to find.
    """

    workloads: frozenset[WorkloadType]
    phases: Mapping[int, frozenset[ExecutionPhase]]
    modalities: Mapping[int, Modality]
    residency: Mapping[int, DataResidency]
    instances: tuple[Instance, ...]


@attrs.frozen
class Labelled:
    """A program with what is true of it.

    Attributes:
        architecture: name of the entry. situation: how the model was called.
        flops: of the same call here, by `torch.utils.flop_counter`; None where it was not counted.
    """

    architecture: str
    family: str
    situation: str
    program: Program
    truth: Truth
    flops: int | None = None
