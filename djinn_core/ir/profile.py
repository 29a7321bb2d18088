"""Workload profiles: phases, residency, modality and pattern matches, in tables by node and by value."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntFlag
from typing import Any

import attrs
from attrs.validators import instance_of, optional

from djinn_core.ir.checked_fields import as_tuple, mapping_of, tuple_of
from djinn_core.ir.short_repr import ShortRepr


class ExecutionPhase(str, Enum):
    """The part of a workload that an op belongs to.

    A training step has three phases: `TRAINING_FORWARD` with the loss, `TRAINING_BACKWARD` and `TRAINING_OPTIMIZER`.
    `TRAINING` is a phase of training that is not known more exactly.
    """

    UNKNOWN = "unknown"
    FORWARD = "forward"
    LLM_PREFILL = "llm_prefill"
    LLM_DECODE = "llm_decode"
    VISION_ENCODING = "vision_encoding"
    VISION_DECODING = "vision_decoding"
    MULTIMODAL_FUSION = "multimodal_fusion"
    TRAINING = "training"
    TRAINING_FORWARD = "training_forward"
    TRAINING_BACKWARD = "training_backward"
    TRAINING_OPTIMIZER = "training_optimizer"

    @property
    def is_training(self) -> bool:
        """True if the phase is a part of training."""
        return self.value.startswith("training")


class DataResidency(str, Enum):
    """Lifetime class of a value, by its role."""

    EPHEMERAL_ACTIVATION = "ephemeral_activation"
    PERSISTENT_WEIGHT = "persistent_weight"
    STATEFUL_KV_CACHE = "stateful_kv_cache"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    INPUT = "input"


class Modality(str, Enum):
    """The kind of data that an op works on."""

    UNKNOWN = "unknown"
    TEXT = "text"
    VISION = "vision"
    AUDIO = "audio"
    MULTIMODAL_FUSION = "fusion"


class Lineage(IntFlag):
    """Kinds of inputs that a value was computed from, as flags."""

    NOTHING = 0
    WEIGHT = 1
    TEXT = 2
    VISION = 4
    AUDIO = 8
    OTHER_INPUT = 16
    STATE = 32  # KV caches and other states that pass from one program to the next
    GRADIENT = 64
    OPTIMIZER_STATE = 128
    RANDOM = 256


class Tier(str, Enum):
    """Kind of evidence that a judgement of the workload type is based on.

    `OPERATIONS` counts ops; `STRUCTURE` uses data flow and patterns, without names of modules or classes; `MODULES`
    uses classes and names of the modules that issued the ops.
    """

    OPERATIONS = "operations"
    STRUCTURE = "structure"
    MODULES = "modules"


class WorkloadType(str, Enum):
    """Workload type of a whole program."""

    GENERIC = "generic"
    LLM = "llm"
    VISION = "vision"
    MULTIMODAL = "multimodal"
    AUDIO = "audio"
    RECOMMENDER = "recommender"
    DIFFUSION = "diffusion"
    TRAINING = "training"


@attrs.frozen
class PatternMatch:
    """A subgraph that a pattern recognised.

    Attributes:
        pattern: name of the pattern, such as `attention`.
        nodes: ids of the covered nodes, in order.
        confidence: from 0 to 1. At 0.9, nine of ten matches are right.
        reason: one sentence that a person can check against the graph.
        hints: hints for placement and scheduling, such as `{"colocate": (...)}` with value ids.
        residency: values whose residency the match reveals.
        phase: phase that the match reveals for its nodes, or None.
        modality: modality that the match reveals for its nodes, or None.
        details: facts about the match, such as `{"heads": 12, "causal": True}`.
    """

    pattern: str = attrs.field(validator=instance_of(str))
    nodes: tuple[int, ...] = attrs.field(converter=as_tuple, validator=tuple_of(int))
    confidence: float = attrs.field(validator=[attrs.validators.ge(0.0), attrs.validators.le(1.0)])
    reason: str = attrs.field(validator=instance_of(str))
    hints: Mapping[str, Any] = attrs.field(factory=dict, validator=mapping_of(str))
    residency: Mapping[int, DataResidency] = attrs.field(factory=dict, validator=mapping_of(int, DataResidency))
    phase: ExecutionPhase | None = attrs.field(default=None, validator=optional(instance_of(ExecutionPhase)))
    modality: Modality | None = attrs.field(default=None, validator=optional(instance_of(Modality)))
    details: Mapping[str, Any] = attrs.field(factory=dict, validator=mapping_of(str))


@attrs.frozen(repr=False)
class WorkloadProfile(ShortRepr):
    """Result of the stage `annotate`: classification of the program, as a whole and node by node.

    Attributes:
        workload: type of the whole program.
        phases: one per node.
        modalities: one per node.
        residency: by value; values not listed are activations.
        roles: by node, such as `attention`; nodes not listed have no role.
        patterns: all matches. Among overlapping matches, the most confident is first.
        reasons: sentences that say how the workload type was found.
        lineage: by node, the kinds of inputs that its results derive from; empty if it was not requested.
    """

    workload: WorkloadType
    phases: tuple[ExecutionPhase, ...]
    modalities: tuple[Modality, ...]
    residency: Mapping[int, DataResidency]
    roles: Mapping[int, str]
    patterns: tuple[PatternMatch, ...]
    reasons: tuple[str, ...] = ()
    lineage: tuple[Lineage, ...] = ()

    @property
    def phase(self) -> ExecutionPhase:
        """The phase of most nodes."""
        return max(set(self.phases), key=self.phases.count, default=ExecutionPhase.UNKNOWN)

    def pattern_counts(self) -> dict[str, int]:
        """Number of matches by pattern."""
        counts: dict[str, int] = {}
        for match in self.patterns:
            counts[match.pattern] = counts.get(match.pattern, 0) + 1
        return counts
