"""Weights under names: they outlive the programs and executors that published them, and are their tenant's alone."""

from __future__ import annotations

import json

import pytest
import torch
from configured import configured
from safetensors.torch import load_file
from servers import wait_for

import djinn
from djinn.testing import kill_executor

REMOTE = "remote_accelerator:0"
PUBLISHES = """
import os, signal, torch, djinn
torch.manual_seed(0)
model = torch.nn.Linear(300, 200).to("remote_accelerator:0")
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 300, device="remote_accelerator:0")).sum().backward()
optimizer.step()
moments = {str(n): dict(one) for n, one in enumerate(optimizer.state.values())}
djinn.synchronize()
djinn.reset_stats()
djinn.weights.publish("run-7", {"model": model.state_dict(), "optimizer": moments}, metadata={"step": "1"})
assert djinn.stats()["bytes_received"] < 2000, djinn.stats()
torch.save([one.cpu() for one in model.parameters()], "expected.pt")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def published_server(tmp_path_factory, python, plain_environment):
    """Yield a server and the folder of its published weights."""
    from servers import start_server

    where = tmp_path_factory.mktemp("served")
    options = ["--published", str(where / "published"), "--state-dir", str(where / "state"), "--threads", "1"]
    server = start_server(python.start, where, *options, env=plain_environment)
    with configured(connection_file=server.file):
        djinn.init()
        yield server, where / "published" / "default"
    server.stop()


def test_next_program_attaches_weights_of_killed_program(published_server, python, plain_environment, tmp_path):
    server, folder = published_server
    environment = plain_environment | {"DJINN_CONNECTION_FILE": str(server.file)}
    assert python.run("-c", PUBLISHES, cwd=tmp_path, env=environment).returncode == -9
    expected = torch.load(tmp_path / "expected.pt")
    found = djinn.weights.attach("run-7")
    assert found.metadata() == {"step": "1"}
    assert set(found) == {"model.weight", "model.bias"} | {
        f"optimizer.{n}.{name}" for n in (0, 1) for name in ("step", "exp_avg", "exp_avg_sq")
    }
    model = torch.nn.Linear(300, 200, device="meta")
    model.load_state_dict({name: found[f"model.{name}"] for name in ("weight", "bias")}, assign=True)
    assert [torch.equal(one.cpu(), other) for one, other in zip(model.parameters(), expected, strict=True)] == [
        True
    ] * 2
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(model.weight.cpu(), expected[0] + 1)
    assert torch.equal(djinn.weights.attach("run-7")["model.weight"].cpu(), expected[0])
    listed = djinn.weights.published()["run-7"]
    assert listed.nbytes == sum(path.stat().st_size for path in folder.glob("run-7@*"))
    assert listed.age < 300
    assert listed.seconds_left == pytest.approx(7 * 86400, abs=300)


def test_weights_command_lists_and_removes(published_server, python, plain_environment):
    djinn.weights.publish("listed", {"x": torch.ones(4, device=REMOTE)}, ttl=7200)
    command = "-m", "djinn_core.cli", "published", "--connection-file", published_server[0].file
    shown = python.run(*command, env=plain_environment).stdout
    assert "listed" in shown
    assert "in 120 min" in shown
    left = python.run(*command, "--remove", "listed", "--json", env=plain_environment).stdout
    assert {row["name"] for row in json.loads(left)} == djinn.weights.published().keys() - {"listed"}
    refused = python.run(*command, "--remove", "listed", env=plain_environment)
    assert refused.returncode == 1
    assert "nothing is published as 'listed'" in refused.stderr
    assert "listed" not in djinn.weights.published()


def test_replaced_weights_stay_attached(published_server):
    djinn.weights.publish("kept", {"x": torch.ones(1000, device=REMOTE), "y": torch.ones(3, device=REMOTE)})
    first = djinn.weights.attach("kept")
    held = first["x"]
    assert held.sum().item() == 1000
    djinn.weights.publish("kept", {"x": torch.full((1000,), 2.0, device=REMOTE)})
    assert djinn.weights.attach("kept")["x"].sum().item() == 2000
    assert len(list(published_server[1].glob("kept@*"))) == 1
    djinn.weights.unpublish("kept")
    assert list(published_server[1].glob("kept@*")) == []
    with pytest.raises(djinn.errors.WeightsUnavailable, match="nothing is published as 'kept'"):
        djinn.weights.attach("kept")
    assert first["y"].sum().item() == 3
    djinn.weights.publish("lasting", {"x": torch.arange(5, device=REMOTE)})
    kill_executor()
    assert djinn.weights.attach("lasting")["x"].tolist() == [0, 1, 2, 3, 4]
    assert held.sum().item() == 1000
    held += 1
    assert held.sum().item() == 2000


def test_attached_weights_share_memory_except_with_publisher(own_server):
    server = own_server("--threads", "1", "--snapshot-seconds", "0")
    with configured(connection_file=server.file):
        weight = torch.ones(1000, 100, device=REMOTE)
        djinn.weights.publish("mine", {"weight": weight, "part": torch.ones(1000, 100, device=REMOTE)[:500]})
        first = djinn.weights.attach("mine")["weight"]
        assert first.sum().item() == 100_000
        before = torch.accelerator.memory_allocated()
        second = djinn.weights.attach("mine")["weight"]
        assert second.sum().item() == 100_000
        assert torch.accelerator.memory_allocated() == before
        assert djinn.weights.attach("mine")["part"].sum().item() == 50_000
        weight += 1
        first[0] = 5
        djinn.weights.unpublish("mine")
        kill_executor()
        assert weight.sum().item() == 200_000
        assert first.sum().item() == 99_900 + 500
        assert second.sum().item() == 100_000


def test_published_name_expires(published_server):
    djinn.weights.publish("short", {"x": torch.ones(2, device=REMOTE)}, ttl=1)
    held = djinn.weights.attach("short")["x"]
    assert held.sum().item() == 2
    wait_for(lambda: "short" not in djinn.weights.published(), "the end of a name")
    assert list(published_server[1].glob("short@*")) == []
    with pytest.raises(djinn.errors.WeightsUnavailable, match="nothing is published as 'short'"):
        djinn.weights.attach("short")
    assert held.sum().item() == 2


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a" * 101, "a@1-2-3", "a b", "é", "a\n"])
def test_invalid_published_names_are_refused(name, published_server):
    with pytest.raises(djinn.errors.WeightsUnavailable, match="is not a valid name"):
        djinn.weights.publish(name, {"x": torch.ones(1, device=REMOTE)})


def test_publish_refuses_invalid_contents(published_server):
    one = torch.ones(1, device=REMOTE)
    with pytest.raises(djinn.errors.ConfigurationError, match=r"'param_groups' is of type list"):
        djinn.weights.publish("bad", {"x": one, "param_groups": [{"lr": 0.1}]})
    with pytest.raises(djinn.errors.ConfigurationError, match="two tensors have the name"):
        djinn.weights.publish("bad", {"a": {"b": one}, "a.b": one})
    with pytest.raises(djinn.errors.ConfigurationError, match="on none"):
        djinn.weights.publish("bad", {"x": torch.ones(1)})
    with pytest.raises(djinn.errors.ConfigurationError, match="`ttl` must be a number of seconds"):
        djinn.weights.publish("bad", {"x": one}, ttl=-1)
    with pytest.raises(djinn.errors.WeightsUnavailable, match=r"at most 604,800 s"):
        djinn.weights.publish("bad", {"x": one}, ttl=1e9)
    with pytest.raises(djinn.errors.WeightsUnavailable, match="nothing is published as 'bad'"):
        djinn.weights.unpublish("bad")
    assert "bad" not in djinn.weights.published()


def test_published_names_and_disk_quota_are_per_tenant(own_server, python, plain_environment, tmp_path):
    tokens = tmp_path / "tokens.json"
    command, made = ("-m", "djinn_core.cli", "token"), {}
    for tenant in ("alice", "bob"):
        done = python.run(*command, "create", tenant, "--file", tokens, env=plain_environment)
        made[tenant] = done.stdout.split()[-1]
    limit = (*command, "limit", "alice", "--disk-gib", str(1 / 1024), "--file", tokens)
    assert python.run(*limit, env=plain_environment).returncode == 0
    server = own_server("--token-file", str(tokens), "--published", str(tmp_path / "published"), "--threads", "1")
    with configured(servers=list(server.urls), token=made["alice"]):
        djinn.weights.publish("secret", {"x": torch.ones(100_000, device=REMOTE)})
        with pytest.raises(djinn.errors.WeightsUnavailable, match="your quota is"):
            djinn.weights.publish("large", {"x": torch.ones(200_000, device=REMOTE)})
        assert list(djinn.weights.published()) == ["secret"]
        (file,) = (tmp_path / "published" / "alice").iterdir()
        assert load_file(file)["x"].sum().item() == 100_000
    with configured(servers=list(server.urls), token=made["bob"]):
        assert djinn.weights.published() == {}
        address = f"published:{file.name.removesuffix('.safetensors')}"
        for refused in ("published:secret", address, "published:../alice/" + file.name):
            with pytest.raises(djinn.errors.WeightsUnavailable):
                djinn.open_weights(refused)
        with pytest.raises(djinn.errors.WeightsUnavailable):
            djinn.weights.unpublish("secret")
    assert file.exists()


def test_programs_with_local_executors_share_published_names():
    with configured(threads=1):
        djinn.weights.publish("own", {"x": torch.full((3,), 5.0, device=REMOTE)})
    with configured(threads=1):
        assert djinn.weights.attach("own")["x"].tolist() == [5, 5, 5]
        djinn.weights.unpublish("own")


def test_publish_is_refused_without_server():
    with configured(executor="inline"):
        with pytest.raises(djinn.errors.WeightsUnavailable, match="published:"):
            djinn.weights.publish("x", {"x": torch.ones(1, device=REMOTE)})
        with pytest.raises(djinn.errors.WeightsUnavailable, match="plugins/weights"):
            djinn.weights.published()
