"""Compare the results of a program with and without an optimization, in this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import attrs
import torch

from djinn.testing.contexts import optimization_context
from djinn.testing.replaying import replay
from djinn_client.interception.recording.substitute import rewrite
from djinn_core.hookspecs.optimizations import Optimization, OptimizationContext
from djinn_core.ir.graph import Graph
from djinn_core.ir.handles import storage_of
from djinn_core.ir.plan import OptimizationResult, Rewrite, resolve_chains
from djinn_core.planning.stages.verify_rewrite import check_rewrite
from djinn_core.planning.stages.verify_substitution import check_substitutions
from djinn_core.planning.substituting import persistent_weights

Tensors = Mapping[int, torch.Tensor]
_NAMED = 4  # nodes that a message names
if TYPE_CHECKING:
    from djinn_profiler.captured import Captured


def compare_results(
    optimization: Optimization,
    program: Captured | Graph,
    inputs: Tensors | None = None,
    *,
    context: OptimizationContext | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> OptimizationResult:
    """Run a small program with and without the optimization in this process, and compare the final values.

    Code of substitutions is recorded and run as on an executor, including computations on weights in advance.

    Args:
        optimization: the optimization to test.
        program: a result of `djinn.capture()`, or a graph. It must run on CPU tensors.
        inputs: a CPU tensor for each of `graph.inputs`. If None, `example_inputs` makes them.
        context: context for the optimization. If None, it contains the patterns of a captured program.
        rtol: relative tolerance. If None, `torch.testing.assert_close` chooses it by the dtype.
        atol: absolute tolerance. If None, `torch.testing.assert_close` chooses it by the dtype.

    Returns:
        The result of the optimization. If the optimization did not apply, nothing was compared.

    Raises:
        AssertionError: a result differs. The message names the op that computed it.
        InvalidStage: the rewrite is illegal, or a substitution cannot be recorded.
    """
    graph = program if isinstance(program, Graph) else program.graph
    if context is None:
        context = optimization_context(graph)
        if not isinstance(program, Graph):
            context = attrs.evolve(context, profile=program.profile)
    result = optimization.optimize(context)
    check_rewrite(graph, context.plan, result.rewrite, context.kept, optimization.name)
    check_substitutions(graph, context.plan, result.rewrite.substitutions, context.kept, optimization.name)
    if not result.applied:
        return result
    values = inputs if inputs is not None else example_inputs(graph)
    expected = replay(graph, values)
    for description, results in _rewritten(context, graph, result.rewrite, values):
        _compare(graph, expected, results, f"{optimization.name}: after its {description}", rtol, atol)
    return result


def example_inputs(graph: Graph, seed: int = 0) -> dict[int, torch.Tensor]:
    """Return a random CPU tensor for each input of the graph.

    Floats are from -1 to 1, and integers are 0 or 1. The floats of a vector are from 0 to 1, because it may contain
    variances. Inputs that share memory in the graph also share memory here.
    """
    generator = torch.Generator().manual_seed(seed)
    values_of_storage: dict[int, list[int]] = defaultdict(list)
    for value in graph.inputs:
        values_of_storage[storage_of(value)].append(value)
    tensors: dict[int, torch.Tensor] = {}
    for values in values_of_storage.values():
        metas = {value: graph.meta(value) for value in values}
        dtype = next(iter(metas.values())).dtype
        size = (max(meta.extent for meta in metas.values()),)
        if dtype.is_floating_point or dtype.is_complex:
            memory = torch.rand(size, generator=generator, dtype=dtype)
            if any(len(meta.shape) > 1 for meta in metas.values()):
                memory = 2 * memory - 1
        else:
            memory = torch.randint(0, 2, size, generator=generator).to(dtype)
        for value, meta in metas.items():
            elements = memory if meta.dtype is dtype else memory.view(meta.dtype)
            tensors[value] = elements.as_strided(meta.shape, meta.stride, meta.offset)
    return tensors


def _rewritten(
    context: OptimizationContext, graph: Graph, change: Rewrite, inputs: Tensors
) -> Iterator[tuple[str, dict[int, torch.Tensor]]]:
    """Run the rewritten program, and yield its final values with a description of the rewrite.

    Dropped nodes and replacements are one rewrite, and all substitutions are another.
    """
    if change.drop or change.replace:
        running = [node for node in context.plan.nodes if node not in change.drop]
        yield "rewrite", replay(graph, inputs, running, resolve_chains({**context.plan.replace, **change.replace}))
    if change.substitutions:
        rewritten = rewrite(graph.program, change.substitutions, persistent_weights(graph, context.profile))
        values = dict(inputs)
        for recipe in rewritten.recipes:
            recipe_results = replay(Graph(recipe.program), {value: values[value] for value in recipe.sources})
            values |= {value: recipe_results[value] for value in recipe.placeholders}
        removed = [graph.nodes[node] for node in sorted(frozenset().union(*(s.nodes for s in change.substitutions)))]
        names = ", ".join(f"{node.op} (node {node.id})" for node in removed[:_NAMED]) + (
            ", ..." if removed[_NAMED:] else ""
        )
        yield f"substitution for {names}", replay(Graph(rewritten.program), values)


def _compare(
    graph: Graph, expected: Tensors, actual: Tensors, context: str, rtol: float | None, atol: float | None
) -> None:
    for value in (*graph.outputs, *graph.inputs):
        maker = graph.producer(value)
        origin = f"the result of {maker.op} (node {maker.id})" if maker is not None else "an input"
        assert value in actual or maker is None, f"{context}, value {value} is missing: {origin}"
        if value in actual:
            torch.testing.assert_close(
                actual[value],
                expected[value],
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=lambda text, value=value, origin=origin: f"{context}, value {value} differs: {origin}. {text}",  # type: ignore[misc]
            )
