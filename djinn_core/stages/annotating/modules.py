"""The tier of modules: the workload type from the names of the classes that issued the ops."""

from __future__ import annotations

import re
from collections.abc import Iterable

from djinn_core.ir.profile import WorkloadType
from djinn_core.stages.annotating.evidence import Judgement

# The first that fits a class of the model, outermost first, decides; names are those that libraries use.
_RULES = (
    (re.compile(r"CLIP|Siglip|Blip|Llava|VLForC|VisionText|Vision2Seq|ImageTextToText|Multimodal|Flava|Align|Owl"), WorkloadType.MULTIMODAL),
    (re.compile(r"UNet\dD|Transformer2D|DiT|Diffusion|Denois|MMDiT|Flux"), WorkloadType.DIFFUSION),
    (re.compile(r"CausalLM|LMHead|ForSeq2SeqLM|ForConditionalGeneration|GPT|Llama|Mistral"), WorkloadType.LLM),
    (re.compile(r"Wav2Vec|Hubert|Whisper|Speech|Audio|Encodec|ForCTC|Vocoder|HifiGan"), WorkloadType.AUDIO),
    (re.compile(r"ImageClassif|ObjectDetection|Segmentation|DepthEst|ViT|ResNet|Swin|ConvNext|Image|Vision|Conv2d"), WorkloadType.VISION),
    (re.compile(r"Recommend|DLRM|DeepFM|EmbeddingBag|FactorizationMachine|DeepCross"), WorkloadType.RECOMMENDER),
)  # fmt: skip


def judge_modules(classes: Iterable[str]) -> Judgement | None:
    """Judge the workload type by class names; None where no name matches a rule."""
    for name in dict.fromkeys(classes):
        for pattern, workload in _RULES:
            if pattern.search(name):
                return Judgement(workload, 0.7, f"a module is a {name}")
    return None
