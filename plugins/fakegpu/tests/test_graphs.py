"""`djinn serve --graphs`: hot programs of fixed shape run as graphs, with the same results as op by op."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from configured import configured
from servers import SECONDS

import djinn
from djinn.testing import executor_figures
from djinn_fakegpu.library import build
from djinn_fakegpu.remote_control import RemoteControl
from evaluation.fakegpu import run_fakegpu as counting

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
REMOTE = "remote_accelerator:0"
MIB = 1 << 20
RUNS = 24  # runs until a program becomes a graph, plus a margin


@pytest.fixture(scope="module")
def server(python, tmp_path_factory, plain_environment):
    build()  # on a busy machine, the build takes longer than the start timeout of an executor
    folder = tmp_path_factory.mktemp("graphs")
    environment = plain_environment | {"DJINN_PLUGINS": "tcp,fakegpu,graphs"}
    with counting.serving(folder, environment, "--graphs", start=python.start) as server:
        yield server


@pytest.fixture
def gpu(server):
    """Yield the device of a new session. Launches are so slow on its clock that a program is hot after few runs."""
    control = RemoteControl(server.file.parent)
    control.configure(launch=0.1)
    with configured(servers=[server.url("tcp")], token=server.token, disable=("local",)):
        djinn.init()
        yield control
    control.configure(memory=16 << 30)


class CounterGrowth:
    """Measure by how much the executor's counters grow inside a block."""

    def __enter__(self):
        djinn.synchronize()
        self._before = executor_figures()
        return self

    def __exit__(self, *_):
        djinn.synchronize()
        self._after = executor_figures()

    def __getitem__(self, name):
        return self._after.get(f"device_{name}", 0) - self._before.get(f"device_{name}", 0)


class Training:
    """Steps of AdamW with a learning rate schedule, so that scalars of the program vary."""

    def __init__(self, device, dropout=0.0):
        torch.manual_seed(3)
        layers = torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(dropout), torch.nn.Linear(32, 5)
        self.model = torch.nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.inputs, self.labels = torch.randn(8, 16).to(device), torch.randint(5, (8,)).to(device)

    def steps(self, count, inputs=None):
        """Train some steps. Return the last loss."""
        for _ in range(count):
            self.optimizer.zero_grad()
            given = self.inputs if inputs is None else next(inputs)
            loss = torch.nn.functional.cross_entropy(self.model(given), self.labels)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            if loss.device.type != "cpu":
                counting.send_recorded()
        return loss.item()

    def state(self):
        return [value.cpu() for value in self.model.state_dict().values()]


def assert_same(one, other):
    for there, here in zip(one.state(), other.state(), strict=True):
        assert torch.equal(there, here)


def test_training_step_is_one_exact_launch(gpu):
    there, here = Training(REMOTE), Training("cpu")
    there.steps(RUNS)
    with CounterGrowth() as grown:
        there.steps(5)
    assert there.steps(1) == here.steps(RUNS + 6)
    assert (grown["graph_launches"], grown["ops_outside_graphs"]) == (5, 0)
    assert_same(there, here)


def test_new_inputs_are_copied_to_the_graph(gpu):
    batches = torch.randn(2 * RUNS, 8, 16)
    there, here = Training(REMOTE), Training("cpu")
    there.steps(RUNS, inputs=(batch.to(REMOTE) for batch in batches))
    with CounterGrowth() as grown:
        there.steps(5, inputs=(batch.to(REMOTE) for batch in batches[RUNS:]))
    here.steps(RUNS + 5, inputs=iter(batches))
    assert (grown["graph_launches"], grown["ops_outside_graphs"]) == (5, 5)  # a copy for each batch
    assert_same(there, here)


def test_random_op_stays_outside_graph(gpu):
    there, here = Training(REMOTE, dropout=0.5), Training("cpu", dropout=0.5)
    torch.manual_seed(5)
    there.steps(RUNS)
    with CounterGrowth() as grown:
        there.steps(5)
    torch.manual_seed(5)
    here.steps(RUNS + 5)
    assert grown["graph_launches"] == 5
    assert grown["ops_outside_graphs"] > 0
    assert_same(there, here)


def make_network(device, depth):
    """Return a network. Each test has a separate program, because sessions share the executor's knowledge of programs."""
    torch.manual_seed(7)
    layers = [
        layer for _ in range(depth) for layer in (torch.nn.Linear(24, 24), torch.nn.GELU(), torch.nn.LayerNorm(24))
    ]
    return torch.nn.Sequential(*layers).eval().to(device)


@torch.no_grad()
def predict(model, inputs, runs=1):
    """Run a program several times. Return the last result."""
    for _ in range(runs):
        result = model(inputs).cpu()
    return result


@torch.no_grad()
def test_replaced_weight_is_never_read_at_its_old_address(gpu):
    model, inputs = make_network("cpu", 2), torch.randn(3, 24)
    there, given = copy.deepcopy(model).to(REMOTE), inputs.to(REMOTE)
    predict(there, given, RUNS)
    kept = []  # the last replaced weights live on, so that their graphs do
    for change in range(4):
        kept += [(model[0].weight, there[0].weight)] if change > 1 else []
        value = torch.full((24, 24), 0.1 * change + 0.1)
        model[0].weight = torch.nn.Parameter(value)
        there[0].weight = torch.nn.Parameter(value.to(REMOTE))
        with CounterGrowth() as grown:
            for _ in range(5):
                assert torch.equal(predict(there, given), predict(model, inputs))
        assert grown["captures"] == 1
        assert grown["graph_launches"] >= 3
    model[0].weight, there[0].weight = kept[0]
    model[0].weight.zero_()
    there[0].weight.zero_()
    with CounterGrowth() as grown:
        assert torch.equal(predict(there, given), predict(model, inputs))
    assert (grown["captures"], grown["graph_launches"]) == (0, 1)  # a replay reads the weight's current bytes


@torch.no_grad()
def test_graph_of_other_numeric_settings_is_not_replayed(gpu):
    """Numeric settings select GPU kernels."""
    model, inputs = make_network(REMOTE, 7), torch.randn(3, 24).to(REMOTE)
    predict(model, inputs, RUNS)
    benchmark = not torch.backends.cudnn.benchmark
    with (
        torch.backends.cudnn.flags(enabled=True, benchmark=benchmark),
        CounterGrowth() as grown,
    ):  # PyTorch's tests forbid to set it
        predict(model, inputs, 5)
    assert grown["captures"] == 1


@torch.no_grad()
def test_held_results_keep_values_after_replay(gpu):
    model, given = make_network(REMOTE, 3), [torch.full((3, 24), float(n)).to(REMOTE) for n in range(3)]
    held = []

    def hold(runs):
        for _ in range(runs):
            held.append(model(given[len(held) % 3]))
            counting.send_recorded()

    hold(2 * RUNS)
    with CounterGrowth() as grown:
        hold(6)
    expected = [predict(make_network("cpu", 3), inputs.cpu()) for inputs in given]
    assert grown["graph_launches"] == 6
    for run, result in enumerate(held):
        assert torch.equal(result.cpu(), expected[run % 3])


@torch.no_grad()
def test_program_with_device_wait_is_not_captured(gpu, server):
    def program(x):
        for _ in range(6):
            x = x * 1.5 - 1
        x[x > 2] = 0  # result sizes depend on values
        return (x + 1).sum()

    values = torch.arange(8.0)
    given = values.to(REMOTE)
    before = server.log.read_text().count("it cannot be recorded")
    for _ in range(RUNS):
        assert program(given).item() == program(values.clone()).item()
    assert server.log.read_text().count("it cannot be recorded") == before + 1
    assert executor_figures()["recorded_graphs"] == 0


@torch.no_grad()
def test_program_with_varying_sizes_is_not_captured(gpu):
    model = make_network(REMOTE, 4)
    with CounterGrowth() as grown:
        for size in range(2, RUNS):
            assert torch.equal(
                predict(model, torch.ones(size, 24).to(REMOTE)), predict(make_network("cpu", 4), torch.ones(size, 24))
            )
    assert grown["captures"] == 0


@torch.no_grad()
def test_graph_is_freed_at_session_end(gpu, server):
    model, given = make_network(REMOTE, 5), torch.ones(3, 24).to(REMOTE)
    result = predict(model, given, RUNS)
    assert executor_figures()["recorded_graph_bytes"] > 0
    djinn.shut_down()
    djinn.init()
    assert executor_figures()["recorded_graph_bytes"] == 0
    model, given = make_network(REMOTE, 5), torch.ones(3, 24).to(REMOTE)
    with CounterGrowth() as grown:
        assert torch.equal(predict(model, given, 4), result)
    assert grown["captures"] == 1  # captured with the weights of this session


@torch.no_grad()
def test_graph_is_evicted_if_memory_is_short(gpu):
    model, given = make_network(REMOTE, 6), torch.ones(3, 24).to(REMOTE)
    result = predict(model, given, RUNS)
    assert executor_figures()["recorded_graphs"] == 1
    gpu.configure(memory=64 * MIB)
    large = [torch.ones(12 * MIB // 4).to(REMOTE) for _ in range(6)]
    assert sum(one.sum().item() for one in large) == 6 * 12 * MIB // 4
    assert executor_figures()["recorded_graphs"] == 0
    assert torch.equal(predict(model, given), result)


def chain(op, x):
    for _ in range(4):
        x = op(x) * 3 + 1
    return x


@torch.no_grad()
def test_held_result_survives_replays_of_other_graphs(gpu):
    values = torch.randn(1024)
    given = values.to(REMOTE)

    def run(op):
        result = -chain(op, given)  # an odd number of ops ends in the memory that the first one took
        counting.send_recorded()
        return result

    for _ in range(2 * RUNS):
        run(torch.sin)
        run(torch.cos)
    with CounterGrowth() as grown:
        for op, other in ((torch.sin, torch.cos), (torch.cos, torch.sin)):
            held = run(op)
            run(other)
            assert torch.equal(held.cpu(), -chain(op, values))
            del held
            (given + 1).cpu()  # sends the end of `held`
    assert (grown["graph_launches"], grown["captures"]) == (4, 0)


@torch.no_grad()
def test_batch_norm_updates_statistics_once_per_run(gpu):
    torch.manual_seed(3)
    here = torch.nn.Sequential(
        torch.nn.Linear(24, 16), torch.nn.BatchNorm1d(16), torch.nn.GELU(), torch.nn.Linear(16, 4)
    )
    there, inputs = copy.deepcopy(here).to(REMOTE), torch.randn(8, 24)
    given = inputs.to(REMOTE)
    for _ in range(RUNS):
        assert torch.equal(there(given).cpu(), here(inputs))
    with CounterGrowth() as grown:
        for _ in range(3):
            assert torch.equal(there(given).cpu(), here(inputs))
    for one, other in zip(there.buffers(), here.buffers(), strict=True):
        assert torch.equal(one.cpu(), other)
    assert grown["graph_launches"] == 3


@torch.no_grad()
def test_replay_invalidates_cached_results(python, tmp_path, plain_environment):
    """A replay overwrites the memory of the previous results, so the cache drops them."""
    plugins = {"DJINN_PLUGINS": "tcp,fakegpu,graphs,result_cache"}
    cache = {"DJINN_PLUGIN_RESULT_CACHE_GIB": "1", "DJINN_PLUGIN_RESULT_CACHE_SECONDS": "0"}
    environment = plain_environment | plugins | cache
    with counting.serving(tmp_path, environment, "--graphs", start=python.start) as server:
        RemoteControl(tmp_path).configure(launch=0.1)
        with configured(servers=[server.url("tcp")], token=server.token, disable=("local",)):
            djinn.init()
            for number in range(2 * RUNS):
                values = torch.full((64,), float(number))
                result = chain(torch.sin, values.to(REMOTE))
                counting.send_recorded()
                assert torch.equal(torch.tanh(result * 0.1).cpu(), torch.tanh(chain(torch.sin, values) * 0.1))
                del result
            assert executor_figures()["device_graph_launches"] > 0


@torch.no_grad()
def test_sessions_with_same_program_have_separate_graphs(gpu, server, python, plain_environment):
    """The second session has doubled weights. The sessions run alternately."""
    program = """
import sys, torch, djinn
weights = [torch.full((24, 24), 2.0 / n).to("remote_accelerator:0") for n in range(1, 6)]
given = torch.ones(24, 24).to("remote_accelerator:0")
for line in sys.stdin:
    result = given
    for weight in weights:
        result = result @ weight
    print(result[0, 0].item(), flush=True)
"""
    known = {"DJINN_SERVERS": server.url("tcp"), "DJINN_TOKEN": server.token, "DJINN_THREADS": "1"}
    other = python.start_talking("-c", program, env={**plain_environment, **known})
    weights = [torch.full((24, 24), 1.0 / n).to(REMOTE) for n in range(1, 6)]
    given = torch.ones(24, 24).to(REMOTE)

    def both():
        other.stdin.write("\n")
        other.stdin.flush()
        theirs, ours = float(other.stdout.readline()), given
        for weight in weights:
            ours = ours @ weight
        return ours[0, 0].item(), theirs

    with other:
        found = [both() for _ in range(RUNS)]
        with CounterGrowth() as grown:
            found += [both() for _ in range(5)]
        assert executor_figures()["recorded_graphs"] == 2
        other.stdin.close()
        other.wait(SECONDS)
    assert grown["graph_launches"] == 10
    assert grown["captures"] == 0
    assert len(set(found)) == 1
    assert found[0][1] == pytest.approx(32 * found[0][0])
