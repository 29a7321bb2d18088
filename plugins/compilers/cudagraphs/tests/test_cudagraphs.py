"""Recorded runs with a recorder that stands for CUDA's; the suite for all compilers where there is a GPU."""

from __future__ import annotations

import pytest
import torch

import djinn_cudagraphs
from djinn.hooks import CompilerContext
from djinn.testing import CompilerConformance, PluginConformance
from djinn_cudagraphs.compiler import WARM_RUNS, CudaGraphs, RecordedRuns


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_cudagraphs


class FakeRecorder:
    """Stands for CUDA graphs: a launch runs the same ops on the same memory, and writes results over the last ones."""

    def __init__(self):
        self.recordings = 0

    def record(self, run):
        self.recordings += 1
        results = []

        def launch():
            new = [result.clone() for result in run()]
            if not results:  # recording itself runs nothing
                results.extend(new)
            for held, result in zip(results, new, strict=True):
                held.copy_(result)

        return launch, results


class OnTheCpu:
    """The compiler with the recorder above, so that its buffers can be tried without a GPU."""

    name = "recorded"

    def compile(self, context):
        return None if context.grows else RecordedRuns(context.graph_module, FakeRecorder(), context.writes)


class TestBuffers(CompilerConformance):
    @pytest.fixture
    def compiler(self):
        return OnTheCpu()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
class TestCudaGraphs(CompilerConformance):
    @pytest.fixture
    def compiler(self):
        return CudaGraphs()

    @pytest.fixture
    def torch_device(self):
        return torch.device("cuda", 0)


def test_weights_are_read_where_they_lie_and_recorded_anew_when_they_move():
    recorder = FakeRecorder()
    runs = RecordedRuns(lambda x, w: [x @ w], recorder)
    weight, kept = torch.rand(4, 4), []
    for _ in range(WARM_RUNS + 3):
        kept.append(torch.rand(2, 4))
        torch.testing.assert_close(runs([kept[-1], weight])[0], kept[-1] @ weight)
    assert recorder.recordings == 1
    assert set(runs._buffers) == {0}
    weight = torch.rand(4, 4)
    torch.testing.assert_close(runs([kept[-1], weight])[0], kept[-1] @ weight)
    assert recorder.recordings == 2


def test_it_leaves_other_devices_alone():
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    context = CompilerContext(torch.fx.GraphModule({}, graph), (), torch.device("cpu"))
    assert CudaGraphs().compile(context) is None
