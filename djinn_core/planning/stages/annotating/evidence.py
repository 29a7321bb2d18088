"""Evidence for the workload type: op counts, pattern matches and data flow of one graph, gathered once for all tiers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import attrs

from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.op_families import CONVOLUTION, EMBEDDING, MATRIX_PRODUCT
from djinn_core.ir.profile import ExecutionPhase, Modality, PatternMatch, WorkloadType
from djinn_core.planning.stages.annotating.inputs import Inputs
from djinn_core.planning.stages.annotating.states import States
from djinn_core.planning.stages.annotating.training import TrainingParts

_ATTENTIONS_PER_CACHE = 3
CACHED = (ExecutionPhase.LLM_PREFILL, ExecutionPhase.LLM_DECODE)


@attrs.frozen
class Judgement:
    """A workload type with a confidence and a sentence that explains it to a person."""

    workload: WorkloadType
    confidence: float
    reason: str


@attrs.frozen(slots=False)
class Evidence:
    """A graph with findings that the tiers share."""

    graph: Graph
    matches: Sequence[PatternMatch]
    inputs: Inputs
    training: TrainingParts
    states: States
    modalities: Sequence[Modality]

    def count(self, operations: frozenset[str]) -> int:
        """Number of nodes with one of these ops."""
        return sum(len(self.graph.by_op.get(o, ())) for o in operations)

    def nodes(self, operations: frozenset[str]) -> list[Node]:
        """Nodes with one of these ops."""
        return [self.graph.nodes[i] for o in sorted(operations) for i in self.graph.by_op.get(o, ())]

    @property
    def kinds(self) -> frozenset[Modality]:
        """Kinds of data among the inputs."""
        return self.inputs.entering

    @property
    def convolutions(self) -> int:
        """Number of convolutions."""
        return self.count(CONVOLUTION)

    @property
    def products(self) -> int:
        """Number of matrix products."""
        return self.count(MATRIX_PRODUCT)

    @property
    def tables(self) -> int:
        """Number of embedding tables that are read."""
        return len(
            {n.inputs[0] for o in EMBEDDING for i in self.graph.by_op.get(o, ()) if (n := self.graph.nodes[i]).inputs}
        )

    def of(self, pattern: str) -> list[PatternMatch]:
        """The matches of a pattern."""
        return [m for m in self.matches if m.pattern == pattern]

    @cached_property
    def cache_phases(self) -> list[ExecutionPhase]:
        """Return the phases of matches that reveal prefill or decode, or the phase that recurrent states reveal.

        A few caches in a program with many attentions without a cache do not count. Caches of programs with image or
        audio input and without text input do not count either.
        """
        if self.kinds and Modality.TEXT not in self.kinds:
            return []
        phases = [m.phase for m in self.matches if m.phase in CACHED and self.is_of_text(m)]
        attentions = sum(self.is_of_text(m) for m in self.of("attention"))
        if len(phases) * _ATTENTIONS_PER_CACHE < attentions:
            phases = []
        state_phase = self.states.phase(self.inputs.tokens, attention=bool(attentions))
        decodes = (
            state_phase is ExecutionPhase.LLM_DECODE and self.inputs.tokens <= 1
        )  # keys may be recomputed from cached values
        return [state_phase] if state_phase is not None and (decodes or not phases) else phases

    def is_of_text(self, match: PatternMatch) -> bool:
        """Return True if the match is on text, or on text and other data.

        Matches on images or audio alone do not count: models do not cache keys of an image that they see once.
        """
        return self.modalities[match.nodes[-1]] not in {Modality.VISION, Modality.AUDIO}

    def phase_of_match(self, match: PatternMatch) -> ExecutionPhase | None:
        """Return the phase that a match reveals, or None if the rest of the program contradicts it."""
        is_consistent = match.phase not in CACHED or (match.phase in self.cache_phases and self.is_of_text(match))
        return match.phase if is_consistent else None

    @property
    def fused(self) -> int:
        """Number of ops on several kinds of data."""
        return sum(m is Modality.MULTIMODAL_FUSION for m in self.modalities)
