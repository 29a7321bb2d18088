"""Costs: work as PyTorch counts it, bytes as the dtypes say, and models that fail are named and passed over."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from djinn.hooks import CostModel
from djinn.planning import fx_graph
from djinn.testing import ProgramBuilder, topology
from djinn_core.ir.costs import CostEstimate, DeviceCapabilities, NetworkTopology
from djinn_core.planning.builtins.costs import Roofline
from djinn_core.planning.stages.estimate import estimate

F = torch.nn.functional
rand = torch.rand


def estimated_flops(graph) -> float:
    return estimate(graph, [Roofline()], topology()).flops


def torch_flops(function, *inputs) -> int:
    if function is attention:  # the counter does not know the kernel for CPUs
        return sdpa_flop_count(*(i.shape for i in inputs))
    with FlopCounterMode(display=False) as counter:
        function(*inputs)
    return counter.get_total_flops()


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape == k.shape)


CASES = {
    "mm": (torch.mm, rand(3, 5), rand(5, 7)),
    "addmm": (torch.addmm, rand(7), rand(3, 5), rand(5, 7)),
    "bmm": (torch.bmm, rand(2, 3, 5), rand(2, 5, 7)),
    "baddbmm": (torch.baddbmm, rand(2, 3, 7), rand(2, 3, 5), rand(2, 5, 7)),
    "matmul, broadcast": (torch.matmul, rand(2, 1, 3, 5), rand(4, 5, 7)),
    "linear": (F.linear, rand(2, 3, 5), rand(7, 5), rand(7)),
    "conv1d": (F.conv1d, rand(2, 4, 16), rand(6, 4, 3)),
    "conv2d, stride, padding, dilation": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1, dilation=2), rand(2, 4, 17, 17), rand(6, 4, 3, 3)
    ),
    "conv2d, groups": (lambda x, w: F.conv2d(x, w, groups=2), rand(2, 4, 9, 9), rand(6, 2, 3, 3)),
    "conv2d without a batch": (F.conv2d, rand(4, 9, 9), rand(6, 4, 3, 3)),
    "conv3d": (F.conv3d, rand(1, 2, 5, 5, 5), rand(3, 2, 2, 2, 2)),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), rand(2, 4, 8, 8), rand(4, 6, 3, 3)),
    "attention": (attention, rand(2, 4, 8, 16), rand(2, 4, 8, 16), rand(2, 4, 8, 16)),
    "cross attention": (attention, rand(2, 4, 3, 16), rand(2, 4, 8, 16), rand(2, 4, 8, 12)),
    "elementwise": (lambda x: torch.softmax(x.tanh() * 2, -1).sum(), rand(64, 64)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_flops_equal_pytorch_counter(case):
    function, *inputs = CASES[case]
    graph = fx_graph(make_fx(function, tracing_mode="fake")(*inputs))
    assert estimated_flops(graph) == torch_flops(function, *inputs)


@pytest.mark.parametrize("case", CASES)
def test_flops_of_composite_ops_equal_pytorch_counter(case):
    function, *inputs = CASES[case]

    class Whole(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    exported = fx_graph(torch.export.export(Whole(), tuple(inputs)))
    assert estimated_flops(exported) == torch_flops(function, *inputs)


def gradients(function):
    def run(*inputs):
        inputs = [i.detach().requires_grad_() for i in inputs]
        return torch.autograd.grad(function(*inputs).sum(), inputs)

    return run


@pytest.mark.parametrize("case", ["mm", "linear", "conv2d, stride, padding, dilation", "transposed"])
def test_backward_flops_equal_pytorch_counter(case):
    function, *inputs = CASES[case]
    backward = gradients(function)
    graph = fx_graph(make_fx(backward, tracing_mode="fake")(*inputs))
    assert estimated_flops(graph) == torch_flops(backward, *inputs)


def test_attention_backward_flops_equal_pytorch_counter():
    _, *inputs = CASES["attention"]
    graph = fx_graph(make_fx(gradients(attention), tracing_mode="fake")(*inputs))
    # Of the CPU's kernel the counter knows nothing; on the meta device attention is the products that it is made of.
    assert estimated_flops(graph) == torch_flops(
        gradients(F.scaled_dot_product_attention), *(i.to("meta") for i in inputs)
    )


def test_operand_reshaped_in_place_has_no_flops():
    """The graph has the shape from before an `unsqueeze_`, which the formula of `mm` rejects."""
    builder = ProgramBuilder()
    builder.op("aten::mm", builder.input(4, 1), builder.input(4), shape=(4, 4))
    assert estimated_flops(builder.graph()) == 0


def bytes_of(builder):
    costs = estimate(builder.graph(), [Roofline()], topology())
    (row,) = costs.by_device.values()
    return [(e.bytes_read, e.bytes_written) for e in row]


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8), (torch.bool, 1)]
)
def test_estimated_bytes_follow_dtype(dtype, size):
    builder = ProgramBuilder()
    builder.op("aten::clone", builder.input(10, 10, dtype=dtype), shape=(10, 10))
    assert bytes_of(builder) == [(100 * size, 100 * size)]


def test_views_are_free_and_embedding_reads_rows():
    builder = ProgramBuilder()
    table, indices = builder.input(50_000, 64), builder.input(8, dtype=torch.int64)
    builder.view("aten::t", table, shape=(64, 50_000))
    builder.op("aten::embedding", table, indices, shape=(8, 64))
    assert bytes_of(builder) == [(0, 0), (8 * 64 * 4 + 8 * 8, 8 * 64 * 4)]


def test_estimated_time_is_maximum_of_compute_and_memory():
    builder = ProgramBuilder()
    x, w = builder.input(512, 512), builder.input(512, 512)
    builder.op("aten::mm", x, w, shape=(512, 512))
    graph = builder.graph()

    def seconds(flops, bandwidth):
        device = DeviceCapabilities("d", "cpu", flops=flops, bandwidth=bandwidth)
        return estimate(graph, [Roofline()], NetworkTopology((device,))).seconds("d")

    work, moved = 2 * 512**3, 3 * 512 * 512 * 4
    assert seconds(1e9, 1e12) == pytest.approx(work / 1e9, rel=0.01)
    assert seconds(1e15, 1e6) == pytest.approx(moved / 1e6, rel=0.01)


@attrs.define
class FixedCostModel(CostModel):
    """A cost model that returns `answer` for its ops, or raises it."""

    name: str
    answer: object
    operations: frozenset[str] = frozenset()

    def estimate(self, graph, node, device):
        del graph, node, device
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def cost_of(seconds: float) -> CostEstimate:
    return CostEstimate(0.0, 0, 0, seconds)


def two_ops():
    builder = ProgramBuilder()
    x = builder.op("aten::tanh", builder.input(3, 3), shape=(3, 3))
    builder.op("aten::mm", x, x, shape=(3, 3))
    return builder.graph()


def cost_model_order(*models):
    (row,) = estimate(two_ops(), models, topology()).by_device.values()
    return [e.model for e in row]


def test_specific_cost_models_precede_general_ones():
    general, special = FixedCostModel("a", cost_of(1.0)), FixedCostModel("z", cost_of(2.0), frozenset({"mm"}))
    assert cost_model_order(general, special) == ["a", "z"]
    assert cost_model_order(general, FixedCostModel("z", None, frozenset({"mm"}))) == ["a", "a"]
    assert cost_model_order() == ["", ""]


@pytest.mark.parametrize("answer", [RuntimeError("no"), cost_of(-1.0), cost_of(float("nan")), "a string"])
def test_failing_cost_model_is_named_and_skipped(answer, caplog):
    assert cost_model_order(FixedCostModel("a_bad", answer), Roofline()) == ["roofline", "roofline"]
    assert len([r for r in caplog.records if "a_bad" in r.getMessage()]) == 1
