"""Costs of arbitrary programs: shapes with zeros and ones in them, and whatever PyTorch's operators make."""

from __future__ import annotations

import contextlib
import math
import warnings

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils.flop_counter import FlopCounterMode

import djinn
from djinn.testing import topology
from djinn_core.planning.builtins.costs import Roofline
from djinn_core.planning.builtins.flops import flops_of

REMOTE = "remote_accelerator:0"
F = torch.nn.functional
DEVICE = topology().devices[0]
sizes = st.sampled_from([0, 1, 2, 3, 5])
quick = settings(derandomize=True, suppress_health_check=list(HealthCheck))


def costs_of(graph):
    found = [Roofline().estimate(graph, node, DEVICE) for node in graph.nodes]
    for node, cost in zip(graph.nodes, found, strict=True):
        assert cost is not None, node.op
        assert all(math.isfinite(x) and x >= 0 for x in (cost.flops, cost.bytes_read, cost.bytes_written)), node.op
        assert 0 <= cost.seconds < math.inf, node.op
    return found


def captured_flops(function, shapes):
    with djinn.capture() as captured:
        function(*[torch.empty(shape, device=REMOTE, requires_grad=True) for shape in shapes])
    return sum(cost.flops for cost in costs_of(captured.graph))


def torch_flops(function, shapes):
    with FlopCounterMode(display=False) as counter:
        function(*[torch.empty(shape, requires_grad=True) for shape in shapes])
    return counter.get_total_flops()


@st.composite
def products(draw):
    rows, inner, columns, batch = draw(sizes), draw(sizes), draw(sizes), draw(sizes)
    return draw(
        st.sampled_from(
            [
                (torch.mm, [(rows, inner), (inner, columns)]),
                (torch.bmm, [(batch, rows, inner), (batch, inner, columns)]),
                (torch.addmm, [(columns,), (rows, inner), (inner, columns)]),
                (torch.baddbmm, [(batch, rows, columns), (batch, rows, inner), (batch, inner, columns)]),
                (torch.matmul, [(batch, 1, rows, inner), (3, inner, columns)]),
                (F.linear, [(batch, rows, inner), (columns, inner)]),
                (F.linear, [(inner,), (columns, inner)]),
            ]
        )
    )


@st.composite
def convolutions(draw):
    dimensions = draw(st.integers(1, 3))
    groups, kernel = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    ins, outs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    batch = draw(st.sampled_from([(), (0,), (1,), (3,)]))
    space = [draw(st.integers(kernel, 5)) for _ in range(dimensions)]
    if draw(st.booleans()):
        function, weight = getattr(F, f"conv_transpose{dimensions}d"), (ins, outs // groups, *[kernel] * dimensions)
    else:
        function, weight = getattr(F, f"conv{dimensions}d"), (outs, ins // groups, *[kernel] * dimensions)
    return (lambda x, w: function(x, w, groups=groups)), [(*batch, ins, *space), weight]


def with_backward(function):
    return lambda *inputs: function(*inputs).sum().backward()


@quick
@given(case=products(), backward=st.booleans())
@example(case=(torch.bmm, [(2, 3, 5), (2, 5, 0)]), backward=False)
@example(case=(torch.matmul, [(2, 1, 0, 0), (3, 0, 0)]), backward=True)
def test_matmul_flops_of_any_shape(case, backward):
    function, shapes = case
    run = with_backward(function) if backward else function
    assert captured_flops(run, shapes) == torch_flops(run, shapes)


@quick
@given(case=convolutions(), backward=st.booleans())
def test_convolution_flops_of_any_shape(case, backward):
    function, shapes = case
    run = with_backward(function) if backward else function
    assert captured_flops(run, shapes) == torch_flops(run, shapes)


SAMPLES: dict[str, list] = {}
OPS = [op for op in op_db if torch.float32 in op.dtypes and op.supports_autograd]


def sample_of(op, number):
    if op.name not in SAMPLES:
        # Not `op.sample_inputs`, which formats a stack trace for each sample.
        torch.manual_seed(0)
        SAMPLES[op.name] = list(op.sample_inputs_func(op, "cpu", torch.float32, requires_grad=True))
    assume(SAMPLES[op.name])
    return SAMPLES[op.name][number % len(SAMPLES[op.name])]


def to_remote(value):
    if isinstance(value, torch.Tensor):
        return value.detach().to(REMOTE).requires_grad_(value.requires_grad)
    if type(value) in {list, tuple}:
        return type(value)(map(to_remote, value))
    return value


@pytest.mark.usefixtures("embedded")
@settings(quick, max_examples=30)
@given(picks=st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 100)), min_size=1, max_size=4))
def test_every_program_has_a_cost(picks):
    with djinn.capture() as captured, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op, number in picks:
            sample = sample_of(op, number)
            kwargs = {name: to_remote(value) for name, value in sample.kwargs.items()}
            try:
                out = op(to_remote(sample.input), *to_remote(sample.args), **kwargs)
                out.sum().abs().backward()
            except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, NotImplementedError):
                continue  # what cannot be recorded has no cost
    costs_of(captured.graph)


def test_invalid_shapes_do_not_blame_cost_model():
    """The kernel reports attention heads that do not fit, at the user's op."""
    with djinn.capture() as captured:
        query, key = (torch.empty(2, heads, 5, 8, device="remote_accelerator:0") for heads in (11, 32))
        with contextlib.suppress(NotImplementedError):  # the executor has no such kernel
            torch.ops.aten._efficient_attention_forward(query, key, key, None, None, None, None, None, 0.0, 0, False)
    (node,) = [node for node in captured.graph.nodes if node.operation == "_efficient_attention_forward"]
    assert flops_of(captured.graph, node) == 0
