"""Expected pattern instances of a program, derived from the modules of its instructions."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs
from torch import nn

from djinn.planning import Graph, Node, storage_of
from evaluation.semantics import class_rules as rules
from evaluation.semantics.ground_truth import Instance, ModuleRun
from evaluation.semantics.module_runs import ancestors

# The essential op of an attention, fused or not.
WEIGHING = frozenset({
    "_safe_softmax", "_scaled_dot_product_attention_math", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable", "_softmax", "scaled_dot_product_attention", "softmax",
})  # fmt: skip
PRODUCTS = frozenset({"_grouped_mm", "addmm", "baddbmm", "bmm", "einsum", "linear", "matmul", "mm"})
_CHOICES = frozenset({"argmax", "topk"})

Test = Callable[[nn.Module], bool]


@attrs.define
class Scene:
    """A program's nodes and module calls.

    Attributes:
        graph: graph of the program. runs: the module calls.
        tokens: ids of the token embedding modules, or None if the model does not name them.
    """

    graph: Graph
    runs: Sequence[ModuleRun]
    tokens: frozenset[int] | None = None

    def find(self, test: Test) -> list[int]:
        """Return the indices of runs whose modules pass the test."""
        return [i for i, run in enumerate(self.runs) if test(run.module)]

    def outermost(self, test: Test) -> list[int]:
        """Return the indices of runs whose modules pass the test, without runs inside such a run."""
        results = set(self.find(test))
        return [i for i in sorted(results) if not any(a in results for a in list(ancestors(self.runs, i))[1:])]

    def inside(self, indices: Iterable[int]) -> set[int]:
        """Return the ids of the nodes that the runs with these indices recorded."""
        return {node for i in indices for node in self.runs[i].span}

    def ops(self, span: Iterable[int], operations: frozenset[str]) -> frozenset[int]:
        """Return the ids of the nodes of `span` with one of these ops."""
        return frozenset(i for i in span if self.graph.nodes[i].operation in operations)

    def node(self, index: int) -> Node:
        """Return the node with that id."""
        return self.graph.nodes[index]


def instances(scene: Scene) -> tuple[Instance, ...]:
    """Return all expected instances, except caches and fusion points, which do not follow from modules."""
    attentions = tuple(_attentions(scene))
    mixtures = tuple(_mixtures(scene))
    blocks = tuple(_blocks(scene, attentions, mixtures))
    return (
        *attentions,
        *_inside_others(scene),
        *_perceptrons(scene, attentions, blocks),
        *_convolutions(scene),
        *_tables(scene),
        *_of_recommenders(scene),
    )


def _attentions(scene: Scene) -> Iterator[Instance]:
    for index in scene.outermost(rules.is_attention):
        run = scene.runs[index]
        cores = sorted(scene.ops(run.span, WEIGHING) - scene.inside(scene.find(rules.chooses_heads)))
        if rules.is_in_parts(run.module) and len(cores) != 1:
            yield _in_parts(scene, run, frozenset(cores))
            continue
        for core in cores:
            yield Instance("attention", frozenset({core}), frozenset(run.span), where=run.path)


def _inside_others(scene: Scene) -> Iterator[Instance]:
    """Yield optional instances of attention: similar ops in recurrences, embedding bags and feature interactions."""
    others = scene.inside(scene.outermost(rules.is_recurrent)) | scene.inside(scene.outermost(rules.is_bag))
    others |= scene.inside(scene.outermost(rules.is_interaction))
    for node in sorted(scene.ops(others, WEIGHING | PRODUCTS)):
        yield Instance("attention", frozenset({node}), frozenset(others), required=False, where="inside something else")


def _in_parts(scene: Scene, run: ModuleRun, softmaxes: frozenset[int]) -> Instance:
    """Return the instance of an attention that is computed in several softmaxes, or in none.

    A match must cover half of the core: softmaxes, else exponentials of decomposed softmaxes, else products of results.
    """
    options = {storage_of(v) for v in scene.graph.inputs}
    products = frozenset(
        i for i in scene.ops(run.span, PRODUCTS) if not options.intersection(map(storage_of, scene.node(i).inputs))
    )
    core = softmaxes or scene.ops(run.span, frozenset({"exp"})) & _after_sums(scene, run) or products
    return Instance("attention", core, frozenset(run.span), where=run.path, enough=0.5)


def _after_sums(scene: Scene, run: ModuleRun) -> frozenset[int]:
    """Return the exponentials of a decomposed softmax, if the module has a logarithm of a sum of exponentials."""
    return frozenset(run.span) if scene.ops(run.span, frozenset({"logsumexp"})) else frozenset()


def _mixtures(scene: Scene) -> Iterator[Instance]:
    for index in scene.outermost(rules.is_mixture):
        run = scene.runs[index]
        choice = scene.ops(run.span, _CHOICES) or scene.ops(run.span, frozenset({"max"}))
        if choice:  # layers of this class may be dense
            yield Instance("moe", choice, frozenset(run.span), where=run.path)


def _blocks(scene: Scene, attentions: Sequence[Instance], mixtures: Sequence[Instance]) -> Iterator[int]:
    """Yield the innermost layers with both an attention and a feed-forward network or mixture of experts."""
    within = set(scene.find(rules.is_attention))
    candidates = [
        i
        for i in scene.find(rules.may_be_block)
        if not within & set(ancestors(scene.runs, i))
        and any(a.core <= set(scene.runs[i].span) for a in attentions)
        and (_linear(scene, i) or any(m.core <= set(scene.runs[i].span) for m in mixtures))
    ]
    for index in candidates:
        if any(index in list(ancestors(scene.runs, other))[1:] for other in candidates):
            continue
        yield index


def _linear(scene: Scene, index: int) -> list[int]:
    """Return the linear layers in a run that belong to no attention, mixture, norm or recurrence: its feed-forward network."""
    others = (rules.is_attention, rules.is_mixture, rules.is_norm, rules.is_recurrent)
    results = []
    for i in scene.find(rules.is_linear):
        outwards = list(ancestors(scene.runs, i))
        if index not in outwards:
            continue
        between = [scene.runs[j].module for j in outwards[: outwards.index(index)]]
        if not any(test(module) for test in others for module in between):
            results.append(i)
    return results


def _perceptrons(scene: Scene, attentions: Sequence[Instance], blocks: Sequence[int]) -> Iterator[Instance]:
    """Yield feed-forward networks: of blocks, and modules with such a class name. Other linear layers are optional."""
    used_nodes: set[int] = set()
    attended = {n for a in attentions for n in a.span}
    for index in blocks:
        run = scene.runs[index]
        for core in _networks(scene, index):
            if len(core) > 1:
                used_nodes |= core
                required = not rules.is_unusual(run.module)
                yield Instance("mlp", core, frozenset(run.span) - attended, required=required, where=run.path)
    mixed = scene.inside(scene.outermost(rules.is_mixture))
    for index in scene.outermost(rules.is_mlp):
        run = scene.runs[index]
        linear = (i for i in scene.find(rules.is_linear) if index in ancestors(scene.runs, i))
        core = scene.ops(scene.inside(linear), PRODUCTS)
        if len(core) > 1 and not core & used_nodes:
            used_nodes |= core
            yield Instance("mlp", core, frozenset(run.span), required=not core & mixed, where=run.path)
    yield from _left_open(scene, used_nodes)


def _networks(scene: Scene, block: int) -> Iterator[frozenset[int]]:
    """Yield the products of each feed-forward network of a block: a pair of layers, a named module, or all layers."""
    layers: dict[int, list[int]] = defaultdict(list)
    if rules.has_several_networks(scene.runs[block].module):
        yield from (scene.ops(scene.inside(pair), PRODUCTS) for pair in _pairs(scene, block))
        return
    for i in _linear(scene, block):
        if not scene.runs[i].path.endswith("temporal_dense"):  # the last layer of TimeSformer's temporal attention
            callers = [a for a in ancestors(scene.runs, i) if rules.is_mlp(scene.runs[a].module) and a > block]
            layers[callers[0] if callers else block].append(i)
    other_layers = [i for i in layers if i != block]
    for i in other_layers or [block]:
        yield scene.ops(scene.inside(layers[i]), PRODUCTS)


def _pairs(scene: Scene, block: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of consecutive linear layers, of which the first widens and the second narrows again."""
    layers = _linear(scene, block)
    for one, other in itertools.pairwise(layers):
        first, second = (scene.runs[i].module.weight.shape for i in (one, other))
        if first == second[::-1] and first[0] > first[1]:
            yield one, other


def _left_open(scene: Scene, taken: set[int]) -> Iterator[Instance]:
    """Yield optional instances of linear layers not in `taken`, because two such layers may be a network."""
    attention = scene.inside(scene.outermost(rules.is_attention)) | scene.inside(scene.outermost(rules.is_recurrent))
    mixed = scene.inside(scene.outermost(rules.is_mixture))
    core = scene.ops(scene.inside(scene.find(rules.is_linear)) | mixed, PRODUCTS) - taken - attention
    span = frozenset(range(len(scene.graph.nodes))) - attention - taken
    for node in sorted(core):
        yield Instance("mlp", frozenset({node}), span, required=False, where="elsewhere")


def _convolutions(scene: Scene) -> Iterator[Instance]:
    recurrent = scene.inside(scene.outermost(rules.is_recurrent))
    matched_nodes: set[int] = set()
    convolutions = scene.find(rules.is_convolution)
    for index in convolutions:
        run = scene.runs[index]
        core = frozenset(i for i in run.span if "conv" in scene.node(i).operation)
        matched_nodes |= core
        if core:
            span = _neighbourhood(scene, index, convolutions)
            yield Instance("convolution", core, span, required=not core & recurrent, where=run.path)
    for node in scene.graph.nodes:
        if "conv" in node.operation and "backward" not in node.operation and node.id not in matched_nodes:
            yield Instance(
                "convolution", frozenset({node.id}), frozenset(range(len(scene.graph.nodes))), required=False
            )


def _neighbourhood(scene: Scene, index: int, convolutions: Sequence[int]) -> frozenset[int]:
    """Return the nodes that may be norms and activations of convolution `index`.

    These are the nodes of the innermost module that contains it and another convolution, or all nodes.
    """
    for outer in list(ancestors(scene.runs, index))[1:]:
        span = scene.runs[outer].span
        if any(scene.runs[i].start in span for i in convolutions if i != index):
            return frozenset(span)
    return frozenset(range(len(scene.graph.nodes)))


def _tables(scene: Scene) -> Iterator[Instance]:
    for index in scene.find(rules.is_table):
        run = scene.runs[index]
        core = scene.ops(run.span, frozenset({"embedding"}))
        if core:
            required = scene.tokens is None or id(run.module) in scene.tokens
            yield Instance("embedding", core, frozenset(run.span), required=required, where=run.path)
    inside = scene.inside(scene.find(rules.is_table)) | scene.inside(scene.find(rules.is_bag))
    for node in scene.ops(range(len(scene.graph.nodes)), frozenset({"embedding"})) - inside:  # for example code books
        yield Instance("embedding", frozenset({node}), frozenset({node}), required=False)


def _of_recommenders(scene: Scene) -> Iterator[Instance]:
    for index in scene.outermost(rules.is_bag):
        run = scene.runs[index]
        core = frozenset(i for i in run.span if "embedding" in scene.node(i).operation)
        yield Instance("embedding_bag", core, frozenset(run.span), where=run.path)
