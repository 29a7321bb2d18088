"""Recorded runs with a recorder that stands for CUDA's; the suite for all compilers where there is a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import djinn_compilers.cudagraphs
from djinn.hooks import Compiler, CompilerContext
from djinn.testing import CompilerConformance, PluginConformance
from djinn_compilers.cudagraphs.compiler import RECORDINGS, WARM_RUNS, CudaGraphs, RecordedRuns


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_compilers.cudagraphs


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


class OnTheCpu(Compiler):
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


def test_recording_reads_weights_in_place_until_they_move():
    recorder = FakeRecorder()
    runs = RecordedRuns(lambda x, w: [x @ w], recorder)
    weight, kept = torch.rand(4, 4), []
    for _ in range(WARM_RUNS + 3):
        kept.append(torch.rand(2, 4))
        torch.testing.assert_close(runs([kept[-1], weight])[0], kept[-1] @ weight)
    assert recorder.recordings == 1
    kept.append(weight)
    weight = torch.rand(4, 4)
    for _ in range(3):
        torch.testing.assert_close(runs([kept[0], weight])[0], kept[0] @ weight)
    assert recorder.recordings == 2


class Memory:
    """Input tensors. After a move, the old memory is overwritten like freed GPU memory."""

    def __init__(self):
        self.tensors = [torch.rand(2, 6) for _ in range(8)]
        self._freed = []  # kept alive, so that no address is reused

    def move(self, index):
        self._freed.append(self.tensors[index])
        self.tensors[index] = self.tensors[index].clone()
        self._freed[-1].fill_(torch.nan)


def views_of(tensors):
    """Return views with gaps in memory; every second view is transposed."""
    return [tensor[:, 1:4] if index % 2 else tensor.t()[::2] for index, tensor in enumerate(tensors)]


def writing_graph(*inputs):
    """Write inputs 0 and 1 and read all inputs. The result depends on strides."""
    inputs[0].add_(inputs[2])
    inputs[1].mul_(0.5)
    return [sum(inputs[2::2], inputs[0]), sum(inputs[3::2], inputs[1]), inputs[3].as_strided((2, 2), (6, 1)) + 1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sets(st.integers(0, 7), max_size=2), min_size=10, max_size=20))
def test_recorded_run_never_reads_an_old_address_of_an_input(moves):
    recorder, memory = FakeRecorder(), Memory()
    runs = RecordedRuns(writing_graph, recorder, writes=(0, 1))
    for moved in moves:
        for index in moved:
            memory.move(index)
        expected = [tensor.clone() for tensor in memory.tensors]
        results = writing_graph(*views_of(expected))
        found = runs(views_of(memory.tensors))
        torch.testing.assert_close(list(found), results, rtol=0, atol=0)
        torch.testing.assert_close(memory.tensors, expected, rtol=0, atol=0)
        assert [result.stride() for result in found] == [result.stride() for result in results]
    assert recorder.recordings <= RECORDINGS


def test_graph_runs_eagerly_after_its_last_recording():
    recorder, memory = FakeRecorder(), Memory()
    runs = RecordedRuns(lambda *inputs: [sum(inputs)], recorder)
    for index in range(WARM_RUNS + RECORDINGS + 1):
        memory.move(index)
        for _ in range(2):
            torch.testing.assert_close(runs(memory.tensors)[0], sum(memory.tensors), rtol=0, atol=0)
    assert recorder.recordings == RECORDINGS


def test_it_leaves_other_devices_alone():
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    context = CompilerContext(torch.fx.GraphModule({}, graph), (), torch.device("cpu"))
    assert CudaGraphs().compile(context) is None
