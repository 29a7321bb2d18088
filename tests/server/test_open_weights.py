"""Weights by reference: the client names them, the server reads them, and sessions share what none of them writes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from configured import configured
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from servers import start_server, wait_for

import djinn
from djinn.hooks import Observer
from djinn.testing import executor_processes, kill_executor
from djinn_client.interception.recording.recorder import current
from djinn_client.runtime import executor_client
from djinn_client.runtime.connecting.servers import ask_servers

REMOTE = "remote_accelerator:0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a model's folder with linear layers, and tensors of other dtypes and shapes."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models")
    kinds = {
        "half": torch.randn(5, 7, 3, dtype=torch.bfloat16),
        "bytes": torch.randint(0, 255, (9,), dtype=torch.uint8),
        "flags": torch.rand(8) > 0.5,
        "float8": torch.randn(16).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }
    save_file(model().state_dict() | kinds, path / "model.safetensors", metadata={"format": "pt"})
    return path


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(inplace=True), torch.nn.Linear(128, 8))


def contents(path):
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


@pytest.fixture(scope="module")
def cache(folder, tmp_path_factory):
    """Return a hub cache with the same file, which executors map into memory."""
    return fill_cache(tmp_path_factory.mktemp("cache"), folder / "model.safetensors")


def fill_cache(cache, file):
    snapshot = cache / "models--org--model" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    shutil.copy(file, snapshot)
    return cache


@pytest.fixture(params=["read", "mapped"])
def address(request, folder):
    return f"file:{folder}" if request.param == "read" else "hf://org/model"


@pytest.fixture(scope="module")
def remote(cache, tmp_path_factory, python, plain_environment):
    where = tmp_path_factory.mktemp("served")
    models = ("--models", str(tmp_path_factory.getbasetemp()), "--models", str(cache))
    server = start_server(python.start, where, *models, "--threads", "1", env=plain_environment)
    with configured(connection_file=server.file):
        djinn.init()
        yield REMOTE
    server.stop()


def mapped_bytes(process, path):
    return sum(one.rss for one in psutil.Process(process).memory_maps() if one.path == str(path))


def equal(ours, theirs):
    ours = ours.cpu()
    if theirs.dtype is torch.float8_e4m3fn:
        ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
    return ours.dtype is theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.usefixtures("remote")
def test_opened_weights_upload_nothing(folder, address):
    local = contents(folder)
    djinn.reset_stats()
    weights = djinn.open_weights(address, REMOTE)
    assert set(weights) == set(local)
    assert weights.metadata() == {"format": "pt"}
    assert weights.nbytes == sum(tensor.nbytes for tensor in local.values())
    found = {name: weights[name] for name in weights}
    assert djinn.stats()["round_trips"] == 1
    assert djinn.stats()["bytes_sent"] < 10_000
    assert djinn.stats()["bytes_read"] == weights.nbytes
    for name, tensor in local.items():
        assert found[name].device == torch.device(REMOTE)
        assert equal(found[name], tensor), name
    assert djinn.stats()["bytes_uploaded"] == 0
    with pytest.raises(KeyError):
        weights["none"]
    assert "11 tensors" not in repr(weights)
    assert f"{len(local)} tensors" in repr(weights)


@pytest.mark.usefixtures("remote")
def test_slices_equal_safetensors(folder):
    from safetensors import safe_open

    weights = djinn.open_weights(f"file:{folder}")
    with weights as ours, safe_open(folder / "model.safetensors", "pt") as theirs:
        for name in theirs.keys():  # noqa: SIM118 - not a mapping
            one, other = ours.get_slice(name), theirs.get_slice(name)
            assert one.get_shape() == other.get_shape()
            assert one.get_dtype() == other.get_dtype()
            if name != "float8":
                assert equal(one[...], other[...])
        for name, index in (
            ("half", slice(1, 4)),
            ("0.weight", (slice(3, 9), slice(5, 6))),
            ("half", (slice(None), 2)),
        ):
            assert equal(ours.get_slice(name)[index], theirs.get_slice(name)[index])
        assert equal(ours.get_slice("half")[3], contents(folder)["half"][3])
        assert equal(ours.get_slice("half")[4:2], contents(folder)["half"][4:2])


def test_model_with_opened_weights_trains(remote, folder, address):
    names = model().state_dict().keys()

    def train(module, given):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(given).square().sum().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in module.parameters()]

    given = torch.randn(4, 64)
    weights = djinn.open_weights(address)
    with torch.device("meta"):
        shell = model()
    shell.load_state_dict({name: weights[name] for name in names}, assign=True)
    ours = train(shell, given.to(remote))
    for one, other in zip(ours, train(model(), given), strict=True):
        torch.testing.assert_close(one, other)
    # What was trained was this model's own copy.
    for name in names:
        assert equal(weights[name], contents(folder)[name])


WRITES = (
    lambda t: t.add_(1),
    lambda t: t[1:].mul_(2),
    lambda t: t.view(-1)[::3].zero_(),
    lambda t: torch.add(t, 1, out=t),
    lambda t: t.t().copy_(t.t() * 0.5),
    lambda t: t.data.fill_(3),
    lambda t: torch._foreach_add_([t], 2),
    lambda t: t.untyped_storage() and t[0].sub_(1),
    lambda t: t.detach().unbind(0)[1].neg_(),
    lambda t: t.resize_(3, 64).clamp_(-1, 1),
    lambda t: torch.ops.aten._unsafe_view(t, (t.numel(),)).neg_(),
    lambda t: torch.empty(0, device=t.device).set_(t.detach()).mul_(2),
    lambda t: torch.batch_norm(
        torch.ones(2, t.shape[1], device=t.device), None, None, t[0], t[1], True, 0.5, 1e-5, False
    ),
)
READS = (
    lambda t: t @ t.t(),
    lambda t: torch.nn.functional.linear(t, t).relu_(),
    lambda t: t.reshape(-1),
    lambda t: t[2:].clone(),
    lambda t: t.contiguous(),
)


# Steps of a program: the reading that it is about, an op that reads or writes it, and if all is sent then.
STEPS = st.tuples(st.integers(0, 2), st.sampled_from([*WRITES, *READS, None]), st.booleans())


def run_on_readings(program, ours, local):
    """Return the results of a program on readings of one tensor, each with its local counterpart."""
    made = [(one, other) for one, other in zip(ours, local, strict=True)]
    for which, do, sent in program:
        if do is None:
            one, other = made[-1 - which]
            one.add_(1), other.add_(1)
        else:
            found = do(ours[which]), do(local[which])
            made += [found] if do in READS else []
        if sent:
            djinn.synchronize()
    return made


@pytest.mark.usefixtures("remote")
@settings(
    max_examples=int(os.environ.get("WEIGHT_PROGRAMS", "3")),
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # an address, which stays as it is
)
@given(programs=st.tuples(*[st.lists(STEPS, min_size=4, max_size=12)] * 2))
def test_writes_change_one_reading_only(folder, address, programs):
    """Several readings of a tensor share memory. Each behaves as if it were alone."""
    weights = djinn.open_weights(address)
    ours = [[weights["0.weight"] for _ in range(3)] for _ in programs]
    local = [[contents(folder)["0.weight"] for _ in range(3)] for _ in programs]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run_on_readings, programs, ours, local))
    for one, other in itertools.chain(*found):
        assert one.shape == other.shape
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0)
    assert equal(weights["0.weight"], contents(folder)["0.weight"])


@pytest.mark.usefixtures("remote")
def test_running_statistics_are_per_reading(tmp_path):
    """A normalization in training writes its statistics, which its schema does not say."""
    save_file(torch.nn.BatchNorm1d(6).state_dict(), tmp_path / "model.safetensors")
    weights = djinn.open_weights(f"file:{tmp_path}")
    kept = {name: weights[name] for name in weights}
    module = torch.nn.BatchNorm1d(6, device="meta")
    module.load_state_dict(dict(weights), assign=True)
    for _ in range(2):
        module(torch.randn(8, 6).to(REMOTE) + 5)
    assert module.running_mean.min().item() > 0.5
    assert kept["running_mean"].abs().max().item() == 0
    assert weights["running_var"].tolist() == [1.0] * 6


@pytest.mark.usefixtures("remote")
def test_immutable_files_are_mapped(folder, cache):
    (executor,) = executor_processes()
    read = djinn.open_weights(f"file:{folder}")
    mapped = djinn.open_weights("hf://org/model")
    blob = cache / "models--org--model/snapshots/main/model.safetensors"
    kept, written = mapped["0.weight"], mapped["0.weight"]
    wait_for(lambda: mapped_bytes(executor, blob), "memory that no op has used yet")
    written.mul_(2)
    other = read["0.weight"]
    expected = contents(folder)["0.weight"]
    assert equal(kept, expected)
    assert equal(other, expected)
    assert equal(written, expected * 2)
    assert mapped_bytes(executor, blob) > 0
    assert mapped_bytes(executor, folder / "model.safetensors") == 0  # it may be cut off
    assert blob.read_bytes() == (folder / "model.safetensors").read_bytes()
    del kept, written
    djinn.synchronize()
    assert mapped_bytes(executor, blob) == 0


@pytest.mark.usefixtures("remote")
def test_changed_file_fails_its_users(tmp_path):
    save_file({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "model.safetensors")
    weights = djinn.open_weights(f"file:{tmp_path}")
    intact = weights["a"]
    assert intact.sum().item() == 4
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    with pytest.raises(djinn.errors.RemoteError, match="changed since they were opened"):
        (weights["b"] + 1).cpu()
    assert intact.sum().item() == 4
    assert djinn.open_weights(f"file:{tmp_path}")["a"].sum().item() == 4


@pytest.mark.usefixtures("remote")
def test_unavailable_weights_raise():
    with pytest.raises(djinn.errors.WeightsUnavailable, match="none"):
        djinn.open_weights("file:/none/there")
    with pytest.raises(djinn.errors.WeightsUnavailable, match=r"reads no weights from 'nope:x': it reads file:"):
        djinn.open_weights("nope:x")
    with pytest.raises(djinn.errors.WeightsUnavailable, match="lone surrogate"):
        djinn.open_weights("file:/\ud800")
    with pytest.raises(djinn.errors.ConfigurationError, match="cannot be opened on cpu"):
        djinn.open_weights("file:/none", "cpu")


@pytest.mark.usefixtures("remote")
def test_too_long_address_is_refused(tmp_path):
    with pytest.raises(djinn.errors.WeightsUnavailable, match="has 5,006 characters"):
        djinn.open_weights("file:/" + "a" * 5000)
    many = {f"{number}": "x" * (1 << 20) for number in range(65)}
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors", metadata=many)
    with pytest.raises(djinn.errors.WeightsUnavailable, match="the list of tensors at"):
        djinn.open_weights(f"file:{tmp_path}")
    described = {"ss_tag_frequency": "x" * 200_000}  # as files of fine-tuned weights have
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors", metadata=described)
    weights = djinn.open_weights(f"file:{tmp_path}")
    assert weights.metadata() == described
    assert weights["a"].item() == 1


class ProgressPlugin:
    """A plugin whose observer records the progress of reads: arrived and expected bytes."""

    djinn_api_version = "2.0"

    def __init__(self):
        self.seen = []

    @djinn.hooks.hookimpl
    def djinn_register_observers(self):
        follower = self

        class ProgressObserver(Observer):
            name = "notes"

            def observe(self, event):
                if event.name == "reading":
                    follower.seen.append((event.fields["done"], event.fields["expected"]))

        return [ProgressObserver()]


def test_opened_weights_over_two_executors(folder, monkeypatch, tmp_path):
    folder = shutil.copytree(folder, tmp_path / "models")
    monkeypatch.setattr(executor_client, "SHOWN_BYTES", 1)
    reading = ProgressPlugin()
    with configured(executors=2, threads=1, placement_policy="round_robin", plugins=["pool", "round_robin", reading]):
        djinn.init()
        djinn.reset_stats()
        weights = djinn.open_weights(f"file:{folder}")
        names = model().state_dict().keys()
        with torch.device("meta"):
            shell = model()
        shell.load_state_dict({name: weights[name] for name in names}, assign=True)
        given = torch.randn(4, 64)
        with torch.no_grad():
            torch.testing.assert_close(shell(given.to(REMOTE)).cpu(), model()(given))
        assert djinn.stats()["bytes_uploaded"] <= given.nbytes
        size = sum(one.nbytes for one in model().state_dict().values())
        assert sum(expected for done, expected in reading.seen if done == expected) == size
        on_second = djinn.open_weights(f"file:{folder}", "remote_accelerator:2")["half"]
        assert equal(on_second, contents(folder)["half"])
        with torch.no_grad():
            kill_executor(0), kill_executor(1)
            assert equal(on_second, contents(folder)["half"])
            torch.testing.assert_close(shell(given.to(REMOTE)).cpu(), model()(given))
            os.utime(
                folder / "model.safetensors"
            )  # the journals have no bytes of it: what is read again is another version
            kill_executor(0), kill_executor(1)
            with pytest.raises((djinn.errors.RemoteError, djinn.errors.SessionLost), match=r"changed|differently"):
                shell(given.to(REMOTE)).cpu()


def test_observers_receive_progress_of_awaited_reads(folder, monkeypatch):
    monkeypatch.setattr(executor_client, "SHOWN_BYTES", 1)
    reading = ProgressPlugin()
    with configured(threads=1, plugins=[reading]):
        djinn.init()
        weights = djinn.open_weights(f"file:{folder}")
        used, waited_for, dropped = weights["0.weight"], weights["half"], weights["half"]
        other = torch.ones(2, device=REMOTE) + 1
        del dropped
        doubled = used * 2
        current().flush()
        assert other.sum().item() == 4
        assert not reading.seen, "the program waits for no stored value"
        assert equal(doubled, contents(folder)["0.weight"] * 2)
        assert equal(waited_for, contents(folder)["half"])
        assert reading.seen
        assert {expected for _, expected in reading.seen} == {waited_for.nbytes}


def test_recovered_executor_rereads_opened_weights(folder):
    with configured(threads=1):
        djinn.init()
        weights = djinn.open_weights(f"file:{folder}")
        kept, written = weights["0.weight"], weights["0.weight"]
        written.add_(1)
        assert kept.sum().item() == contents(folder)["0.weight"].sum().item()
        kill_executor()
        assert equal(kept, contents(folder)["0.weight"])
        assert equal(written, contents(folder)["0.weight"] + 1)
        assert equal(weights["half"], contents(folder)["half"])


CLIENT = """
import json, sys, djinn
from djinn.testing import executor_processes
djinn.init()
print(*executor_processes(), flush=True)
weights = djinn.open_weights(sys.argv[1])
tensors = []
for line in sys.stdin:
    tensors = tensors or [weights["large"] for _ in range(2)]
    if line.startswith("write"):
        tensors[0].add_(1)
    print(json.dumps([int(t[::4096].sum().item()) for t in tensors]), flush=True)
"""
ROWS = 24 << 20
SAMPLED = ROWS // 4096


def test_sessions_share_memory_until_one_writes(own_server, python, plain_environment, tmp_path):
    save_file({"large": torch.ones(ROWS, dtype=torch.int32)}, tmp_path / "model.safetensors")
    server = own_server("--models", str(tmp_path), "--threads", "1")
    env = plain_environment | {"DJINN_CONNECTION_FILE": str(server.file)}
    clients = [python.start_talking("-c", CLIENT, f"file:{tmp_path}", env=env) for _ in range(4)]

    def ask(client, word):
        client.stdin.write(f"{word}\n")
        client.stdin.flush()
        return json.loads(client.stdout.readline())

    try:
        (executor,) = {int(client.stdout.readline()) for client in clients}
        memory = psutil.Process(executor).memory_info
        before = memory().rss
        for client in clients:
            assert ask(client, "look") == [SAMPLED, SAMPLED]
        shared = memory().rss
        assert 4 * ROWS * 0.9 < shared - before < 4 * ROWS * 1.5  # eight tensors, one copy
        (status,) = ask_servers(server.settings()).values()
        sessions = status.executors[0].sessions
        assert [one.shared for one in sessions] == [4 * ROWS] * 4
        assert ask(clients[0], "write") == [2 * SAMPLED, SAMPLED]
        assert 4 * ROWS * 0.9 < memory().rss - shared < 4 * ROWS * 1.5
        assert ask(clients[1], "look") == [SAMPLED, SAMPLED]
    finally:
        for client in clients:
            with client:  # which closes its pipes
                client.kill()


@pytest.mark.parametrize(("mapped", "file_is_lost"), [(False, False), (False, True), (True, False)])
def test_snapshot_names_unwritten_weights(mapped, file_is_lost, own_server, tmp_path):
    rows, file, journals = 2 << 20, tmp_path / "models" / "model.safetensors", tmp_path / "state" / "journals"
    file.parent.mkdir()
    save_file({"large": torch.arange(rows, dtype=torch.float32), "small": torch.ones(8, 8)}, file)
    fill_cache(tmp_path / "cache", file)
    server = own_server(
        *("--models", str(file.parent), "--models", str(tmp_path / "cache")),
        "--threads",
        "1",
        "--state-dir",
        str(journals.parent),
        "--snapshot-seconds",
        "0",
    )
    with configured(connection_file=server.file):
        djinn.init()
        weights = djinn.open_weights("hf://org/model" if mapped else f"file:{file.parent}")
        large, small = weights["large"], weights["small"]
        view, again = large.view(2, -1)[1, ::2], weights["small"]
        again.mul_(3)
        for _ in range(40):  # each of these may be followed by a snapshot
            assert small.sum().item() == 64
        assert sum(one.stat().st_size for one in journals.rglob("*") if one.is_file()) < large.nbytes / 10
        if file_is_lost:
            os.truncate(file, 4096)
        kill_executor()
        if file_is_lost:  # the session is lost where a reply since the last snapshot comes out differently
            with pytest.raises(
                (djinn.errors.RemoteError, djinn.errors.SessionLost),
                match=r"cannot (be )?read|change|differ",
            ):
                large.sum().item()
            return
        assert again.sum().item() == 192
        assert torch.equal(view.cpu(), torch.arange(rows // 2, rows, 2, dtype=torch.float32))
        small.add_(1)
        assert (small.sum().item(), weights["small"].sum().item()) == (128, 64)
        assert torch.equal(large.cpu(), torch.arange(rows, dtype=torch.float32))
