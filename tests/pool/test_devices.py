"""The devices of one server: as one, some of them, or each by its index."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading

import pytest
import torch
from configured import configured
from figures import figures
from servers import SECONDS, start_server

import djinn
from djinn.planning import DataResidency
from djinn.testing import open_connections, open_session
from djinn_client.runtime import client
from djinn_core.registry.selection import Selection
from djinn_pool import held_uploads
from djinn_server.gateway.device_discovery import expand_all

ANY, FIRST, SECOND = (f"remote_accelerator:{index}" for index in range(3))
module = torch.get_device_module("remote_accelerator")


@pytest.fixture(scope="module")
def serving_two(python, plain_environment, tmp_path_factory):
    """Return the connection file of a server with two CPU devices."""
    options = ["--device", "all", "--threads", "1", "--drain-seconds", "1", "--store-gib", "0"]
    server = start_server(python.start, tmp_path_factory.mktemp("two"), *options, env=plain_environment)
    yield server.file
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture(scope="module")
def connect_two(serving_two):
    """Return a context manager that connects to the server with two devices."""

    @contextlib.contextmanager
    def configure(at_once=True, **settings):
        with configured(connection_file=serving_two, **settings):
            if at_once:
                djinn.init()
            yield open_session().router if at_once else None

    return configure


@pytest.fixture(scope="module")
def spread_router(connect_two):
    """Yield the router over both devices. Programs of index 0 run on them alternately."""
    with connect_two(placement_policy="round_robin") as router:
        yield router


def bytes_held(router):
    djinn.synchronize()
    return [figures(member)["memory"] for member in router.executors.members]


# --- indexes --------------------------------------------------------------------------------------------------------


def test_device_indexes_for_all_and_each(spread_router):
    assert module.device_count() == torch.accelerator.device_count() == 3
    with pytest.raises(RuntimeError, match=r"no remote_accelerator:3.*device_count\(\) is 3"):
        torch.zeros(1, device="remote_accelerator:3")


def test_tensor_stays_on_its_index(spread_router):
    before = bytes_held(spread_router)
    given = torch.ones(500, 500)
    first, second = given.to(FIRST), torch.ones(500, 500, device=SECOND)
    products = first @ first + 1, (second @ second).relu()
    assert [t.device for t in (first, second, *products)] == [torch.device(d) for d in (FIRST, SECOND) * 2]
    held = [after - there for there, after in zip(before, bytes_held(spread_router), strict=True)]
    assert held == [2 * given.nbytes] * 2
    assert torch.equal(products[0].cpu(), given @ given + 1)
    assert module.memory_allocated(1) + module.memory_allocated(2) == module.memory_allocated(0)
    assert module.get_device_properties(2).kind == "cpu"


def test_op_with_mixed_indexes_raises(spread_router):
    first, second = torch.ones(2, 2, device=FIRST), torch.ones(2, 2, device=SECOND)
    message = "Expected all tensors to be on the same device, but found at least two devices"
    for mix in (torch.add, torch.mm, lambda a, b: torch.cat([a, b]), lambda a, b: a.index_add_(0, b[0].long(), b)):
        for one, other in ((first, second), (second, first), (first, torch.ones(2, 2, device=ANY))):
            with pytest.raises(RuntimeError, match=f"{message}, {one.device} and {other.device}!"):
                mix(one, other)
    assert torch.equal((first + 1).cpu(), torch.full((2, 2), 2.0)), "what was refused has left nothing behind"


def test_op_result_keeps_index_of_operands(spread_router):
    for device in (ANY, FIRST, SECOND, FIRST):  # signatures and examples are shared
        for size in (3, 4, 5):
            made = torch.nn.functional.gelu(torch.ones(1, size, 2, device=device))
            assert torch.cat([made, made], 1).device == made.device == torch.device(device)
        assert torch.nonzero(torch.ones(2, device=device)).device == torch.device(device)
        assert torch.ones(4, device=device)[torch.tensor([1, 0])].device == torch.device(device)
        assert torch.eye(3, device=device).inverse().device == torch.device(device)


def test_copy_between_indexes_moves_value(spread_router):
    given = torch.randn(300, 300)
    first = given.to(FIRST)
    djinn.synchronize()
    djinn.reset_stats()
    second = first.to(SECOND)
    third = torch.empty(300, 300, device=ANY).copy_(second)
    into = torch.zeros(300, 300, device=FIRST)
    into.copy_(second)
    djinn.synchronize()
    assert djinn.stats()["bytes_sent"] < given.nbytes / 10, "no bytes of it came through this process"
    assert djinn.stats()["bytes_received"] < given.nbytes / 10
    second.zero_()
    assert all(torch.equal(t.cpu(), given) for t in (first, third, into))


def test_device_context_selects_index(spread_router):
    with module.device(2):
        assert torch.zeros(1, device="remote_accelerator").device == torch.device(SECOND)
    like = torch.ones(1, device=FIRST)
    for index in (2, 0):
        with module.device(index):
            made = torch.ones_like(like, device="remote_accelerator")
            assert made.device == torch.device("remote_accelerator", index)


def train(device):
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    torch.manual_seed(5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.linspace(0, 1, 48, device=device).view(6, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_at_index_equals_cpu(spread_router):
    assert train(SECOND) == train(FIRST) == train(ANY) == train("cpu")


def test_model_split_over_indexes_equals_cpu(spread_router):
    torch.manual_seed(0)
    theirs = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    ours = copy.deepcopy(theirs)
    ours[:2].to(FIRST)
    ours[2].to(SECOND)
    given = torch.randn(5, 6)
    for model, hop in ((theirs, lambda t: t), (ours, lambda t: t.to(SECOND))):
        start = given.to(next(model.parameters()).device)
        model[2](hop(model[:2](start))).square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad.device == mine.device
        assert torch.equal(mine.grad.cpu(), other.grad)
    copied = copy.deepcopy(ours[2])
    assert copied.weight.device == torch.device(SECOND)
    assert torch.equal(copied.to(FIRST).weight.cpu(), theirs[2].weight)


def test_rng_state_is_per_index(spread_router):
    def draw(device):
        return torch.randn(4, device=device).cpu()

    torch.manual_seed(7)
    alone = [torch.randn(4) for _ in range(2)]
    torch.manual_seed(7)
    turns = [draw(device) for device in (ANY, FIRST, SECOND, FIRST, ANY, SECOND)]
    for number, drawn in zip((0, 0, 0, 1, 1, 1), turns, strict=True):
        assert torch.equal(drawn, alone[number])
    state = module.get_rng_state(2)
    kept = draw(SECOND)
    module.set_rng_state(state, 2)
    assert torch.equal(draw(SECOND), kept)
    generator = torch.Generator(device=FIRST).manual_seed(7)
    assert torch.equal(torch.randn(4, device=FIRST, generator=generator).cpu(), alone[0])
    with pytest.raises(RuntimeError, match=r"accelerator:2.*accelerator:1|accelerator:1.*accelerator:2"):
        torch.randn(4, device=SECOND, generator=generator)


def test_events_are_recorded_per_index(spread_router):
    """An event is recorded on the current device, or on the device of the given stream, as elsewhere in PyTorch."""
    with torch.accelerator.device_index(2):
        start, end = (torch.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.ones(100, 100, device=SECOND) @ torch.ones(100, 100, device=SECOND)
    end.record(module.current_stream(SECOND))
    assert [start.device, end.device] == [torch.device(SECOND)] * 2
    assert start.elapsed_time(end) > 0
    other = torch.Event(device=FIRST, enable_timing=True)
    other.record(module.current_stream(FIRST))
    with pytest.raises(ValueError, match="of one device"):
        start.elapsed_time(other)


def test_saved_tensor_loads_on_its_index(spread_router, tmp_path):
    torch.save(torch.arange(5.0, device=SECOND), tmp_path / "there.pt")
    assert torch.load(tmp_path / "there.pt").device == torch.device(SECOND)
    moved = torch.load(tmp_path / "there.pt", map_location=FIRST)
    assert moved.device == torch.device(FIRST)
    assert moved.tolist() == [0, 1, 2, 3, 4]


def test_residency_of_earlier_programs_guides_placement(spread_router):
    model = torch.nn.Linear(4, 4).to(ANY)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2, 4, device=ANY)).sum().backward()
    djinn.synchronize()
    optimizer.step()  # arithmetic, to one who does not know what its operands are
    djinn.synchronize()
    found = set(djinn.planning.last_profile().residency.values())
    assert {DataResidency.PERSISTENT_WEIGHT, DataResidency.GRADIENT} <= found


# --- which of a server's devices ---------------------------------------------------------------------------------------


def test_only_selected_server_devices_are_used(connect_two):
    with connect_two(server_devices=["1"]):
        assert len(open_connections()) == 1
        assert module.device_count() == 1
        assert (torch.ones(2, device=ANY) + 1).tolist() == [2, 2]
    with connect_two(server_devices="1,cpu"):  # the others follow in the server's order
        processes = [one.attached.process for one in open_connections()]
    with connect_two(device="cpu:0"):  # both: the session begins on the least loaded
        assert {one.attached.process for one in open_connections()} == {*processes}
    with (
        pytest.raises(djinn.errors.AccessRefused, match=r"no device '7', it offers cpu:0, cpu:0"),
        connect_two(server_devices=["7"]),
    ):
        pass


def test_indexes_are_known_after_connecting(connect_two):
    with connect_two(at_once=False):
        assert module.device_count() == 1
        assert torch.ones(2).to(SECOND).add(1).tolist() == [2, 2]
        assert module.device_count() == 3


def test_named_devices_are_not_enumerated():
    assert expand_all(["cuda:1", "cpu"], Selection(), SECONDS) == ["cuda:1", "cpu"]


KINDS = """
from djinn.hooks import Device, hookimpl
from djinn.planning import DeviceCapabilities

djinn_api_version = "2.0"


class Broken(Device):
    name = "broken"

    def discover(self):
        raise RuntimeError("no driver")


class Sound(Device):
    name = "sound"

    def discover(self):
        return [DeviceCapabilities("sound:0", "sound", "Sound")]


@hookimpl
def djinn_register_devices(settings):
    return [Broken(), Sound()]
"""


def test_failing_device_kind_is_skipped(tmp_path, monkeypatch, caplog):
    (tmp_path / "two_kinds.py").write_text(KINDS)
    monkeypatch.syspath_prepend(tmp_path)
    assert expand_all(["cuda:1", "all"], Selection(plugins=("two_kinds",)), SECONDS) == ["cuda:1", "sound:0"]
    (record,) = [record for record in caplog.records if "devices of a kind" in record.getMessage()]
    assert record.djinn["kind"] == "broken"
    assert "no driver" in record.djinn["error"]


# --- memory -----------------------------------------------------------------------------------------------------------


def generate(model, device):
    prompt = torch.arange(9)[None].to(device)
    return model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0).cpu()


def test_model_larger_than_one_device_generates(connect_two):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 5, "vocab_size": 300}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    expected = generate(model, "cpu")
    size = sum(p.nbytes for p in model.parameters())
    limit = size * 7 // 10
    with connect_two(memory_limits={"0": limit, "1": limit}) as router:
        assert torch.equal(generate(model.to(ANY), ANY), expected)
        peaks = [figures(member)["memory_peak"] for member in router.executors.members]
        assert all(size / 5 < peak <= limit for peak in peaks)
        assert bytes_held(router) == [router._locations.held[e] for e in range(2)]


def test_concurrent_uploads_and_programs_equal_cpu(connect_two, monkeypatch):
    monkeypatch.setattr(held_uploads, "HELD_LIMIT", 2000)  # so that uploads are given away all the time
    wrong = []

    def work(number):
        try:
            for turn in range(25):
                given = [torch.full((50,), float(number + turn + i)).to(ANY) for i in range(6)]
                total = float(sum(given[::2]).sum())
                if total != 50 * 3 * (number + turn + 2):
                    wrong.append((number, turn, total))
        except Exception as error:
            wrong.append(error)

    before = sys.getswitchinterval()
    with connect_two(placement_policy="round_robin"):
        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
    assert wrong == []


def test_resident_values_count_for_next_program(connect_two):
    tables = [torch.ones(100, 1000) for _ in range(4)]
    with connect_two(memory_limits="1400 kB") as router:
        kept = []
        for table in tables:  # 400 kB each, and while one is made, its source is there as well
            kept.append(table.to(ANY) + 0)
            kept[-1].sum().item()
        assert bytes_held(router) == [2 * tables[0].nbytes] * 2


def test_unsatisfiable_memory_limit_raises(connect_two):
    fits_nowhere = pytest.raises(djinn.errors.InvalidStage, match="400,000 bytes of the inputs fit into no device")
    with connect_two(memory_limits="100 kB"), fits_nowhere:
        (torch.ones(100, 1000).to(ANY) + 1).sum().item()
    with (
        pytest.raises(djinn.errors.ConfigurationError, match="memory_limits names the device '5'"),
        connect_two(memory_limits="5=1GB"),
    ):
        pass


@pytest.mark.parametrize("policy", ["single", "balanced", "round_robin", "cost_based"])
def test_policies_respect_memory_limits(connect_two, policy):
    tables = [torch.full((100, 100), float(n)) for n in range(8)]  # 40 kB each
    with (
        connect_two(placement_policy=policy, memory_limits={"0": "100 kB", "1": "2 MB"}) as router,
        client.record_plans() as plans,
    ):
        held = [table.to(ANY) for table in tables]
        total = sum(table * 2 for table in held)
        assert total.sum().item() == 2 * sum(table.sum().item() for table in tables)
        assert bytes_held(router)[0] <= 100_000
    used = {device for plan in plans for device in plan.placement.devices}
    assert any(device.startswith("1/") for device in used)


def test_default_placement_policy_is_cost_based(connect_two):
    with connect_two(), client.record_plans() as plans:
        (torch.ones(3, device=ANY) + 1).tolist()
    with connect_two(placement_policy="single"), client.record_plans() as named:
        (torch.ones(3, device=ANY) + 1).tolist()
    assert [plan.placement.policy for plan in (*plans, *named)] == ["cost_based", "single"]
