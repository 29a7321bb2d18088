"""`djinn serve --graphs` and `exact=False`: decode steps with a cache that grows by `cat` are one graph of a capacity."""

from __future__ import annotations

import copy
import math
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from configured import configured

import djinn
from djinn.testing import executor_figures, open_session
from djinn_core.wire.messages import StatsReply, StatsRequest
from djinn_fakegpu.library import build
from djinn_fakegpu.remote_control import RemoteControl
from evaluation.fakegpu import run_fakegpu as counting
from evaluation.fakegpu import run_families
from evaluation.fakegpu.decoding_families import FAMILIES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
REMOTE = "remote_accelerator:0"
RUNS = 40  # steps until a decode step is a graph, plus a margin
HEADS, WIDTH, BEGIN = 4, 16, 5


@pytest.fixture(scope="module")
def server(python, tmp_path_factory, plain_environment):
    build()
    folder = tmp_path_factory.mktemp("graphs")
    environment = plain_environment | {"DJINN_PLUGINS": "tcp,fakegpu,graphs"}
    with counting.serving(folder, environment, "--graphs", start=python.start) as server:
        RemoteControl(folder).configure(launch=0.1)
        yield server


@pytest.fixture
def session(server):
    """Make `remote_accelerator` the device of a new session with `exact=False`."""
    with configured(servers=[server.url("tcp")], token=server.token, disable=("local",), exact=False):
        djinn.init()
        yield


def launch_growth(work):
    """Run `work`. Return the growth of launches and of graph launches."""
    djinn.synchronize()
    before = executor_figures()
    work()
    djinn.synchronize()
    after = executor_figures()
    return [after.get(f"device_{name}", 0) - before.get(f"device_{name}", 0) for name in ("launches", "graph_launches")]


def fused_attention(query, keys, values, _):
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values)


def unfused_attention(query, keys, values, _):
    scores = (query @ keys.transpose(-1, -2)) / WIDTH**0.5
    return torch.softmax(scores, -1) @ values


def masked_attention(query, keys, values, _):
    """Attend to all keys except two of padding."""
    mask = torch.arange(keys.shape[-2], device=keys.device) >= 2
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask[None, None, None])


def biased_attention(query, keys, values, buffer):
    """Attend with a bias buffer that is sliced to the present length."""
    length = keys.shape[-2]
    scores = query @ keys.transpose(-1, -2) + buffer[length - 1 : length, :length]
    return torch.softmax(scores, -1) @ values


def grouped_attention(query, keys, values, _):
    """Attend with four query heads over two key heads."""
    keys, values = (one[:, :2, None].expand(-1, 2, 2, -1, WIDTH).reshape(1, HEADS, -1, WIDTH) for one in (keys, values))
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values)


def mean_attention(query, keys, values, _):
    """Combine the query with mean keys and values. The op `mean` has no padding rule."""
    return query * keys.mean(-2, keepdim=True) + values.mean(-2, keepdim=True)


class Decoder:
    """A decoding loop with its own growing cache."""

    def __init__(self, device, attend, depth=1):
        torch.manual_seed(depth)
        torch.set_default_dtype(torch.float64)  # rounding errors stay small over many steps
        self.attend, self.depth = attend, depth
        self.keys, self.values = (torch.randn(1, HEADS, BEGIN, WIDTH).to(device) for _ in range(2))
        self.weights = torch.randn(3, HEADS, WIDTH, WIDTH).to(device) / WIDTH**0.5
        self.bias = torch.randn(256, 256).to(device)
        self.row = torch.randn(1, HEADS, 1, WIDTH).to(device)
        self.begin = self.keys, self.values
        torch.set_default_dtype(torch.float32)

    @torch.no_grad()
    def step(self):
        self.forward()
        return self.row.sum().item()

    def forward(self):
        row = self.row
        for _ in range(self.depth):
            row = torch.tanh(row * 1.5) + 0.1
        query, key, value = (row @ weight for weight in self.weights)
        self.keys, self.values = torch.cat((self.keys, key), 2), torch.cat((self.values, value), 2)
        self.row = self.attend(query, self.keys, self.values, self.bias)

    def steps(self, count):
        return torch.tensor([self.step() for _ in range(count)])

    def results(self):
        return [self.keys.cpu(), self.values.cpu(), self.row.cpu()]


def make_pair(attend, depth):
    """Return a decoder on the device and its twin on the CPU.

    Each test needs its own depth, because sessions share the executor's knowledge of programs.
    """
    return Decoder(REMOTE, attend, depth), Decoder("cpu", attend, depth)


def assert_close(there, here):
    torch.testing.assert_close(there.results(), here.results())


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(
    ("attend", "depth"), [(fused_attention, 13), (unfused_attention, 2), (masked_attention, 3), (biased_attention, 4), (grouped_attention, 5)], ids=lambda one: str(getattr(one, "__name__", one))
)  # fmt: skip
def test_decode_step_is_one_graph_launch_and_copies_its_row(attend, depth):
    there, here = make_pair(attend, depth)
    torch.testing.assert_close(there.steps(RUNS), here.steps(RUNS))
    launches, graphs = launch_growth(lambda: there.steps(10))
    here.steps(10)
    assert (launches, graphs) == (10, 10)  # the row of a step is copied to the graph in the next step
    assert_close(there, here)


@pytest.mark.usefixtures("session")
def test_new_graph_is_captured_for_each_capacity():
    there, here = make_pair(fused_attention, 6)
    torch.testing.assert_close(there.steps(200), here.steps(200))
    assert executor_figures()["device_captures"] > 1
    launches, graphs = launch_growth(lambda: there.steps(5))
    here.steps(5)
    assert (launches, graphs) == (5, 5)
    assert_close(there, here)


@pytest.mark.usefixtures("session")
def test_held_cache_is_unchanged_by_replay():
    there, here = make_pair(fused_attention, 7)
    kept = [SimpleNamespace(**vars(one)) for one in (there, here) if one.steps(RUNS).numel()]
    there.steps(5), here.steps(5)
    assert_close(there, here)
    torch.testing.assert_close(kept[0].keys.cpu(), kept[1].keys)
    for decoder, before in ((there, kept[0]), (here, kept[1])):  # another continuation of the same cache
        decoder.keys, decoder.values, decoder.row = before.keys, before.values, -before.row
    torch.testing.assert_close(there.steps(8), here.steps(8))
    torch.testing.assert_close(kept[0].keys.cpu(), kept[1].keys)
    assert_close(there, here)


@pytest.mark.usefixtures("session")
def test_other_programs_read_dense_cache():
    there, here = make_pair(fused_attention, 14)
    for _ in range(2):
        there.steps(RUNS), here.steps(RUNS)
        seen = [torch.as_strided(one.keys, (9,), (300,), 5).cpu() for one in (there, here)]
        torch.testing.assert_close(*seen)
        for one in (there, here):
            one.keys.mul_(0.5)
    assert_close(there, here)


def crop(decoder):
    decoder.keys, decoder.values = decoder.keys[:, :, :-6], decoder.values[:, :, :-6]


def restart_sequence(decoder, factor):
    """End a sequence with rows that are infinite or NaN, by `factor`, and begin another sequence."""
    decoder.row = decoder.row * factor
    decoder.steps(2)
    decoder.keys, decoder.values = decoder.begin
    decoder.row = torch.ones_like(decoder.row)
    decoder.row.sum().item()  # sends the end of the first sequence


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(
    ("change", "depth"),
    [(crop, 8), (partial(restart_sequence, factor=math.inf), 9), (partial(restart_sequence, factor=math.nan), 16)],
    ids=["cropped", "after infinity", "after nan"],
)
def test_entries_behind_the_length_are_not_read(change, depth):
    there, here = make_pair(fused_attention, depth)
    for decoder in (there, here):
        decoder.steps(RUNS)
        change(decoder)
    torch.testing.assert_close(there.steps(8), here.steps(8))
    assert_close(there, here)
    # the comparison with the ops at another length has found no difference
    assert launch_growth(lambda: there.steps(2))[1] == 2


class BeamDecoder(Decoder):
    """Two sequences that swap after each step, and an index table that each step writes."""

    def __init__(self, device, attend, depth=1):
        super().__init__(device, attend, depth)
        self.keys, self.values, self.row = (torch.cat((one, one * 0.5)) for one in (self.keys, self.values, self.row))
        self.table = torch.zeros(2, 300, dtype=torch.float64).to(device)
        self.order = torch.tensor([1, 0]).to(device)

    def forward(self):
        before = self.keys.shape[-2]
        super().forward()
        self.table = self.table.index_select(0, self.order)
        self.table[:, before] = self.row.flatten(1).sum(1)
        self.row = self.row + self.table[:, :before].sum() * 1e-6
        self.keys, self.values = (one.index_select(0, self.order) for one in (self.keys, self.values))

    def results(self):
        return [*super().results(), self.table.cpu()]


class PreallocatedDecoder(Decoder):
    """A decoder with a cache of fixed size. The next position is a slot of the program."""

    def __init__(self, device, attend, depth=1):
        super().__init__(device, attend, depth)
        self.position = BEGIN
        self.keys, self.values = (
            torch.cat((one, torch.zeros(1, HEADS, 300, WIDTH, dtype=one.dtype, device=one.device)), 2)
            for one in (self.keys, self.values)
        )

    def forward(self):
        row = self.row
        for _ in range(self.depth):
            row = torch.tanh(row * 1.5) + 0.1
        query, key, value = (row @ weight for weight in self.weights)
        self.keys[:, :, self.position], self.values[:, :, self.position] = key[:, :, 0], value[:, :, 0]
        self.position += 1
        keys, values = self.keys[:, :, : self.position], self.values[:, :, : self.position]
        self.row = self.attend(query, keys, values, self.bias)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("steps", [RUNS, 140])  # the longer one outgrows its first capacity
def test_step_with_a_preallocated_cache_is_a_graph(steps):
    there, here = (
        PreallocatedDecoder(REMOTE, fused_attention, 23 + steps % 7),
        PreallocatedDecoder("cpu", fused_attention, 23 + steps % 7),
    )
    torch.testing.assert_close(there.steps(steps), here.steps(steps))
    assert launch_growth(lambda: there.steps(5))[1] == 5
    here.steps(5)
    assert_close(there, here)


@pytest.mark.usefixtures("session")
def test_beam_swap_reorders_buffers():
    there, here = BeamDecoder(REMOTE, fused_attention, 20), BeamDecoder("cpu", fused_attention, 20)
    torch.testing.assert_close(there.steps(RUNS), here.steps(RUNS))
    launches, graphs = launch_growth(lambda: there.steps(10))
    here.steps(10)
    assert graphs == 10
    assert launches <= 20  # inputs are copied to the graph, and results that the next step needs
    assert_close(there, here)


@pytest.mark.usefixtures("session")
def test_held_cache_is_not_overwritten_by_beams():
    there, here = BeamDecoder(REMOTE, fused_attention, 21), BeamDecoder("cpu", fused_attention, 21)
    kept = []
    for _ in range(RUNS):
        for decoder in (there, here):
            kept.append((decoder.keys, decoder.values))
            decoder.step()
    assert_close(there, here)
    for ours, theirs in zip(kept[::2], kept[1::2], strict=True):
        torch.testing.assert_close([one.cpu() for one in ours], [*theirs])


def drop_last_key(query, before, values):
    del before
    return torch.nn.functional.scaled_dot_product_attention(query, values[:, :, :-1], values[:, :, :-1])


def attend_before_append(query, before, values):
    del values
    return torch.nn.functional.scaled_dot_product_attention(query, before, before)


def attend_to_copy_before_append(query, before, values):
    del values
    twice = before[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 2, -1, 8)
    return torch.nn.functional.scaled_dot_product_attention(query, twice, twice)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(
    ("attend", "depth"), [(drop_last_key, 30), (attend_before_append, 31), (attend_to_copy_before_append, 32)]
)
def test_unread_entry_may_be_infinite(attend, depth):
    there, here = make_pair(None, 1)
    begin = here.keys[:, :1, :, :8]
    values = {REMOTE: begin.to(REMOTE), "cpu": begin}

    @torch.no_grad()
    def step(device, number):
        row = torch.full((1, 1, 1, 8), number, dtype=torch.float64).to(device)
        query = (there if device == REMOTE else here).row[:, :2, :, :8]
        for _ in range(depth):
            query = torch.tanh(query * 1.5)
        before, values[device] = values[device], torch.cat((values[device], row), 2)
        return attend(query, before, values[device]).cpu()

    def compare(number):
        torch.testing.assert_close(step(REMOTE, number), step("cpu", number))

    for number in range(RUNS):
        compare(number / 8)
    assert launch_growth(lambda: compare(1.0))[1] == 1
    compare(math.inf)


@pytest.mark.usefixtures("session")
def test_alternating_sequences_equal_cpu():
    there, here = make_pair(fused_attention, 10)
    others = Decoder(REMOTE, fused_attention, 10), Decoder("cpu", fused_attention, 10)
    for decoder, other in zip((there, here), others, strict=True):
        other.weights, other.row = decoder.weights, -decoder.row
        for _ in range(RUNS):
            decoder.step(), other.step()
    assert_close(there, here)
    assert_close(*others)
    assert launch_growth(lambda: [there.step(), others[0].step()])[1] == 2


@pytest.mark.usefixtures("session")
def test_op_without_padding_rule_prevents_graph(server):
    there, here = make_pair(mean_attention, 11)
    torch.testing.assert_close(there.steps(RUNS), here.steps(RUNS))
    assert launch_growth(lambda: there.steps(3))[1] == 0
    reason = "aten::mean.dim has no rule for a size that grows"
    assert reason in server.log.read_text()
    decided = open_session().router.ask(StatsRequest(decisions=True), StatsReply, 0).decisions
    decisions = [one.decision for one in decided if one.strategy == "growing-graphs"]
    assert any(one.startswith("not used: ") and one.endswith(reason) for one in decisions)


@pytest.mark.usefixtures("session")
def test_generate_takes_three_launches_for_a_token():
    here = FAMILIES["llama"].make()
    here.generation_config.eos_token_id = None
    there = copy.deepcopy(here).to(REMOTE)
    expected = run_families.generate(here, 60, "dynamic")
    for _ in range(2):
        assert torch.equal(run_families.generate(there, 60, "dynamic"), expected)
    longer, shorter = (launch_growth(partial(run_families.generate, there, count, "dynamic")) for count in (60, 50))
    assert [more - less for more, less in zip(longer, shorter, strict=True)] == [20, 10]


@pytest.mark.usefixtures("session")
def test_graph_memory_is_freed_at_session_end():
    before = executor_figures()["device_allocated"]
    Decoder(REMOTE, fused_attention, 22).steps(RUNS)
    assert executor_figures()["recorded_graph_bytes"] > 1 << 12
    djinn.shut_down()
    djinn.init()
    assert executor_figures()["device_allocated"] - before < 1 << 12


def test_exact_session_records_no_graph_of_a_capacity(server):
    with configured(servers=[server.url("tcp")], token=server.token, disable=("local",)):
        djinn.init()
        there, here = make_pair(fused_attention, 12)
        assert torch.equal(there.steps(RUNS), here.steps(RUNS))
        assert launch_growth(lambda: there.steps(3))[1] == 0


def test_cached_result_of_a_graph_is_dense(python, tmp_path, plain_environment):
    cache = {"DJINN_PLUGIN_RESULT_CACHE_GIB": "0.25", "DJINN_PLUGIN_RESULT_CACHE_SECONDS": "0"}
    environment = plain_environment | cache | {"DJINN_PLUGINS": "tcp,fakegpu,graphs,result_cache"}
    with (
        counting.serving(tmp_path, environment, "--graphs", start=python.start) as server,
        configured(servers=[server.url("tcp")], token=server.token, disable=("local",), exact=False),
    ):
        RemoteControl(tmp_path).configure(launch=0.1)
        djinn.init()
        there, here = make_pair(fused_attention, 15)
        first = [dict(vars(one)) for one in (there, here)]
        torch.testing.assert_close(there.steps(RUNS), here.steps(RUNS))
        later = [vars(one) | {"keys": one.keys.clone(), "values": one.values.clone()} for one in (there, here)]
        for _ in range(3):
            for one, begin, end in zip((there, here), first, later, strict=True):
                vars(one).update(begin)
                one.step()  # cached, so the next runs will be as well
                vars(one).update(end)
            for _ in range(5):
                there.step(), here.step()
                torch.testing.assert_close(
                    *[torch.as_strided(one.keys, (9,), (300,), 5).cpu() for one in (there, here)]
                )
        assert executor_figures()["runs_reused"] > 3
