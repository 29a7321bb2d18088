"""Compiled programs record the same ops as eager ones. Repeated calls dispatch no op."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import djinn
from djinn.compat import LazyTensor
from djinn_client.interception.native import calls
from djinn_integrations.dynamo.graph import KEPT

REMOTE = "remote_accelerator:0"


@pytest.fixture(scope="module", autouse=True)
def executor():
    djinn.shut_down()
    djinn.configure(threads=1)
    yield
    djinn.shut_down()
    djinn.configure()


@pytest.fixture(autouse=True)
def session():
    torch._dynamo.reset()
    torch.ones(1, device=REMOTE).cpu()
    yield
    torch._dynamo.reset()


@contextmanager
def dispatched_ops():
    """Yield the names of the ops that PyTorch dispatches in the block."""
    names = []
    with torch.autograd.profiler.profile() as profile:
        yield names
    names += [event.name for event in profile.function_events if event.name.startswith("aten::")]


def compile_function(function, **options):
    return torch.compile(function, backend="djinn", fullgraph=True, **options)


def count_recorded_ops(run):
    """Return the number of instructions that `run` records."""
    before = djinn.stats()["ops_captured"]
    run()
    return djinn.stats()["ops_captured"] - before


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))


@torch.no_grad()
def test_compiled_model_equals_eager():
    model, given = network(), torch.randn(5, 8)
    expected = model(given)
    run = compile_function(model.to(REMOTE))
    remote = given.to(REMOTE)
    assert torch.equal(run(remote).cpu(), expected)
    with dispatched_ops() as names:
        out = run(remote)
    assert names == []
    assert torch.equal(out.cpu(), expected)
    assert count_recorded_ops(lambda: run(remote)) == count_recorded_ops(lambda: model(remote)) > 3


@torch.no_grad()
def test_graph_runs_with_other_sizes_and_dtypes():
    run = compile_function(lambda x, y: (x @ y).relu() + x.sum(), dynamic=False)
    for rows in (2, 3, 2, 5, 3):
        for dtype in (torch.float32, torch.float64):
            x, y = torch.randn(rows, 4, dtype=dtype), torch.randn(4, 6, dtype=dtype)
            torch.testing.assert_close(run(x.to(REMOTE), y.to(REMOTE)).cpu(), (x @ y).relu() + x.sum())


@torch.no_grad()
def test_graph_with_symbolic_sizes_equals_eager():
    run = compile_function(lambda x: torch.cat([x, x * 2]).sum(0), dynamic=True)
    for rows in [*range(2, 9), 3, 2]:
        x = torch.randn(rows, 4)
        torch.testing.assert_close(run(x.to(REMOTE)).cpu(), torch.cat([x, x * 2]).sum(0))


@torch.no_grad()
def test_in_place_writes_take_effect():
    def step(state, x):
        state.mul_(0.5).add_(x)
        state[0].zero_()
        return state.sum()

    run = compile_function(step)
    here, there, x = torch.zeros(3, 2), torch.zeros(3, 2, device=REMOTE), torch.randn(3, 2)
    far = x.to(REMOTE)
    for turn in range(4):
        version = there._version
        expected = step(here, x)
        with dispatched_ops() as names:
            made = run(there, far)
        assert turn == 0 or "aten::mul_" not in names
        assert torch.equal(made.cpu(), expected)
        assert there._version > version, "autograd must see the write"
        assert torch.equal(there.cpu(), here)


@torch.no_grad()
def test_graph_with_inputs_sharing_memory_equals_eager():
    def step(a, b):
        a.add_(1)
        return b * 2

    run = compile_function(step)
    for _ in range(3):
        for shared in (False, True):
            here = torch.zeros(4)
            there = torch.zeros(4, device=REMOTE)
            mine = (here[:2], here[1:3] if shared else torch.zeros(2))
            theirs = (there[:2], there[1:3] if shared else torch.zeros(2, device=REMOTE))
            assert torch.equal(run(*theirs).cpu(), step(*mine))


@torch.no_grad()
def test_graph_with_results_sharing_memory_equals_eager():
    def split(x):
        y = x + 1
        return y[:1], y[1:], x[0]

    run = compile_function(split)
    x = torch.arange(6.0).reshape(3, 2)
    for _ in range(3):
        remote = x.to(REMOTE)
        first, rest, view = run(remote)
        rest.zero_()
        remote.zero_()
        assert torch.equal(first.cpu(), x[:1] + 1)
        assert torch.equal(view.cpu(), torch.zeros(2))


@torch.no_grad()
def test_constants_are_uploaded_once():
    run = compile_function(lambda x: x + torch.tensor([1.0, 2.0], device=x.device))
    x = torch.ones(2, device=REMOTE)
    assert run(x).tolist() == [2.0, 3.0]
    before = djinn.stats()["bytes_uploaded"]
    assert run(x).tolist() == [2.0, 3.0]
    assert djinn.stats()["bytes_uploaded"] == before
    djinn.shut_down()
    djinn.configure(threads=1)  # a new session has none of the values
    for _ in range(2):
        assert run(torch.ones(2, device=REMOTE)).tolist() == [2.0, 3.0]


@torch.no_grad()
def test_random_ops_equal_eager():
    run = compile_function(lambda x: nn.functional.dropout(x, 0.5) + torch.rand_like(x))
    for _ in range(3):
        torch.manual_seed(7)
        got = run(torch.ones(32, device=REMOTE)).cpu()
        torch.manual_seed(7)
        x = torch.ones(32, device=REMOTE)
        assert torch.equal(got, (nn.functional.dropout(x, 0.5) + torch.rand_like(x)).cpu())
    assert not torch.equal(run(torch.ones(32, device=REMOTE)).cpu(), got)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_compiled_training_equals_local(optimizer):
    local, x, y = network(), torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])
    remote = copy.deepcopy(local).to(REMOTE)
    run = compile_function(remote)
    steps = [(local, local, optimizer(local.parameters(), lr=0.1), x, y)]
    steps += [(remote, run, optimizer(remote.parameters(), lr=0.1), x.to(REMOTE), y.to(REMOTE))]
    for _ in range(5):
        losses = []
        for _, model, optim, given, wanted in steps:
            optim.zero_grad()
            loss = nn.functional.cross_entropy(model(given), wanted)
            loss.backward()
            optim.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for mine, theirs in zip(local.parameters(), remote.parameters(), strict=True):
        torch.testing.assert_close(theirs.detach().cpu(), mine.detach())


@torch.no_grad()
def test_intermediate_values_are_freed():
    run = compile_function(lambda x: (x + 1).relu().mul(2).sum())
    x = torch.ones(1000, device=REMOTE)
    counts = []
    for _ in range(6):
        run(x).item()
        counts.append(torch.remote_accelerator.memory_allocated())
    assert len(set(counts[2:])) == 1


@torch.no_grad()
def test_other_scalars_record_graph_again(monkeypatch):
    run, x = compile_function(lambda x: (x + 1).relu()), torch.ones(2, device=REMOTE)
    run(x)
    monkeypatch.setattr(calls, "generation", calls.generation + 1)
    for known in (False, True):
        with dispatched_ops() as names:
            out = run(x)
        assert known == (names == [])
        assert out.tolist() == [2.0, 2.0]


def test_inference_tensor_is_not_written_by_graph():
    run, plain = compile_function(lambda x: x.add_(1)), torch.ones(2, device=REMOTE)
    with torch.inference_mode():
        inference = torch.ones(2, device=REMOTE)
    with torch.no_grad():
        run(plain)
        with pytest.raises(RuntimeError, match="outside InferenceMode"):
            run(inference)


@torch.no_grad()
def test_number_of_recorded_graphs_is_bounded():
    run = compile_function(lambda x: x * 2, dynamic=True)
    for size in range(2, KEPT + 20):
        assert run(torch.ones(size, device=REMOTE)).sum().item() == 2 * size


@torch.no_grad()
def test_graph_runs_op_by_op_without_plugin():
    run, x = compile_function(lambda x: (x + 1) * 2), torch.ones(2, device=REMOTE)
    run(x)
    djinn.configure(disable=("dynamo",))
    with dispatched_ops() as names:
        assert run(x).tolist() == [4.0, 4.0]
    djinn.configure(disable=())
    assert {"aten::add", "aten::mul"} <= set(names)


@torch.no_grad()
def test_verify_sees_every_op_of_a_graph():
    run, x = compile_function(lambda x: ((x + 1) * 2).relu()), torch.ones(2, device=REMOTE)
    for _ in range(2):
        run(x)
    with djinn.verify() as report:
        run(x)
    assert report.checked >= 3


def test_timeline_shows_compiled_backward_in_module():
    run, x = compile_function(network().to(REMOTE)), torch.ones(2, 8, device=REMOTE)
    for _ in range(3):
        run(x).sum().backward()
    with djinn.profile() as timeline:
        run(x).sum().backward()
    names = [(event.kind, event.args.get("path", event.name)) for event in timeline.events]
    assert ("module", "backward / OptimizedModule") in names
    assert names.count(("capture", "recorded call")) == 1


@torch.no_grad()
def test_other_backends_receive_no_remote_tensors():
    asked = []

    def other(graph_module, inputs):
        asked.append(inputs)
        return graph_module.forward

    run = torch.compile(lambda x: x + 1, backend=other)
    assert run(torch.ones(2, device=REMOTE)).tolist() == [2.0, 2.0]
    assert not any(isinstance(i, LazyTensor) for inputs in asked for i in inputs)


@torch.no_grad()
def test_compiled_decoding_with_static_cache_equals_local():
    from transformers import GPT2Config, GPT2LMHeadModel, StaticCache

    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
    local = GPT2LMHeadModel(config).eval()
    remote = copy.deepcopy(local).to(REMOTE)

    def decode(model, forward, device):
        cache = StaticCache(config=config, max_cache_len=16)
        token, tokens = torch.tensor([[3]], device=device), []
        for _ in range(8):
            logits = forward(token, past_key_values=cache, use_cache=True).logits
            token = logits[:, -1:].argmax(-1)
            tokens.append(token.item())
        return tokens

    run = torch.compile(remote, backend="djinn", dynamic=False)
    expected = decode(local, local, "cpu")
    assert decode(remote, run, REMOTE) == expected
    counts = []
    for forward in (run, remote):
        with dispatched_ops() as names:
            assert decode(remote, forward, REMOTE) == expected
        counts.append(len(names))
    assert counts[0] < counts[1] / 2  # the remaining bytes are mostly the cache and the token
