"""Ground truth of phases: the right phases of each node, by the way the model was called and by the node's module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from djinn.planning import ExecutionPhase as Phase
from djinn.planning import Modality, WorkloadType
from evaluation.semantics.ground_truth import ModuleRun
from evaluation.semantics.module_runs import ModuleRuns

FORWARD, PREFILL, DECODE = Phase.FORWARD, Phase.LLM_PREFILL, Phase.LLM_DECODE
SEEING, DRAWING, FUSING = Phase.VISION_ENCODING, Phase.VISION_DECODING, Phase.MULTIMODAL_FUSION
_OF_CALL = {"forward": FORWARD, "prefill": PREFILL, "decode": DECODE, "static_decode": DECODE}
_TOWERS = ("vision_model", "vision_tower", "vision_encoder", "visual", "vision_embed_tokens", "image_encoder")
_DECODERS = ("head", "decoder", "neck", "upsample")

# Several types if the field has no single word. A text encoder does not generate text. Speech recognition is audio,
# then text. An image autoencoder is half of a diffusion model. The language model of a multimodal model decodes like
# any other.
WORKLOADS: dict[str, tuple[WorkloadType, ...]] = {
    "decoder": (WorkloadType.LLM,),
    "recurrent decoder": (WorkloadType.LLM,),
    "encoder-decoder": (WorkloadType.LLM,),
    "encoder": (WorkloadType.GENERIC, WorkloadType.LLM),
    "vision": (WorkloadType.VISION,),
    "audio": (WorkloadType.AUDIO,),
    "speech to text": (WorkloadType.AUDIO, WorkloadType.MULTIMODAL),
    "multimodal": (WorkloadType.MULTIMODAL,),
    "illustrated decoder": (WorkloadType.MULTIMODAL,),
    "diffusion": (WorkloadType.DIFFUSION,),
    "autoencoder": (WorkloadType.VISION, WorkloadType.DIFFUSION),
    "recommender": (WorkloadType.RECOMMENDER,),
    "generic": (WorkloadType.GENERIC,),
    "series": (WorkloadType.GENERIC,),
    "text tower": (WorkloadType.GENERIC,),
    "dual encoder": (WorkloadType.MULTIMODAL,),
    "picture tokens": (WorkloadType.VISION, WorkloadType.LLM),
    "sound tokens": (WorkloadType.AUDIO, WorkloadType.LLM),
}
_DECODING: dict[str, tuple[WorkloadType, ...]] = {
    "speech to text": (WorkloadType.AUDIO, WorkloadType.MULTIMODAL, WorkloadType.LLM),
    "illustrated decoder": (WorkloadType.MULTIMODAL, WorkloadType.LLM),
}


def workloads_of(family: str, situation: str) -> frozenset[WorkloadType]:
    """Return the right workload types of a program."""
    if situation == "train":
        return frozenset({WorkloadType.TRAINING})
    if "decode" in situation and family in _DECODING:
        return frozenset(_DECODING[family])
    return frozenset(WORKLOADS[family])


def phases_of(
    family: str, situation: str, count: int, recorded: ModuleRuns, kinds: Mapping[int, frozenset[Modality]]
) -> dict[int, frozenset[Phase]]:
    """Return the right phases by node."""
    runs, situation = recorded.runs, situation.removeprefix("eager_")
    if situation == "train":
        return {node: frozenset({_part_of_step(node, recorded.marks)}) for node in range(count)}
    if "decode" in situation:
        return dict.fromkeys(range(count), frozenset({Phase.LLM_DECODE}))
    if family == "vision":
        return _painted(count, {SEEING}, runs, _DECODERS, {SEEING, DRAWING})
    if family == "autoencoder":
        return _painted(count, {SEEING, DRAWING}, runs, ("encoder",), {SEEING}) | _inside(runs, ("decoder",), {DRAWING})
    if family == "diffusion":  # a step towards an image: a forward pass, or part of the generation
        return dict.fromkeys(range(count), frozenset({FORWARD, DRAWING}))
    if family in {"encoder-decoder", "speech to text"} and situation == "prefill":
        return _painted(count, {PREFILL}, runs, ("encoder",), {FORWARD, PREFILL})
    if family in {"multimodal", "illustrated decoder", "dual encoder"}:
        return _multimodal(situation, count, runs, kinds)
    return dict.fromkeys(range(count), frozenset({_OF_CALL[situation]}))


def _part_of_step(node: int, marks: Mapping[str, int]) -> Phase:
    if node < marks["backward"]:
        return Phase.TRAINING_FORWARD
    return Phase.TRAINING_BACKWARD if node < marks["optimizer"] else Phase.TRAINING_OPTIMIZER


def _multimodal(
    situation: str, count: int, runs: Sequence[ModuleRun], kinds: Mapping[int, frozenset[Modality]]
) -> dict[int, frozenset[Phase]]:
    """Return phases by node: vision in vision towers and for images alone, the situation's phase for text alone.

    For nodes that depend on both modalities, fusion and the situation's phase are right. Other nodes have no label.
    """
    call = _OF_CALL[situation]
    results: dict[int, frozenset[Phase]] = {}
    for node in range(count):
        kind = kinds.get(node, frozenset())
        if kind == {Modality.VISION}:
            results[node] = frozenset({SEEING})
        elif kind == {Modality.TEXT}:
            results[node] = frozenset({call})
        elif len(kind) > 1:
            results[node] = frozenset({FUSING, call})
    return results | _inside(runs, _TOWERS, {SEEING})


def _painted(
    count: int, usual: set[Phase], runs: Sequence[ModuleRun], names: tuple[str, ...], phases: set[Phase]
) -> dict[int, frozenset[Phase]]:
    return dict.fromkeys(range(count), frozenset(usual)) | _inside(runs, names, phases)


def _inside(runs: Sequence[ModuleRun], names: tuple[str, ...], phases: set[Phase]) -> dict[int, frozenset[Phase]]:
    """Return `phases` for each node that was recorded in a module whose name ends with one of `names`."""
    spans = [run.span for run in runs if run.path.rpartition(".")[2].endswith(names)]
    return {node: frozenset(phases) for span in spans for node in span}
