"""Files of several formats in a folder: which of them an executor reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from djinn_core.errors import WeightsUnavailable
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_server.builtins.safetensors_files import Safetensors
from djinn_server.builtins.weights import FileSource, LocalFile
from djinn_server.hookspecs.weight_sources import LocalPlace, WeightPermissions, WeightSource
from djinn_server.weights.shared_weights import WeightKey
from djinn_server.weights.weight_reader import WeightReader
from djinn_weights.checkpoints import Checkpoints
from djinn_weights.gguf import Gguf

FORMATS = (Safetensors(), Checkpoints(), Gguf())


@pytest.fixture
def models(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def tensors_of(models, address=None):
    address = address or f"file:{models}"
    reader = WeightReader([FileSource()], WeightPermissions((models,)), FORMATS)
    opened = reader.open(address)
    return {
        name: reader.read(address, WeightKey(opened.version, name, 0, place.entry.size))
        .result(10)
        .view(place.entry.dtype)
        .view(place.entry.shape)
        for name, place in opened.tensors.items()
    }


def test_checkpoint_is_read_beside_other_files(models):
    torch.save({"a": torch.ones(2)}, models / "pytorch_model.bin")
    torch.save({"other": torch.zeros(2)}, models / "training_args.bin")
    torch.save({"state": {}}, models / "optimizer.pt")
    assert tensors_of(models)["a"].tolist() == [1, 1]
    assert list(tensors_of(models, f"file:{models}/pytorch_model.bin")) == ["a"]
    (models / "pytorch_model.bin").rename(models / "model.bin")
    with pytest.raises(WeightsUnavailable, match="name one of them"):
        tensors_of(models)


def test_sharded_checkpoints_are_read(models):
    for number, name in enumerate("ab"):
        torch.save({name: torch.full((3,), float(number))}, models / f"pytorch_model-{number}.bin")
    torch.save({}, models / "training_args.bin")
    index = {"metadata": {}, "weight_map": {"a": "pytorch_model-0.bin", "b": "pytorch_model-1.bin"}}
    (models / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for address in (f"file:{models}", f"file:{models}/pytorch_model.bin.index.json"):
        assert {name: tensor.tolist() for name, tensor in tensors_of(models, address).items()} == {
            "a": [0, 0, 0],
            "b": [1, 1, 1],
        }
    (models / "pytorch_model-1.bin").unlink()
    with pytest.raises(WeightsUnavailable, match=r"pytorch_model-1\.bin.*is missing"):
        tensors_of(models)


def test_safetensors_files_take_precedence(models):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, models / "model.safetensors")
    torch.save({"a": torch.zeros(1)}, models / "pytorch_model.bin")
    assert tensors_of(models)["a"].item() == 1


def test_world_writable_file_is_not_mapped(tmp_path):
    """A user who truncates a mapped file would end the executor."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(100))
    for mode, mapped in ((0o644, True), (0o666, False), (0o662, False), (0o444, True)):
        path.chmod(mode)
        file = LocalFile(path, path.name, immutable=True)
        if mapped:
            assert len(file.map()) == 100
        else:
            with pytest.raises(OSError, match="written in place"):
                file.map()


def test_only_raw_layouts_are_mapped(models):
    class Source(WeightSource):
        name = "file"

        def places(self, address, folders):
            return [LocalPlace(Path(address.removeprefix("file:")), immutable=True)]

    given = {"plain": torch.randn(5, 6), "strided": torch.randn(5, 6).t(), "empty": torch.empty(0)}
    torch.save(given, models / "model.pt")
    reader = WeightReader([Source()], WeightPermissions((models,)), FORMATS)
    address = f"file:{models}"
    opened = reader.open(address)
    found = {
        name: reader.map(address, WeightKey(opened.version, name, 0, place.entry.size))
        for name, place in opened.tensors.items()
    }
    assert found["plain"].view(torch.float32).view(5, 6).equal(given["plain"])
    assert found["strided"] is None
    assert found["empty"] is None


def test_built_in_format_precedes_others():
    registry = load_registry(Selection(), builtins=builtin_plugins(), kinds={"weight_formats"})
    assert [form.name for form in registry.weight_formats] == ["safetensors", "checkpoints", "gguf"]


def test_unknown_format_is_not_opened(models):
    torch.save({"a": torch.ones(2)}, models / "pytorch_model.bin")
    with pytest.raises(WeightsUnavailable, match="no files with weights"):
        WeightReader([FileSource()], WeightPermissions((models,))).open(f"file:{models}")
    with pytest.raises(WeightsUnavailable, match=r"format in use.*plugins/weights"):
        WeightReader([FileSource()], WeightPermissions((models,))).open(f"file:{models}/pytorch_model.bin")
