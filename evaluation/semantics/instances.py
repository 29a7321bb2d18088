"""Instances of patterns to be found in a program, derived from the modules in which its instructions were recorded."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs
from torch import nn

from djinn.planning import Graph, Node, storage_of
from evaluation.semantics import class_rules as rules
from evaluation.semantics.attention_truth import facts_of
from evaluation.semantics.ground_truth import Instance, ModuleRun
from evaluation.semantics.module_runs import ancestors

# The one op of an attention that cannot be done without, fused or not.
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
    """A program's nodes and the calls of modules that recorded them.

    Attributes:
        graph: the program. runs: the calls.
        tokens: identities of the modules that look up tokens, where the model says so.
    """

    graph: Graph
    runs: Sequence[ModuleRun]
    tokens: frozenset[int] | None = None

    def find(self, test: Test) -> list[int]:
        """Indices of the runs of modules that pass the test."""
        return [i for i, run in enumerate(self.runs) if test(run.module)]

    def outermost(self, test: Test) -> list[int]:
        """The same, without those inside one another."""
        found = set(self.find(test))
        return [i for i in sorted(found) if not any(a in found for a in list(ancestors(self.runs, i))[1:])]

    def inside(self, indices: Iterable[int]) -> set[int]:
        """Ids of the nodes that these runs recorded."""
        return {node for i in indices for node in self.runs[i].span}

    def ops(self, span: Iterable[int], operations: frozenset[str]) -> frozenset[int]:
        """Ids of the nodes of `span` that are one of these ops."""
        return frozenset(i for i in span if self.graph.nodes[i].operation in operations)

    def node(self, index: int) -> Node:
        """The node of that id."""
        return self.graph.nodes[index]


def instances(scene: Scene) -> tuple[Instance, ...]:
    """All of them, but for caches and fusion points, which modules do not tell."""
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
            facts = facts_of(scene.graph, scene.runs, index, core)
            yield Instance("attention", frozenset({core}), frozenset(run.span), facts=facts, where=run.path)


def _inside_others(scene: Scene) -> Iterator[Instance]:
    """Nodes that weigh or multiply inside recurrences, and those that pool rows: whether that is attention as well is left open."""
    others = scene.inside(scene.outermost(rules.is_recurrent)) | scene.inside(scene.outermost(rules.is_bag))
    others |= scene.inside(scene.outermost(rules.is_interaction))
    for node in sorted(scene.ops(others, WEIGHING | PRODUCTS)):
        yield Instance("attention", frozenset({node}), frozenset(others), required=False, where="inside something else")


def _in_parts(scene: Scene, run: ModuleRun, softmaxes: frozenset[int]) -> Instance:
    """One attention computed in several softmaxes or in none: half of them make a match, or of the products of two results."""
    given = {storage_of(v) for v in scene.graph.inputs}
    products = frozenset(
        i for i in scene.ops(run.span, PRODUCTS) if not given.intersection(map(storage_of, scene.node(i).inputs))
    )
    core = softmaxes or scene.ops(run.span, frozenset({"exp"})) & _after_sums(scene, run) or products
    return Instance("attention", core, frozenset(run.span), where=run.path, enough=0.5)


def _after_sums(scene: Scene, run: ModuleRun) -> frozenset[int]:
    """The exponentials of a softmax that is written out: there is a logarithm of a sum of exponentials in the module."""
    return frozenset(run.span) if scene.ops(run.span, frozenset({"logsumexp"})) else frozenset()


def _mixtures(scene: Scene) -> Iterator[Instance]:
    for index in scene.outermost(rules.is_mixture):
        run = scene.runs[index]
        choice = scene.ops(run.span, _CHOICES) or scene.ops(run.span, frozenset({"max"}))
        if choice:  # layers of the same class may be dense
            yield Instance("moe", choice, frozenset(run.span), where=run.path)


def _blocks(scene: Scene, attentions: Sequence[Instance], mixtures: Sequence[Instance]) -> Iterator[int]:
    """The innermost layers that hold both an attention and a feed-forward network or mixture of experts."""
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
    """The linear layers in a run that serve no attention, mixture, norm or recurrence: its feed-forward network."""
    others = (rules.is_attention, rules.is_mixture, rules.is_norm, rules.is_recurrent)
    found = []
    for i in scene.find(rules.is_linear):
        outwards = list(ancestors(scene.runs, i))
        if index not in outwards:
            continue
        between = [scene.runs[j].module for j in outwards[: outwards.index(index)]]
        if not any(test(module) for test in others for module in between):
            found.append(i)
    return found


def _perceptrons(scene: Scene, attentions: Sequence[Instance], blocks: Sequence[int]) -> Iterator[Instance]:
    """The feed-forward networks of each block, and modules that are called one elsewhere; other layers are left open."""
    taken: set[int] = set()
    attended = {n for a in attentions for n in a.span}
    for index in blocks:
        run = scene.runs[index]
        for core in _networks(scene, index):
            if len(core) > 1:
                taken |= core
                required = not rules.is_unusual(run.module)
                yield Instance("mlp", core, frozenset(run.span) - attended, required=required, where=run.path)
    mixed = scene.inside(scene.outermost(rules.is_mixture))
    for index in scene.outermost(rules.is_mlp):
        run = scene.runs[index]
        linear = (i for i in scene.find(rules.is_linear) if index in ancestors(scene.runs, i))
        core = scene.ops(scene.inside(linear), PRODUCTS)
        if len(core) > 1 and not core & taken:
            taken |= core
            yield Instance("mlp", core, frozenset(run.span), required=not core & mixed, where=run.path)
    yield from _left_open(scene, taken)


def _networks(scene: Scene, block: int) -> Iterator[frozenset[int]]:
    """The products of each feed-forward network of a block: of each module called so, or of all linear layers together."""
    layers: dict[int, list[int]] = defaultdict(list)
    if rules.has_several_networks(scene.runs[block].module):
        yield from (scene.ops(scene.inside(pair), PRODUCTS) for pair in _pairs(scene, block))
        return
    for i in _linear(scene, block):
        if not scene.runs[i].path.endswith("temporal_dense"):  # the last layer of TimeSformer's other attention
            called = [a for a in ancestors(scene.runs, i) if rules.is_mlp(scene.runs[a].module) and a > block]
            layers[called[0] if called else block].append(i)
    named = [i for i in layers if i != block]
    for i in named or [block]:
        yield scene.ops(scene.inside(layers[i]), PRODUCTS)


def _pairs(scene: Scene, block: int) -> Iterator[tuple[int, int]]:
    """Pairs of linear layers, one after the other, of which the first widens what the second makes as narrow again."""
    layers = _linear(scene, block)
    for one, other in itertools.pairwise(layers):
        first, second = (scene.runs[i].module.weight.shape for i in (one, other))
        if first == second[::-1] and first[0] > first[1]:
            yield one, other


def _left_open(scene: Scene, taken: set[int]) -> Iterator[Instance]:
    """Linear layers that no rule names: two with an activation between may be called a network or not."""
    attention = scene.inside(scene.outermost(rules.is_attention)) | scene.inside(scene.outermost(rules.is_recurrent))
    mixed = scene.inside(scene.outermost(rules.is_mixture))
    core = scene.ops(scene.inside(scene.find(rules.is_linear)) | mixed, PRODUCTS) - taken - attention
    span = frozenset(range(len(scene.graph.nodes))) - attention - taken
    for node in sorted(core):
        yield Instance("mlp", frozenset({node}), span, required=False, where="elsewhere")


def _convolutions(scene: Scene) -> Iterator[Instance]:
    recurrent = scene.inside(scene.outermost(rules.is_recurrent))
    named: set[int] = set()
    convolutions = scene.find(rules.is_convolution)
    for index in convolutions:
        run = scene.runs[index]
        core = frozenset(i for i in run.span if "conv" in scene.node(i).operation)
        named |= core
        if core:
            span = _neighbourhood(scene, index, convolutions)
            yield Instance("convolution", core, span, required=not core & recurrent, where=run.path)
    for node in scene.graph.nodes:
        if "conv" in node.operation and "backward" not in node.operation and node.id not in named:
            yield Instance(
                "convolution", frozenset({node.id}), frozenset(range(len(scene.graph.nodes))), required=False
            )


def _neighbourhood(scene: Scene, index: int, convolutions: Sequence[int]) -> frozenset[int]:
    """Nodes recorded in the innermost module that has another convolution as well: norms and activations may lie there."""
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
    for node in scene.ops(range(len(scene.graph.nodes)), frozenset({"embedding"})) - inside:  # code books, for example
        yield Instance("embedding", frozenset({node}), frozenset({node}), required=False)


def _of_recommenders(scene: Scene) -> Iterator[Instance]:
    for index in scene.outermost(rules.is_bag):
        run = scene.runs[index]
        core = frozenset(i for i in run.span if "embedding" in scene.node(i).operation)
        yield Instance("embedding_bag", core, frozenset(run.span), where=run.path)
