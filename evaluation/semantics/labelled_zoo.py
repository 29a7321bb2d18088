"""The entries of the labelled zoo, and their calls.

Models are those of `evaluation/zoo`, `library_models` and `plain_models`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn

from djinn_core.ir.graph import Graph
from evaluation.semantics import library_models  # noqa: F401 - its models are in PLAIN
from evaluation.semantics.flop_truth import flops_here, flops_written
from evaluation.semantics.ground_truth import Labelled, Truth
from evaluation.semantics.instances import Scene, instances
from evaluation.semantics.phase_truth import phases_of, workloads_of
from evaluation.semantics.plain_networks import PLAIN
from evaluation.semantics.situations import Call, eagerly, forward, generation, prefill, train
from evaluation.semantics.value_truth import caches_in, fusions, modalities_of, residency_of, single
from evaluation.zoo import building, catalogue
from evaluation.zoo.catalogue import ZOO
from evaluation.zoo.likeness import move_inputs, unsettle

REMOTE = "remote_accelerator:0"
VOCABULARY = 640
_SMALL = {99}


@attrs.frozen
class Entry:
    """An architecture with the ways of calling it.

    Attributes:
        family: a key of `phase_truth.WORKLOADS`. situations: names of the ways to call the model.
    """

    name: str
    family: str
    situations: tuple[str, ...]


LABELLED: dict[str, Entry] = {}
ONCE, WRITES = ("forward", "train"), ("forward", "prefill", "decode", "train")
EAGER = ("forward", "eager", "train")
STATIC = ("forward", "prefill", "decode", "static_decode", "eager", "train")

for _family, _situations, _names in (
    ("decoder", STATIC, """
        gpt2 gptj gpt_bigcode gpt_neo gpt_neox opt llama mistral qwen2 qwen3 gemma gemma2 gemma3 phi3 olmo2 stablelm starcoder2
        cohere granite glm4 mixtral qwen2_moe qwen3_moe olmoe phimoe gpt_oss deepseek_v3 deepseek_v2 glm cohere2 smollm3 nemotron
        olmo phi olmo3 exaone4 seed_oss arcee helium apertus ernie4_5 hunyuan_v1_dense dots1 glm4_moe granitemoeshared diffllama
        bitnet doge nanochat ministral cwm vaultgemma flex_olmo minicpm3
    """),
    ("decoder", WRITES, """
        bloom mpt ctrl falcon codegen persimmon granitemoe recurrent_gemma jamba bamba qwen3_next lfm2 modernbert_decoder biogpt xglm
        falcon_h1 nemotron_h olmo_hybrid minimax kimi_linear qwen3_5 granitemoehybrid gpt_neox_japanese jetmoe dbrx lfm2_moe
        ernie4_5_moe trocr
    """),
    ("recurrent decoder", WRITES, "mamba mamba2 falcon_mamba rwkv zamba2 xlstm"),
    ("encoder", EAGER, "bert roberta distilbert electra"),
    ("encoder", ONCE, """
        albert deberta deberta_v2 mpnet modernbert esm squeezebert roformer torch_encoder layoutlm funnel fnet lstm gru ernie rembert
        xlm_roberta perceiver longformer canine megatron_bert roberta_prelayernorm eurobert big_bird camembert
        nystromformer_landmarks convbert mobilebert tapas longformer_global big_bird_sparse yoso luke flaubert xlm ibert nomic_bert
        splinter lilt xmod
    """),
    ("decoder", ONCE, "xlnet openai reformer"),
    ("encoder-decoder", WRITES, """
        t5 mt5 mbart pegasus m2m_100 marian nllb_moe umt5 plbart blenderbot blenderbot_small mvp longt5 led pegasus_x
        bigbird_pegasus_sparse longt5_global prophetnet fsmt t5gemma
    """),
    ("encoder-decoder", (*WRITES, "eager"), "bart"),
    ("encoder-decoder", ONCE, "switch_transformers torch_transformer"),
    ("vision", EAGER, "vit deit dinov2"),
    ("vision", ONCE, """
        beit swin swinv2 vitpose_backbone yolos segformer pvt swin2sr vit_mae mobilevit levit hiera timesformer videomae
        depth_anything dpt resnet convnext convnextv2 regnet bit mobilenet_v1 mobilenet_v2 efficientnet poolformer focalnet upernet
        convolutions vgg segmenting_unet superpoint dinov2_with_registers ijepa vivit siamese vit_msn dinov3_vit glpn pvt_v2 cvt
        mobilevitv2 hgnet_v2 swiftformer vitdet textnet data2vec_vision clip_vision aimv2 vjepa2 pixio dinov3_convnext
    """),
    ("vision", ("forward",), "detr sam conditional_detr table_transformer deformable_detr eomt"),
    ("audio", EAGER, "wav2vec2 hubert"),
    ("audio", ONCE, """
        wavlm unispeech sew audio_spectrogram_transformer wav2vec2_conformer encodec univnet sound_convolutions unispeech_sat
        speech_recurrence sew_d wav2vec2_bert dac data2vec_audio parakeet
    """),
    ("speech to text", WRITES, "whisper speech_to_text moonshine"),
    ("multimodal", EAGER, "clip"),
    ("multimodal", ONCE, """
        siglip blip blip_2 vilt clap owlvit clipseg visual_question chinese_clip altclip flava bridgetower layoutlmv3
    """),
    ("illustrated decoder", WRITES, """
        llava paligemma idefics3 git qwen2_vl qwen2_5_vl internvl vipllava aya_vision smolvlm
    """),
    ("diffusion", ONCE, """
        unet_2d unet_2d_condition unet_sdxl unet_3d_condition controlnet dit pixart sd3 flux unet_1d aura_flow cog_video wan latte
        sana
    """),
    ("autoencoder", ONCE, """
        autoencoder_kl autoencoder_tiny vq_model picture_autoencoder convolutional_autoencoder autoencoder_asymmetric
    """),
    ("recommender", ONCE, "dlrm wide_and_deep deepfm cross_network two_towers neural_filtering"),
    ("generic", ONCE, """
        gru_tagger lstm_tagger elman_tagger lstm_forecast perceptron residual_perceptron autoencoder patchtsmixer patchtst
    """),
    ("speech to text", ONCE, "speecht5"),
    ("text tower", ONCE, "clip_text metaclip_text"),
    ("picture tokens", ONCE, "imagegpt"),
    ("sound tokens", ONCE, "musicgen"),
    ("dual encoder", ONCE, "metaclip_2 aimv2_lit align"),
    ("series", ONCE, "time_series_transformer informer autoformer"),
    ("series", ("forward",), "timesfm"),
):  # fmt: skip
    for _name in _names.split():
        LABELLED[_name] = Entry(_name, _family, _situations)

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
        model, inputs = model.to(REMOTE), move_inputs(inputs, REMOTE)
        for call in _calls(entry, model, inputs):
            program = call.recorded.captured.program
            yield Labelled(
                name, entry.family, call.situation, program, truth_of(entry, call, model), flops.get(call.situation)
            )


def _flops(entry: Entry, model: nn.Module, inputs: dict[str, Any]) -> dict[str, int]:
    results = {s: flops_here(model, inputs, s) for s in ("forward", "train") if s in entry.situations}
    if "decode" in entry.situations:
        results |= flops_written(model, inputs, apart=entry.family in _APART)
    return results


@contextmanager
def wide_vocabularies() -> Iterator[None]:
    """Enlarge small vocabularies of models that are made in the block to `VOCABULARY` tokens.

    The vocabularies of `evaluation/zoo` are hardly longer than the inputs.
    """

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
    graph, runs, retained = Graph(call.recorded.captured.program), call.recorded.runs, call.kept
    kinds = modalities_of(graph, retained)
    scene = Scene(graph, runs, _vocabulary(model, entry.family))
    decodes = "decode" in call.situation
    results = [*instances(scene), *caches_in(graph, retained)]
    if not decodes:
        required = entry.family in {"multimodal", "illustrated decoder", "dual encoder"}
        results += fusions(graph, runs, kinds, retained, required)
    return Truth(
        workloads=workloads_of(entry.family, call.situation),
        phases=phases_of(entry.family, call.situation, len(graph.nodes), call.recorded, kinds),
        modalities={} if decodes or entry.family == "diffusion" else single(kinds),
        residency=residency_of(graph, retained),
        instances=tuple(results),
    )


def _vocabulary(model: nn.Module, family: str) -> frozenset[int] | None:
    """Return the ids of the token embedding modules, or None if a model with tokens does not name them."""
    if not hasattr(model, "get_output_embeddings"):
        return frozenset() if family in {"diffusion", "autoencoder"} else None
    return _named(model, "get_input_embeddings")


def _named(model: nn.Module, method: str) -> frozenset[int]:
    results = set()
    for module in model.modules():
        if hasattr(module, method):
            try:
                results.add(id(getattr(module, method)()))
            except (NotImplementedError, AttributeError):
                continue  # a part without tokens
    return frozenset(results - {id(None)})


__all__ = ["LABELLED", "Entry", "labelled"]
