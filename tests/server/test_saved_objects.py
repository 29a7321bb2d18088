"""`torch.save` and `torch.load` with an address of the server: tensors stay there, and objects come back as they were."""

from __future__ import annotations

import collections

import pytest
import torch
from configured import configured
from safetensors.torch import load_file, safe_open
from servers import start_server

import djinn

REMOTE = "remote_accelerator:0"


@pytest.fixture(scope="module")
def save_folder(tmp_path_factory, python, plain_environment):
    """Yield the folder in which a server saves this program's files."""
    where, folder = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("saved")
    server = start_server(python.start, where, "--save-weights", str(folder), "--threads", "1", env=plain_environment)
    with configured(connection_file=server.file):
        djinn.init()
        yield folder / "default"
    server.stop()


def test_loaded_optimizer_continues_training(save_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 80), torch.nn.Linear(80, 100)).to(REMOTE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = torch.ones(4, 100, device=REMOTE)

    def step():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step().item()
    djinn.reset_stats()
    torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict(), "step": 1}, "file:run/all.pt")
    expected = [step().item() for _ in range(2)]
    found = torch.load("file:run/all.pt", map_location=REMOTE, weights_only=True)
    assert type(found["model"]) is collections.OrderedDict
    assert found["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    assert found["step"] == 1
    assert [step().item() for _ in range(2)] == expected
    assert djinn.stats()["bytes_received"] < 5000
    assert djinn.stats()["bytes_sent"] < 15_000
    names = load_file(save_folder / "run" / "all.pt.safetensors").keys()
    assert {"model.0.weight", "optimizer.state.0.exp_avg"} <= names
    here = torch.load("file:run/all.pt", map_location="cpu")
    assert torch.equal(here["model"]["0.weight"], torch.load("file:run/all.pt")["model"]["0.weight"].cpu())
    assert not list(tmp_path.iterdir())  # nothing is left here where there is no folder for it


def test_saved_objects_round_trip(save_folder):
    tied = torch.nn.Parameter(torch.randn(3, device=REMOTE))
    here = torch.arange(4)
    given = {
        "tied": [tied, tied],
        "here": here,
        3: (1, 2.5, None, True, "text", float("inf")),
        "like": {"dtype": torch.bfloat16, "device": torch.device("cpu")},
        "frozen": torch.nn.Parameter(torch.ones(2, device=REMOTE), requires_grad=False),
    }
    torch.save(given, "file:object.pt")
    found = torch.load("file:object.pt")
    assert list(found) == list(given)
    assert found["tied"][0] is found["tied"][1]
    assert isinstance(found["tied"][0], torch.nn.Parameter)
    assert found["tied"][0].device == torch.device(REMOTE)
    assert torch.equal(found["tied"][0].cpu(), tied.cpu())
    assert found["frozen"].requires_grad is False
    assert found["here"].device == torch.device("cpu")
    assert torch.equal(found["here"], here)
    assert found[3] == given[3]
    assert found["like"] == given["like"]


def test_object_can_be_published(save_folder):
    torch.save({"x": torch.ones(2, device=REMOTE), "step": 3}, "published:object")
    assert torch.load("published:object")["step"] == 3
    assert djinn.weights.attach("object")["x"].tolist() == [1, 1]
    djinn.weights.unpublish("object")


def test_unsupported_objects_are_refused(save_folder):
    one = torch.ones(1, device=REMOTE)
    with pytest.raises(djinn.errors.UnsupportedOperation, match=r"'a\.1' is of type set"):
        torch.save({"x": one, "a": [1, {2}]}, "file:refused.pt")
    with pytest.raises(djinn.errors.UnsupportedOperation, match="state_dict"):
        torch.save(torch.nn.Linear(2, 2).to(REMOTE), "file:refused.pt")
    with pytest.raises(djinn.errors.UnsupportedOperation, match="keys"):
        torch.save({"x": one, (1, 2): 3}, "file:refused.pt")
    with pytest.raises(djinn.errors.UnsupportedOperation, match="one device"):
        torch.load("file:refused.pt", map_location={"a": "b"})
    with pytest.raises(djinn.errors.WeightsUnavailable, match="no 'file:refused"):
        torch.load("file:refused.pt")
    assert not (save_folder / "refused.pt.safetensors").exists()


def test_malformed_descriptions_are_refused(save_folder):
    one = torch.ones(1, device=REMOTE)
    for text in (
        "{",
        "[" * 5000,
        '{"tensor": 5}',
        '{"tensor": "y"}',
        '{"dict": [[1]]}',
        '{"dtype": "load"}',
        '{"os": 1}',
    ):
        djinn.save_weights({"x": one}, "file:bad.safetensors", {"djinn.object": text})
        with pytest.raises(djinn.errors.WeightsUnavailable, match="does not describe an object"):
            torch.load("file:bad.safetensors")
    djinn.save_weights({"x": one}, "file:bad.safetensors")
    with pytest.raises(djinn.errors.WeightsUnavailable, match=r"not written by torch\.save"):
        torch.load("file:bad.safetensors")


def test_object_without_remote_tensors_is_saved_locally(save_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file:run").mkdir()
    torch.save({"x": torch.ones(2)}, "file:run/here.pt")
    assert torch.load("file:run/here.pt")["x"].tolist() == [1, 1]
    torch.save({"x": torch.ones(2, device=REMOTE)}, "file:run/there.pt")
    assert b"on the server" in (tmp_path / "file:run" / "there.pt").read_bytes()
    assert torch.load("file:run/there.pt")["x"].device == torch.device(REMOTE)
    assert [path.name for path in (save_folder / "run").glob("*here*")] == ["there.pt.safetensors"]


def test_saved_files_are_removed(save_folder, tmp_path):
    one = {"x": torch.ones(3, device=REMOTE)}
    djinn.save_weights(one, "file:gone/deep/x.safetensors")
    held = djinn.open_weights("file:gone/deep/x.safetensors")
    djinn.weights.remove_weights("file:gone/deep/x.safetensors")
    assert not (save_folder / "gone").exists()
    assert held["x"].tolist() == [1, 1, 1]
    (tmp_path / "x.safetensors").write_bytes(b"")
    for address in (
        "file:gone/deep/x.safetensors",
        f"file:{tmp_path}/x.safetensors",
        "file:../x.safetensors",
        "hf://a/b",
    ):
        with pytest.raises(djinn.errors.WeightsUnavailable):
            djinn.weights.remove_weights(address)
    assert (tmp_path / "x.safetensors").exists()


def test_safetensors_saves_and_loads_on_server(save_folder):
    import safetensors.torch

    there = {"a": torch.arange(6.0, device=REMOTE).view(2, 3), "b": torch.ones(4, device=REMOTE)}
    djinn.synchronize()
    djinn.reset_stats()
    safetensors.torch.save_file(there, "file:st/x.safetensors", {"step": "3"})
    remote = safetensors.torch.load_file("file:st/x.safetensors", device=REMOTE)
    assert djinn.stats()["bytes_received"] < 1500
    assert remote["a"].device == torch.device(REMOTE)
    for found in (
        remote,
        safetensors.torch.load_file("file:st/x.safetensors"),
        load_file(save_folder / "st" / "x.safetensors"),
    ):
        assert {name: tensor.tolist() for name, tensor in found.items()} == {"a": [[0, 1, 2], [3, 4, 5]], "b": [1] * 4}
    with safetensors.safe_open("file:st/x.safetensors", "pt") as opened:
        assert opened.metadata() == {"step": "3"}
        assert opened.get_slice("a")[1:].tolist() == [[3, 4, 5]]
        assert opened.get_tensor("b").device == torch.device("cpu")
    safetensors.torch.save_file({"c": torch.ones(2)}, "file:st/c.safetensors")
    with safe_open(save_folder / "st" / "c.safetensors", "pt") as opened:
        assert opened.get_tensor("c").tolist() == [1, 1]
