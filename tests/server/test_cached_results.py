"""The cache of results (plugins/result_cache) on real executors: results are those of the ops, bit by bit, and writes stay in their session."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from configured import configured
from servers import start_server

import djinn
from djinn.testing import executor_figures
from djinn_client.runtime import client
from djinn_client.runtime.connecting.servers import ask_servers

REMOTE = "remote_accelerator:0"
CACHE = {"gib": 0.25, "seconds": 0.0}
CLIENT = """
import json, os, random, sys, torch
from djinn.testing import executor_figures

torch.set_num_threads(1)
ROUNDS = os.environ.get("DJINN_EXACT") == "0"
REMOTE = "remote_accelerator:0"
WRITES = (
    lambda t: t.add_(1),
    lambda t: t[1:].mul_(2),
    lambda t: t[::3].zero_(),
    lambda t: torch.add(t, 1, out=t),
    lambda t: t.t()[:, 1:].copy_(t.t()[:, 1:] * 0.5),
    lambda t: torch._foreach_add_([t], 2),
    lambda t: t.detach().unbind(0)[1].neg_(),
    lambda t: t.view(torch.int32).bitwise_xor_(1),
)
PROGRAMS = (
    lambda x, w: torch.tanh(x @ w) + x,
    lambda x, w: (torch.relu(x * 2 - w) @ w)[1:],
    lambda x, w: torch.cat([x, w.t()]).softmax(0),
    lambda x, w: (x - w).view(-1)[3:].view(-1, 1) * 0.5,
    lambda x, w: x.add(w).add_(1).t(),
)

def work(seed, shared):
    chance, made = random.Random(seed), torch.Generator().manual_seed(0)
    inputs, weight = torch.randn(3, 24, 24, generator=made), torch.randn(24, 24, generator=made)
    weight += 0 if shared else seed
    ours, kept = weight.to(REMOTE), []
    for _ in range(60):
        x = inputs[chance.randrange(3)]
        if kept and chance.random() < 0.3:
            write, pair = chance.choice(WRITES), chance.choice(kept)
            write(pair[0]), write(pair[1])
        elif chance.random() < 0.05:
            ours[2:].add_(1), weight[2:].add_(1)
        else:
            program = chance.choice(PROGRAMS)
            kept.append((program(x.to(REMOTE), ours), program(x, weight)))
            del kept[:-6]
        found = [one.cpu() for one, _ in kept]
        for one, (_, local) in zip(found, kept):
            same = torch.allclose(one, local, 1e-4, 1e-5, equal_nan=True) if ROUNDS else torch.equal(one.nan_to_num(7), local.nan_to_num(7))
            if not same:
                return False
    return True

for line in sys.stdin:
    print(json.dumps({"right": work(*json.loads(line)), **executor_figures()}), flush=True)
"""


@pytest.fixture(params=[("--threads", "1")], ids=" ".join)
def caching_server(request, start_python, tmp_path, plain_environment):
    server = start_server(
        start_python,
        tmp_path,
        *request.param,
        env=plain_environment
        | {f"DJINN_PLUGIN_RESULT_CACHE_{name.upper()}": str(value) for name, value in CACHE.items()},
    )
    yield server
    server.process.kill()
    server.process.wait()


@pytest.mark.parametrize(
    ("caching_server", "exact"),
    [
        (("--threads", "1"), "1"),
        (("--threads", "1", "--compile", "inductor"), "1"),
        (("--threads", "1", "--batch-sessions"), "0"),
    ],
    indirect=["caching_server"],
    ids=["alone", "compile", "batches"],
)
def test_writes_of_one_session_are_not_seen_by_others(caching_server, exact, python, plain_environment):
    env = plain_environment | {"DJINN_CONNECTION_FILE": str(caching_server.file), "DJINN_EXACT": exact}
    clients = [python.start_talking("-c", CLIENT, env=env) for _ in range(2)]
    try:
        for seeds in ((1, 2), (3, 3)):
            for seed, client in zip(seeds, clients, strict=True):
                client.stdin.write(json.dumps([seed, True]) + "\n")
                client.stdin.flush()
            told = [json.loads(client.stdout.readline()) for client in clients]
            assert [one["right"] for one in told] == [True, True]
        assert min(one["runs_reused"] for one in told) > 10
    finally:
        for client in clients:
            with client:
                client.kill()


@pytest.mark.parametrize("exact", [True, False])
def test_session_with_reused_results_survives_kill_of_its_executor(caching_server, exact):
    def program(x):
        return torch.tanh(x @ x) + x

    inputs = torch.randn(2, 24, 24)
    with configured(servers=[caching_server.url("tcp")], token=caching_server.token, disable=("local",), exact=exact):
        djinn.init()
        kept = []
        for number in (0, 1, 0, 1, 0):
            kept.append((program(inputs[number].to(REMOTE)), program(inputs[number])))
            djinn.synchronize()
        for one in kept[2]:
            one.add_(1)
        djinn.synchronize()
        assert executor_figures()["runs_reused"] >= 2
        os.kill(executor_of_session(), signal.SIGKILL)
        kept.append((program(inputs[1].to(REMOTE)), program(inputs[1])))
        for found, expected in kept:
            assert torch.equal(found.cpu(), expected)


def executor_of_session():
    (status,) = ask_servers(client.settings()).values()
    return next(executor.process for executor in status.executors if executor.state == "ready")


@pytest.fixture
def caching_session():
    with configured(executor="inline", plugin_settings={"result_cache": CACHE}, threads=1):
        yield


def count_reused_runs(program, *inputs, times=4):
    """Return how many of the runs reused earlier results. Compare each with the local result."""
    djinn.init()
    before = executor_figures()["runs_reused"]
    expected = program(*inputs)
    for _ in range(times):
        assert torch.equal(program(*[one.to(REMOTE) for one in inputs]).cpu(), expected)
    return executor_figures()["runs_reused"] - before


@pytest.mark.usefixtures("caching_session")
class TestKey:
    def test_only_equal_inputs_have_equal_keys(self):
        x, y = torch.randn(2, 8, 8)
        assert count_reused_runs(lambda x: torch.tanh(x @ x), x) >= 2
        remote = [torch.tanh(one.to(REMOTE) @ one.to(REMOTE)).cpu() for one in (x, y, x)]
        assert torch.equal(remote[0], remote[2])
        assert not torch.equal(remote[0], remote[1])

    @pytest.mark.parametrize("other", [-0.0, 1, True], ids=repr)
    def test_numbers_of_other_bits_or_types_have_other_keys(self, other):
        x = torch.ones(4)
        number = 0.0 if other == 0 else 1.0
        for value in (number, other, number, other):
            result = torch.mul(x.to(REMOTE), value)
            assert torch.equal(torch.signbit(result.cpu()), torch.signbit(x * value))
            assert result.dtype == (x * value).dtype

    def test_inputs_of_equal_bytes_and_other_layouts_have_other_keys(self):
        x = torch.randn(6, 6)
        for one in (x, x.t(), x.view(4, 9), x.view(torch.int32).float(), x):
            assert torch.equal((one.to(REMOTE) * 2 + 1).cpu(), one * 2 + 1)

    def test_weights_that_were_written_have_another_key(self):
        weight, x = torch.randn(2, 300, 300)  # larger than what is hashed in each run
        ours = weight.to(REMOTE)
        for write in (lambda w: w.add_(1), lambda w: w.t()[2:].zero_(), lambda w: torch.mul(w, 2, out=w)):
            before = executor_figures()["runs_reused"]
            for _ in range(3):
                assert torch.equal(torch.tanh(x.to(REMOTE) @ ours).cpu(), torch.tanh(x @ weight))
            assert executor_figures()["runs_reused"] > before
            write(ours), write(weight)

    def test_programs_with_random_numbers_are_not_cached(self):
        x = torch.ones(64).to(REMOTE)
        dropped = [torch.nn.functional.dropout(x * 2, 0.5).cpu() for _ in range(4)]
        assert not any(torch.equal(dropped[0], other) for other in dropped[1:])

    def test_state_of_random_numbers_is_that_without_the_cache(self):
        def program():
            torch.manual_seed(3)
            x = torch.ones(64, device=REMOTE)
            first = torch.rand(4, device=REMOTE)
            for _ in range(3):
                torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 2, 4, 8).to(REMOTE)] * 3).cpu()
            return [first.cpu(), (x + torch.rand(64, device=REMOTE)).cpu()]

        found = [program() for _ in range(3)]
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))

    def test_numeric_settings_are_part_of_the_key(self):
        x = torch.randn(8, 8)
        before = torch.are_deterministic_algorithms_enabled()
        try:
            assert count_reused_runs(lambda x: x @ x, x) > 0
            torch.use_deterministic_algorithms(not before)
            assert count_reused_runs(lambda x: x @ x, x, times=1) == 0
        finally:
            torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("caching_session")
def test_failed_runs_are_not_cached():
    table, wrong = torch.randn(4, 4), torch.tensor([9])
    for _ in range(3):
        with pytest.raises((IndexError, RuntimeError)):
            torch.relu(table.to(REMOTE).index_select(0, wrong.to(REMOTE))).cpu()
    assert count_reused_runs(lambda t: torch.relu(t.index_select(0, torch.tensor([1], device=t.device))), table) > 0
    assert executor_figures()["result_cache_bytes"] > 0


@pytest.mark.usefixtures("caching_session")
def test_cache_metrics_count_hits_misses_and_evictions():
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    hits = count_reused_runs(lambda x: torch.tanh(x @ x), x, times=5)
    before = executor_figures()
    assert (before["result_cache_hits"], before["result_cache_prefix_hits"]) == (hits, 0)
    assert before["result_cache_entries"] > 0
    assert count_reused_runs(lambda x: torch.tanh(x @ x), y, times=1) == 0
    after = executor_figures()
    assert after["result_cache_misses"] > before["result_cache_misses"]
    assert after["result_cache_bytes"] > before["result_cache_bytes"]
    assert after["result_cache_evictions"] == 0


@pytest.mark.usefixtures("caching_session")
def test_cached_nan_results_keep_their_bits():
    x = torch.tensor([float("nan"), 1.0, float("-nan"), 0.0])
    for _ in range(3):
        found = (x.to(REMOTE) * 2).cpu()
        assert torch.equal(found.view(torch.int32), (x * 2).view(torch.int32))


@pytest.mark.usefixtures("caching_session")
def test_result_that_is_a_view_of_an_input_follows_its_input():
    x = torch.randn(6, 6)
    for _ in range(3):
        remote, local = x.to(REMOTE), x.clone()
        (view, other), (expected, _) = [(one[1:].t(), torch.tanh(one) @ one) for one in (remote, local)]
        assert torch.equal(other.cpu(), torch.tanh(local) @ local)
        remote.add_(1), local.add_(1)
        assert torch.equal(view.cpu(), expected)
        view.zero_(), expected.zero_()
        assert torch.equal(remote.cpu(), local)


@pytest.mark.usefixtures("caching_session")
class TestLaterWrites:
    """Programs write into an operand after the cached ops read it. The key, if any, covers the earlier bytes."""

    @pytest.mark.parametrize(
        "seen", [lambda x: x, lambda x: x[2:], lambda x: x * 3], ids=["input", "view", "intermediate"]
    )
    @pytest.mark.parametrize("kept", [False, True])
    def test_cached_results_follow_bytes_before_write(self, kept, seen):
        def program(x, operand):
            torch.manual_seed(3)
            drawn = torch.rand(4, device=x.device)
            y = torch.tanh(operand * 0.1)
            y = torch.sin(y) + y
            operand.add_(3)
            x.add_(1)
            return y, operand, x, drawn

        local = torch.zeros(8)
        remote = local.to(REMOTE)
        for number in (0, 4, 1, 2):
            if not kept:
                local = torch.full((8,), float(number))
                remote = local.to(REMOTE)
            pairs = (remote, seen(remote)), (local, seen(local))
            if seen(local).untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
                djinn.synchronize()  # the view is an input of the program
            found, expected = [program(*pair) for pair in pairs]
            assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))

    def test_view_follows_its_input_among_inputs_of_equal_bytes(self):
        def program(x, other):
            return x[1:].t(), torch.tanh(x @ other)

        values = torch.randn(4, 4)
        for shared in (True, False, True, False):
            local = [values.clone()] * 2 if shared else [values.clone(), values.clone()]
            remote = [local[0].to(REMOTE)] * 2 if shared else [one.to(REMOTE) for one in local]
            pairs = [(one[0], one[1].view(16).view(4, 4)) for one in (remote, local)]
            djinn.synchronize()
            (view, made), (expected, _) = [program(*pair) for pair in pairs]
            assert torch.equal(made.cpu(), torch.tanh(values @ values))
            for one in (remote, local):
                one[0].add_(1)
                one[1].mul_(3)
            assert torch.equal(view.cpu(), expected)


def test_cache_keeps_results_with_most_time_per_byte_within_budget():
    with configured(executor="inline", plugin_settings={"result_cache": {"gib": 1 / 1024, "seconds": 0.0}}, threads=1):
        for number in range(24):
            torch.tanh(torch.full((1, 1), float(number)).to(REMOTE) * torch.ones(200, 200).to(REMOTE)).cpu()
            assert executor_figures()["result_cache_bytes"] <= 1 << 20
        assert executor_figures()["result_cache_evictions"] > 0
        assert executor_figures()["result_cache_bytes"] > 1 << 18


def test_cached_results_are_dropped_if_a_memory_limit_needs_their_bytes():
    with configured(executor="inline", plugin_settings={"result_cache": CACHE}, memory_gib=48 / 1024, threads=1):
        x = torch.randn(1024, 1024)
        for _ in range(4):
            assert torch.equal(torch.relu(x.to(REMOTE) - 1).cpu(), torch.relu(x - 1))
        assert executor_figures()["result_cache_bytes"] > 0
        kept = [torch.full((1024, 1024), float(number)).to(REMOTE) * 2 for number in range(10)]
        assert [float(one[0, 0].cpu()) for one in kept] == [2.0 * number for number in range(10)]
        assert executor_figures()["result_cache_bytes"] == 0


def test_result_cache_needs_budget():
    with configured(executor="inline", threads=1):
        assert count_reused_runs(lambda x: torch.tanh(x @ x), torch.randn(8, 8)) == 0
