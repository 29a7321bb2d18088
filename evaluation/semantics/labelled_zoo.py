"""The entries of the labelled zoo, their calls, and their parts.

Models are those of `evaluation/zoo` and of `plain_models`; those of the part `blind` are in `blind_models`.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import attrs
import torch
from torch import nn

from djinn_core.ir.graph import Graph
from evaluation.semantics import (  # noqa: F401 - their models are in PLAIN
    blind_models,
    blind_networks,
    recommender_models,
    recurrent_decoders,
    unseen_models,
    unseen_networks,
    unseen_recommenders,
)
from evaluation.semantics.flop_truth import flops_here, flops_written
from evaluation.semantics.ground_truth import Labelled, Truth
from evaluation.semantics.instances import Scene, instances
from evaluation.semantics.phase_truth import phases_of, workloads_of
from evaluation.semantics.plain_networks import PLAIN
from evaluation.semantics.situations import Call, eagerly, forward, generation, prefill, train
from evaluation.semantics.value_truth import caches_in, fusions, modalities_of, residency_of, single
from evaluation.zoo import building, catalogue
from evaluation.zoo.catalogue import ZOO
from evaluation.zoo.likeness import moved, unsettle

Part = Literal["development", "report", "blind", "unseen"]
REMOTE = "remote_accelerator:0"
VOCABULARY = 640
_SMALL = {99}
_SEED = "2026-11-21"


@attrs.frozen
class Entry:
    """An architecture with the ways of calling it.

    Attributes:
        family: as in `phase_truth.WORKLOADS`.
        attentions: number of attentions in a forward pass by its configuration; None if unknown.
        blind: True if it was labelled before any matching, to be scored once at the end.
        unseen: True if it was selected and labelled by rules that were fixed before.
    """

    name: str
    family: str
    situations: tuple[str, ...]
    attentions: int | None = None
    blind: bool = False
    unseen: bool = False

    @property
    def part(self) -> Part:
        """Return unseen, blind, development or report. The latter two are drawn by name and seed, so new entries change no others."""
        if self.unseen:
            return "unseen"
        if self.blind:
            return "blind"
        digest = hashlib.blake2b(f"{_SEED}:{self.name}".encode(), digest_size=8).digest()
        return "development" if digest[0] % 2 else "report"


LABELLED: dict[str, Entry] = {}
ONCE, WRITES = ("forward", "train"), ("forward", "prefill", "decode", "train")
EAGER = ("forward", "eager", "train")
STATIC = ("forward", "prefill", "decode", "static_decode", "eager", "train")


def _enter(
    family: str, situations: tuple[str, ...], names: str, attentions: int | None = None, blind: bool = False
) -> None:
    for name in names.split():
        LABELLED[name] = Entry(name, family, situations, attentions, blind)


_enter("decoder", STATIC, "gpt2 gptj gpt_bigcode gpt_neo gpt_neox opt llama mistral qwen2 qwen3 gemma gemma2 gemma3 phi3 olmo2 "
       "stablelm starcoder2 cohere granite glm4 mixtral qwen2_moe qwen3_moe olmoe phimoe gpt_oss deepseek_v3", 2)  # fmt: skip
_enter("decoder", WRITES, "bloom mpt ctrl falcon codegen persimmon granitemoe", 2)
_enter("recurrent decoder", WRITES, "mamba mamba2 falcon_mamba rwkv", 0)
_enter("decoder", WRITES, "recurrent_gemma jamba bamba qwen3_next lfm2", 1)
_enter("encoder", EAGER, "bert roberta distilbert electra", 2)
_enter("encoder", ONCE, "albert deberta deberta_v2 mpnet modernbert esm squeezebert "
       "roformer torch_encoder layoutlm", 2)  # fmt: skip
_enter("decoder", ONCE, "xlnet", 2)  # writes without a cache, from the beginning each time
_enter("encoder", ONCE, "funnel", 4)
_enter("encoder", ONCE, "fnet", 0)
_enter("encoder-decoder", WRITES, "t5 mt5 mbart pegasus m2m_100 marian nllb_moe", 6)
_enter("encoder-decoder", (*WRITES, "eager"), "bart", 6)
_enter("encoder-decoder", ONCE, "switch_transformers", 26)
_enter("encoder-decoder", ONCE, "torch_transformer", 5)
_enter("vision", EAGER, "vit deit dinov2", 2)
_enter("vision", ONCE, "beit swin swinv2 vitpose_backbone yolos segformer pvt swin2sr", 2)
_enter("vision", ONCE, "vit_mae mobilevit levit hiera timesformer videomae depth_anything dpt")
_enter("vision", ("forward",), "detr sam")
_enter("vision", ONCE, "resnet convnext convnextv2 regnet bit mobilenet_v1 mobilenet_v2 efficientnet poolformer focalnet upernet "
       "convolutions vgg segmenting_unet superpoint", 0)  # fmt: skip
_enter("audio", EAGER, "wav2vec2 hubert", 2)
_enter("audio", ONCE, "wavlm unispeech sew audio_spectrogram_transformer wav2vec2_conformer", 2)
_enter("audio", ONCE, "encodec univnet sound_convolutions", 0)
_enter("speech to text", WRITES, "whisper speech_to_text moonshine", 6)
_enter("multimodal", EAGER, "clip", 4)
_enter("multimodal", ONCE, "siglip", 5)
_enter("multimodal", ONCE, "blip blip_2 vilt clap owlvit clipseg")
_enter("illustrated decoder", WRITES, "llava paligemma idefics3 git", 4)
_enter("illustrated decoder", WRITES, "qwen2_vl", 6)
_enter(
    "diffusion", ONCE, "unet_2d unet_2d_condition unet_sdxl unet_3d_condition controlnet dit pixart sd3 flux unet_1d"
)
_enter("autoencoder", ONCE, "autoencoder_kl autoencoder_tiny vq_model")
_enter("recommender", ONCE, "dlrm wide_and_deep deepfm cross_network two_towers neural_filtering", 0)
_enter("encoder", ONCE, "lstm gru", 0)  # recurrent networks for masked words
_enter("generic", ONCE, "gru_tagger lstm_tagger elman_tagger lstm_forecast perceptron residual_perceptron "
       "autoencoder patchtsmixer", 0)  # fmt: skip
_enter("generic", ONCE, "patchtst", 2)

_enter("decoder", STATIC, "deepseek_v2 glm cohere2 smollm3 nemotron olmo phi", 2)
_enter("decoder", WRITES, "modernbert_decoder biogpt xglm", 2)
_enter("recurrent decoder", WRITES, "zamba2")
_enter("encoder", ONCE, "ernie rembert xlm_roberta perceiver longformer canine")
_enter("encoder-decoder", WRITES, "umt5 plbart blenderbot", 6)
_enter("vision", ONCE, "dinov2_with_registers ijepa vivit", 2)
_enter("vision", ONCE, "siamese", 0)
_enter("audio", ONCE, "unispeech_sat", 2)
_enter("audio", ONCE, "speech_recurrence", 0)
_enter("speech to text", ONCE, "speecht5", 3)
_enter("multimodal", ONCE, "visual_question", 0)
_enter("illustrated decoder", WRITES, "qwen2_5_vl")
_enter("diffusion", ONCE, "aura_flow cog_video")
_enter("autoencoder", ONCE, "picture_autoencoder convolutional_autoencoder", 0)

_enter("recurrent decoder", WRITES, "xlstm", 0)
_enter("decoder", WRITES, "falcon_h1 nemotron_h olmo_hybrid minimax kimi_linear qwen3_5 granitemoehybrid")
_enter("recommender", ONCE, "factorization_machine one_table_fm neural_fm dlrm_offsets dlrm_multi_hot deep_crossing "
       "mixture_of_tasks", 0)  # fmt: skip

# Labelled before any matching, scored once at the end, and never tuned on.
_enter("decoder", STATIC, "olmo3 exaone4 seed_oss arcee helium apertus ernie4_5 hunyuan_v1_dense dots1 glm4_moe "
       "granitemoeshared", 2, blind=True)  # fmt: skip
_enter("decoder", STATIC, "diffllama", 4, blind=True)
_enter("decoder", ONCE, "openai small_gpt small_llama small_mixture", 2, blind=True)
_enter("decoder", WRITES, "gpt_neox_japanese", 2, blind=True)
_enter("encoder", ONCE, "megatron_bert roberta_prelayernorm eurobert big_bird camembert", 2, blind=True)
_enter("encoder-decoder", WRITES, "blenderbot_small mvp longt5", 6, blind=True)
_enter("vision", ONCE, "vit_msn dinov3_vit glpn pvt_v2", 2, blind=True)
_enter("vision", ONCE, "cvt", 3, blind=True)
_enter("vision", ONCE, "mobilevitv2", blind=True)
_enter("vision", ONCE, "hgnet_v2 mlp_mixer densenet inverted_residuals policy", 0, blind=True)
_enter("audio", ONCE, "sew_d wav2vec2_bert", 2, blind=True)
_enter("audio", ONCE, "dac wavenet", 0, blind=True)
_enter("multimodal", ONCE, "chinese_clip altclip", 4, blind=True)
_enter("illustrated decoder", WRITES, "internvl", 4, blind=True)
_enter("diffusion", ONCE, "wan", 4, blind=True)
_enter("diffusion", ONCE, "latte", 6, blind=True)
_enter("diffusion", ONCE, "sana", blind=True)
_enter("diffusion", ONCE, "small_denoiser", 0, blind=True)
_enter("autoencoder", ONCE, "autoencoder_asymmetric", blind=True)
_enter("recommender", ONCE, "autoint", 2, blind=True)

# Selected and labelled by rules that were fixed before any run: evaluation/results/unseen.md.
for _family, _situations, _names in (
    ("encoder", ONCE, ("nystromformer_landmarks convbert mobilebert tapas longformer_global big_bird_sparse yoso luke flaubert xlm ibert "
     "nomic_bert splinter lilt xmod")),
    ("text tower", ONCE, "clip_text metaclip_text"),
    ("decoder", STATIC, "bitnet doge nanochat ministral cwm vaultgemma flex_olmo minicpm3"),
    ("decoder", WRITES, "jetmoe dbrx lfm2_moe ernie4_5_moe trocr"),
    ("decoder", ONCE, "reformer"),
    ("encoder-decoder", WRITES, "led pegasus_x bigbird_pegasus_sparse longt5_global prophetnet fsmt t5gemma"),
    ("vision", ONCE, "swiftformer vitdet textnet data2vec_vision clip_vision aimv2 vjepa2 pixio dinov3_convnext"),
    ("vision", ("forward",), "conditional_detr table_transformer deformable_detr eomt"),
    ("picture tokens", ONCE, "imagegpt"),
    ("sound tokens", ONCE, "musicgen"),
    ("dual encoder", ONCE, "metaclip_2 aimv2_lit align"),
    ("multimodal", ONCE, "flava bridgetower layoutlmv3"),
    ("illustrated decoder", WRITES, "vipllava aya_vision smolvlm"),
    ("audio", ONCE, "data2vec_audio parakeet"),
    ("series", ONCE, "time_series_transformer informer autoformer"),
    ("series", ("forward",), "timesfm"),
    ("encoder", ONCE, ("performer linear_transformer cosformer efficient_attention linformer longnet sliding_window "
     "talking_heads bahdanau gmlp lstm_next_word")),
    ("vision", ONCE, "axial_transformer slot_attention non_local_network resnext efficientnet_v1 attention_unet"),
    ("recommender", ONCE, ("autoint_multihead dcn_v2_stacked dlrm_packed deepfm_dense wide_and_deep_one_table ncf_gmf "
     "mask_net gated_cross_network fibinet")),
    ("series", ONCE, "temporal_convolutions gru_series point_net"),
    ("graph", ONCE, "graph_sage graph_attention"),
    ("generic", ONCE, "radiance_field"),
):  # fmt: skip
    for _name in _names.split():
        LABELLED[_name] = Entry(_name, _family, _situations, unseen=True)

for _name in "llama gpt2 gpt_neox opt qwen2 granite olmo2 stablelm phi glm".split():
    LABELLED[_name] = attrs.evolve(LABELLED[_name], situations=(*LABELLED[_name].situations, "quantised_decode"))


_APART = frozenset(
    {"encoder-decoder", "speech to text", "illustrated decoder"}
)  # `generate()` calls encoders separately


def labelled(name: str, count_flops: bool = False) -> Iterator[Labelled]:
    """Yield the programs of one entry with their ground truth."""
    entry = LABELLED[name]
    architecture = ZOO.get(name) or PLAIN[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        with wide_vocabularies():
            model, inputs = architecture.make()
        unsettle(model)
        flops = _flops(entry, model, inputs) if count_flops else {}
        model, inputs = model.to(REMOTE), moved(inputs, REMOTE)
        for call in _calls(entry, model, inputs):
            program = call.recorded.captured.program
            yield Labelled(
                name, entry.family, call.situation, program, truth_of(entry, call, model), flops.get(call.situation)
            )


def _flops(entry: Entry, model: nn.Module, inputs: dict[str, Any]) -> dict[str, int]:
    found = {s: flops_here(model, inputs, s) for s in ("forward", "train") if s in entry.situations}
    if "decode" in entry.situations:
        found |= flops_written(model, inputs, apart=entry.family in _APART)
    return found


@contextmanager
def wide_vocabularies() -> Iterator[None]:
    """Enlarge the vocabularies of models in the block, because those of `evaluation/zoo` have hardly more words than inputs."""

    def wide(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: VOCABULARY if k == "vocab_size" and v in _SMALL else wide(v) for k, v in value.items()}
        return value

    def made(module: str, model: str, config: str, **settings: Any) -> nn.Module:
        return pretrained(module, model, config, **wide(settings))

    pretrained = building.pretrained
    modules = [building, *(m for m in vars(catalogue).values() if hasattr(m, "pretrained"))]
    for module in modules:
        module.pretrained = made
    try:
        yield
    finally:
        for module in modules:
            module.pretrained = pretrained


def _calls(entry: Entry, model: nn.Module, inputs: dict[str, object]) -> Iterator[Call]:
    if "forward" in entry.situations:
        yield forward(model, inputs)
    apart = entry.family in _APART
    if "prefill" in entry.situations and apart:
        yield prefill(model, inputs)
    if "decode" in entry.situations:
        yield from (call for call in generation(model, inputs) if not apart or call.situation != "prefill")
    for other in ("static_decode", "quantised_decode"):
        if other in entry.situations:
            yield from generation(model, inputs, other)
    if "eager" in entry.situations:
        yield from eagerly(model, inputs, "decode" in entry.situations)
    if "train" in entry.situations:
        yield train(model, inputs)


def truth_of(entry: Entry, call: Call, model: nn.Module) -> Truth:
    """Return the ground truth of a recorded call."""
    graph, runs, kept = Graph(call.recorded.captured.program), call.recorded.runs, call.kept
    kinds = modalities_of(graph, kept)
    scene = Scene(graph, runs, _vocabulary(model, entry.family))
    decodes = "decode" in call.situation
    found = [*instances(scene), *caches_in(graph, kept)]
    if not decodes:
        required = entry.family in {"multimodal", "illustrated decoder", "dual encoder"}
        found += fusions(graph, runs, kinds, kept, required)
    return Truth(
        workloads=workloads_of(entry.family, call.situation),
        phases=phases_of(entry.family, call.situation, len(graph.nodes), call.recorded, kinds),
        modalities={} if decodes or entry.family == "diffusion" else single(kinds),
        residency=residency_of(graph, kept),
        instances=tuple(found),
    )


def _vocabulary(model: nn.Module, family: str) -> frozenset[int] | None:
    """Return the identities of the token embeddings, if the model names them."""
    if not hasattr(model, "get_output_embeddings"):
        return frozenset() if family in {"diffusion", "autoencoder"} else None
    return _named(model, "get_input_embeddings")


def _named(model: nn.Module, method: str) -> frozenset[int]:
    found = set()
    for module in model.modules():
        if hasattr(module, method):
            try:
                found.add(id(getattr(module, method)()))
            except (NotImplementedError, AttributeError):
                continue  # a part without tokens
    return frozenset(found - {id(None)})


__all__ = ["LABELLED", "Entry", "Part", "labelled"]
