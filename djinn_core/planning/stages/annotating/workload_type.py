"""Workload type of a program, judged by three tiers: data flow, module names, and op counts.

The most confident judgement of the requested tiers decides. The data-flow tier sees no names of modules or classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.op_families import (
    CONVOLUTION,
    EMBEDDING,
    FUSED_ATTENTION,
    MATRIX_PRODUCT,
    NORMALISATION,
    OPTIMIZER,
    SOFTMAX,
    weights_of,
)
from djinn_core.ir.profile import Modality, Tier, WorkloadType
from djinn_core.planning.matching.layers import linear
from djinn_core.planning.matching.match_result import Match
from djinn_core.planning.matching.terms import op, through
from djinn_core.planning.stages.annotating.evidence import Evidence, Judgement
from djinn_core.planning.stages.annotating.inputs import LAYERS, Inputs, is_audio
from djinn_core.planning.stages.annotating.states import vocabulary_head

_NEAR = 64  # maximum number of sources of a layer's data to examine
_FLAT = 3  # dimensions of the weight of a one-dimensional convolution


def measurement_patch_layer(graph: Graph, inputs: Inputs) -> int | None:
    """Return the id of a linear layer that reads measurements, stacked or cut into patches; None if no layer does.

    Measurements are float inputs with fewer dimensions than the layer's operand. An input with equally many dimensions
    may be hidden states of an earlier program.
    """
    for operation in ("linear", "addmm"):
        for i in graph.by_op.get(operation, ()):
            if _is_of_patches(graph, inputs, graph.nodes[i]):
                return i
    return None


def _is_of_patches(graph: Graph, inputs: Inputs, node: Node) -> bool:
    weights = set(weights_of(graph, node))
    data = next((v for v in node.inputs if v not in weights), None)
    if data is None:
        return False
    raw_inputs = _read_raw(graph, inputs, graph.flow.operand(node, data), LAYERS | NORMALISATION)
    rank = len(graph.meta(data).shape)
    return bool(raw_inputs) and all(len(graph.meta(v).shape) < rank for v in raw_inputs)


def measurement_convolution(graph: Graph, inputs: Inputs) -> int | None:
    """Return the id of a convolution over time that reads measurements in a few channels, or None."""
    for operation in sorted(CONVOLUTION):
        for i in graph.by_op.get(operation, ()):
            node = graph.nodes[i]
            kernel, data = graph.meta(node.inputs[1]).shape, graph.meta(node.inputs[0]).shape
            if len(kernel) != _FLAT or is_audio(data, kernel):
                continue
            if _read_raw(graph, inputs, graph.flow.operand(node, node.inputs[0]), LAYERS):
                return i
    return None


def _read_raw(graph: Graph, inputs: Inputs, source: int, stop: frozenset[str]) -> list[int]:
    """Return the float graph inputs that reach `source` without an op in `stop`.

    Return an empty list if an earlier program computed one of these inputs.
    """
    values: list[int] = []
    for ancestor in graph.flow.ancestors(source, limit=_NEAR):
        if ancestor >= 0:
            if graph.nodes[ancestor].operation in stop:
                return []
            continue
        value = graph.inputs[~ancestor]
        if value in inputs.kinds or value in inputs.earlier:
            return []
        if value not in inputs.weights and graph.meta(value).dtype.is_floating_point:
            values.append(value)
    return values


ALL_TIERS = frozenset(Tier)


def judge(evidence: Evidence, tiers: frozenset[Tier] = ALL_TIERS) -> Judgement:
    """Return the most confident judgement of the requested tiers, or of `OPERATIONS` if these judge nothing."""
    judgements: list[Judgement] = []
    if Tier.STRUCTURE in tiers:
        judgements += judge_structure(evidence)
    if Tier.MODULES in tiers and (by_modules := _judge_by_names(evidence)) is not None:
        judgements.append(by_modules)
    if Tier.OPERATIONS in tiers or not judgements:
        judgements.append(judge_operations(evidence.graph.by_op))
    return max(judgements, key=lambda j: j.confidence)


_VISUAL_OR_AUDIO = frozenset({
    WorkloadType.AUDIO, WorkloadType.DIFFUSION, WorkloadType.MULTIMODAL, WorkloadType.VISION,
})  # fmt: skip


def _judge_by_names(evidence: Evidence) -> Judgement | None:
    """Return the judgement by names of modules and classes.

    Ignore names of vision or audio if only text enters, because a text tower is also called CLIP.
    """
    judgement = judge_modules(evidence.graph.module_names.classes)
    is_text_only = evidence.kinds == {Modality.TEXT}
    return None if judgement is None or (is_text_only and judgement.workload in _VISUAL_OR_AUDIO) else judgement


# Operations tier: counts of ops.
_CONVOLUTION_1D = frozenset({"conv1d", "conv_transpose1d"})
_BAGS = frozenset({"_embedding_bag", "_embedding_bag_forward_only", "embedding_bag"})
_GROUPS = frozenset({"group_norm", "native_group_norm"})


def judge_operations(by_op: Mapping[str, Sequence[int]]) -> Judgement:
    """Return the judgement of the first rule that the op counts match."""

    def count(operations: frozenset[str]) -> int:
        return sum(len(by_op.get(o, ())) for o in operations)

    convolutions, products, tables = count(CONVOLUTION), count(MATRIX_PRODUCT), count(EMBEDDING)
    attention = count(FUSED_ATTENTION | SOFTMAX)
    reason = f"{convolutions} convolutions, {products} products, {tables} look-ups, {attention} attentions"
    rules = (
        (any("_backward" in o for o in by_op) or count(OPTIMIZER), WorkloadType.TRAINING, 0.9),
        (count(_BAGS) and products, WorkloadType.RECOMMENDER, 0.8),
        (
            {"sin", "cos"} <= by_op.keys() and count(_GROUPS) and convolutions and not tables,
            WorkloadType.DIFFUSION,
            0.6,
        ),
        (count(_CONVOLUTION_1D) and not tables, WorkloadType.AUDIO, 0.5),
        (convolutions and tables and attention, WorkloadType.MULTIMODAL, 0.4),
        (convolutions, WorkloadType.VISION, 0.5),
        (tables and attention, WorkloadType.LLM, 0.4),
        (tables >= 3 and products, WorkloadType.RECOMMENDER, 0.4),
    )
    for fits, workload, confidence in rules:
        if fits:
            return Judgement(workload, confidence, reason)
    return Judgement(WorkloadType.GENERIC, 0.3, reason)


# The first rule that matches a class of the model, outermost first, decides. Names are those of libraries.
_NAMES = (
    (re.compile(r"CLIP|Siglip|Blip|Llava|VLForC|VisionText|Vision2Seq|ImageTextToText|Multimodal|Flava|Align|Owl"), WorkloadType.MULTIMODAL),
    (re.compile(r"UNet\dD|Transformer2D|DiT|Diffusion|Denois|MMDiT|Flux"), WorkloadType.DIFFUSION),
    (re.compile(r"CausalLM|LMHead|ForSeq2SeqLM|ForConditionalGeneration|GPT|Llama|Mistral"), WorkloadType.LLM),
    (re.compile(r"Wav2Vec|Hubert|Whisper|Speech|Audio|Encodec|ForCTC|Vocoder|HifiGan"), WorkloadType.AUDIO),
    (re.compile(r"ImageClassif|ObjectDetection|Segmentation|DepthEst|ViT|ResNet|Swin|ConvNext|Image|Vision"), WorkloadType.VISION),
    (re.compile(r"Recommend|DLRM|DeepFM|EmbeddingBag|FactorizationMachine|DeepCross"), WorkloadType.RECOMMENDER),
)  # fmt: skip


def judge_modules(classes: Iterable[str]) -> Judgement | None:
    """Return the judgement by class names; None if no name matches a rule."""
    for name in dict.fromkeys(classes):
        for pattern, workload in _NAMES:
            if pattern.search(name):
                return Judgement(workload, 0.7, f"a module is a {name}")
    return None


_TABLES_OF_A_RECOMMENDER = 3
_WAVES = op("sin", "cos")
_TIME = _WAVES >> op("cat") >> through("cat", "mul") >> linear()["first"] >> op("silu", "gelu", "mish") >> linear()


def judge_structure(evidence: Evidence) -> list[Judgement]:
    """Return a judgement for each rule that the data flow matches, the most confident first."""
    judgements = [judgement for rule in _STRUCTURES for judgement in rule(evidence)]
    return sorted(judgements, key=lambda j: -j.confidence)


def _training(evidence: Evidence) -> Iterator[Judgement]:
    if evidence.training:
        backward, updates = evidence.training.backward, evidence.training.updates
        yield Judgement(WorkloadType.TRAINING, 1.0, f"{backward} backward ops and {updates} updates of weights")


def _diffusion(evidence: Evidence) -> Iterator[Judgement]:
    step = time_embedding(evidence.graph)
    if step is not None and Modality.TEXT not in evidence.kinds:
        yield Judgement(
            WorkloadType.DIFFUSION, 0.97, f"layers read sinusoids of one number per sample, from node {step} on"
        )


def time_embedding(graph: Graph) -> int | None:
    """Return the id of the node at which a diffusion timestep becomes sinusoids, or None.

    It is recognised by two layers behind it, which convert the sinusoids to one vector per sample.
    """
    for operation in ("sin", "cos"):
        for i in graph.by_op.get(operation, ()):
            if (
                graph.nodes[i].outputs
                and len(graph.meta(graph.nodes[i].outputs[0]).shape) == 2
                and _is_time_embedding(graph, i)
            ):
                return i
    return None


def _is_time_embedding(graph: Graph, wave: int) -> bool:
    layers = [
        n for n in graph.flow.descendants(wave, frozenset({"add", "linear", "mm"}), limit=24)
        if graph.nodes[n].operation in {"linear", "addmm"}
    ]  # fmt: skip
    after = (u for n in layers for u in graph.flow.users(n))
    second = [u for u in after if graph.nodes[u].operation in {"silu", "gelu", "mish", "silu_"}]
    no_match = Match(graph, {}, {})
    return any(next(_TIME.ways(no_match, user), None) for value in second for user in graph.flow.users(value))


def _several_modalities(evidence: Evidence) -> Iterator[Judgement]:
    kinds = evidence.kinds
    if len(kinds) > 1 and evidence.fused:
        names = " and ".join(sorted(k.value for k in kinds))
        if kinds == {Modality.AUDIO, Modality.TEXT} and any(
            m.details.get("causal") is True for m in evidence.of("attention")
        ):
            yield Judgement(
                WorkloadType.AUDIO, 0.95, f"text is written, one token after the other, from audio; {names} meet"
            )
            return
        yield Judgement(WorkloadType.MULTIMODAL, 0.95, f"{names} meet in {evidence.fused} ops")


def _recommender(evidence: Evidence) -> Iterator[Judgement]:
    bags, attention = evidence.count(_BAGS), evidence.of("attention")
    pooled_bags = len(evidence.of("embedding_bag")) if not attention else 0
    if (bags or pooled_bags) and evidence.products:
        bags = bags or pooled_bags
        yield Judgement(
            WorkloadType.RECOMMENDER, 0.96, f"{bags} bags of embeddings before {evidence.products} products"
        )
    # Embedding tables alone are no evidence: a program that ends early, at a sync point, may be the start of any
    # encoder.
    elif (
        (tables := evidence.tables - _sums_of_lookups(evidence.graph)) >= _TABLES_OF_A_RECOMMENDER
        and evidence.products
        and not attention
        and not evidence.cache_phases
    ):
        reason = f"{tables} embedding tables, {evidence.products} matrix products and no attention"
        yield Judgement(WorkloadType.RECOMMENDER, 0.8, reason)
    elif not attention and not evidence.cache_phases and (node := _row_product(evidence.graph)) is not None:
        yield Judgement(WorkloadType.RECOMMENDER, 0.8, f"rows of ids are multiplied with each other in node {node}")


_ROWS = frozenset({"add", "cat", "index", "index_select", "mean", "neg", "pow", "square", "stack", "sub", "sum"})
_MULTIPLY = frozenset({"bmm", "einsum", "matmul", "mm", "mul"})


def _row_product(graph: Graph) -> int | None:
    """Return the id of the first node that multiplies embedding rows of input ids with each other, or None.

    No layer lies between look-up and product.
    """
    is_summed: dict[int, bool] = {}  # by node that holds rows: True if they come from several fields, as after a sum
    for node, sources in zip(graph.nodes, graph.flow.sources, strict=True):
        name, rows = node.operation, [s for s in sources if s in is_summed]
        if name in EMBEDDING:
            ids = sources[1] if len(sources) > 1 else 0
            shifted = ids >= 0 and graph.nodes[ids].operation == "add" and max(graph.flow.sources[ids]) < 0
            if ids < 0 or shifted:  # a shared table in which each field has its own rows
                is_summed[node.id] = shifted
        elif (name in _MULTIPLY and (len({*rows}) > 1 or (len(rows) > 1 and is_summed[rows[0]]))) or (
            name in {"pow", "square"} and rows and is_summed[rows[0]]
        ):
            return node.id
        elif rows and (name in _ROWS or graph.flow.pass_through[node.id]):
            last = graph.meta(node.outputs[0]).shape[-1:] == graph.meta(node.inputs[0]).shape[-1:]
            is_summed[node.id] = any(is_summed[s] for s in rows) or (name == "sum" and last)
    return None


def _sums_of_lookups(graph: Graph) -> int:
    """Return the number of sums of look-ups, such as word plus position plus segment embedding."""
    rows = {i for operation in EMBEDDING for i in graph.by_op.get(operation, ())}
    sums = 0
    for i in sorted(i for operation in ("add", "add_") for i in graph.by_op.get(operation, ())):
        operands = graph.flow.operands(graph.nodes[i])
        if len(operands) > 1 and all(source in rows for source in operands):
            rows.add(i)
            sums += 1
    return sums


def _language(evidence: Evidence) -> Iterator[Judgement]:
    attention, caches = evidence.of("attention"), len(evidence.cache_phases)
    causal = sum(m.details.get("causal") is True for m in attention)
    if caches:
        reason = f"{caches} KV caches beside {len(attention)} attentions" if attention else "text goes through states"
        yield Judgement(WorkloadType.LLM, 0.93, reason)
    elif (
        causal
        and evidence.kinds <= {Modality.TEXT}
        and not _picks_by_tokens(evidence.graph)
        and (evidence.kinds or measurement_patch_layer(evidence.graph, evidence.inputs) is None)
    ):  # the embedding may have been part of an earlier program
        yield Judgement(WorkloadType.LLM, 0.92, f"{causal} causal attentions, and only text as input")
    elif evidence.kinds == {Modality.TEXT} and (head := vocabulary_head(evidence.graph, evidence.inputs)) is not None:
        yield Judgement(WorkloadType.LLM, 0.85, f"node {head} has a score for each row of the table of tokens")


def _picks_by_tokens(graph: Graph) -> bool:
    """Return True if the tokens select the result position of each text, as in a CLIP text tower."""
    for i in graph.by_op.get("argmax", ()):
        sources = list(graph.flow.ancestors(graph.flow.operands(graph.nodes[i])[0], limit=_TOKENS))
        makers = [graph.nodes[s] for s in sources if s >= 0]
        if len(sources) < _TOKENS and all(node.operation in _INDEX_OPS for node in makers):
            return True
    return False


def _single_modality(evidence: Evidence) -> Iterator[Judgement]:
    reason = f"{evidence.convolutions} convolutions and {evidence.products} matrix products"
    for modality, workload in ((Modality.VISION, WorkloadType.VISION), (Modality.AUDIO, WorkloadType.AUDIO)):
        if evidence.kinds == {modality}:
            yield Judgement(workload, 0.9, f"{modality.value} input through {reason}")


def _convolutional(evidence: Evidence) -> Iterator[Judgement]:
    if evidence.convolutions > evidence.products:
        if not evidence.kinds and (entry := measurement_convolution(evidence.graph, evidence.inputs)) is not None:
            yield Judgement(WorkloadType.GENERIC, 0.6, f"measurements in a few channels enter in node {entry}")
            return
        flat = sum(len(evidence.graph.meta(n.inputs[1]).shape) == 3 for n in evidence.nodes(CONVOLUTION))
        reason = f"{evidence.convolutions} convolutions, {flat} of them in one dimension, outnumber {evidence.products} products"
        yield Judgement(WorkloadType.AUDIO if 2 * flat > evidence.convolutions else WorkloadType.VISION, 0.6, reason)


def _fallback(evidence: Evidence) -> Iterator[Judgement]:
    reason = f"{evidence.products} matrix products, {evidence.convolutions} convolutions, no rule for more"
    yield Judgement(WorkloadType.GENERIC, 0.5, reason)


_TOKENS = 12  # maximum number of sources between tokens and the position that they select
_INDEX_OPS = frozenset({"arange", "eq", "full", "mul", "ne", "scalar_tensor", "where"})
_STRUCTURES: tuple[Callable[[Evidence], Iterator[Judgement]], ...] = (
    _training, _several_modalities, _diffusion, _recommender, _language, _single_modality, _convolutional, _fallback,
)  # fmt: skip
