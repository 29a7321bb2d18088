"""The phase of each node, from the workload, the kind of data that it works on, and what patterns reveal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from djinn_core.ir.profile import ExecutionPhase, Modality, WorkloadType
from djinn_core.stages.annotating.drawing import drawn_from
from djinn_core.stages.annotating.evidence import Evidence

_SEEN = ExecutionPhase.VISION_ENCODING


def phases_of(evidence: Evidence, workload: WorkloadType) -> tuple[ExecutionPhase, ...]:
    """One phase for each node."""
    count = len(evidence.graph.nodes)
    training = evidence.training.phases
    if training:
        return tuple([training.get(n, ExecutionPhase.TRAINING) for n in range(count)])
    phases = _by_modality(evidence, workload)
    if workload is WorkloadType.VISION:
        start = drawn_from(evidence.graph)
        phases[start:] = [ExecutionPhase.VISION_DECODING] * (count - start)
    for match in reversed(evidence.matches):  # the surest last, so that it counts
        phase = evidence.reveals(match)
        if phase is not None:
            for i in match.nodes:
                phases[i] = phase
    return tuple(phases)


def _text_phase(evidence: Evidence) -> ExecutionPhase:
    """Phase of the program's text part: the phase of most caches."""
    cached = Counter(evidence.cached).most_common(1)
    return cached[0][0] if cached else ExecutionPhase.FORWARD


def _by_modality(evidence: Evidence, workload: WorkloadType) -> list[ExecutionPhase]:
    text = _text_phase(evidence)
    if workload is WorkloadType.DIFFUSION:
        return [ExecutionPhase.FORWARD] * len(evidence.modalities)
    if workload is WorkloadType.VISION:
        return [_SEEN] * len(evidence.modalities)
    kinds = evidence.kinds | set(evidence.inputs.earlier.values())
    fuses = (
        not kinds.isdisjoint({Modality.VISION, Modality.MULTIMODAL_FUSION}) and not evidence.cached
    )  # speech that becomes text is no fusion
    usual = {
        Modality.UNKNOWN: text,
        Modality.TEXT: text,
        Modality.VISION: _SEEN,
        Modality.AUDIO: text,
        Modality.MULTIMODAL_FUSION: ExecutionPhase.MULTIMODAL_FUSION if fuses else text,
    }
    return [usual[m] for m in _with_neighbours(evidence.modalities)]


def _with_neighbours(modalities: Sequence[Modality]) -> list[Modality]:
    """Ops that no data leads to, and whose results no data meets, are taken for part of what comes next."""
    found, after = list(modalities), Modality.UNKNOWN
    for node in range(len(found) - 1, -1, -1):
        if found[node] is Modality.UNKNOWN:
            found[node] = after
        else:
            after = found[node]
    return found
