"""Checkpoints of PyTorch and GGUF files that an executor reads: what the client gets is what `torch.load` would have given it."""

from __future__ import annotations

import json

import pytest
import torch
from configured import configured
from gguf_files import Q4_K, Q8_0, gguf_file, quantized

import djinn

REMOTE = "remote_accelerator:0"


@pytest.fixture(scope="module", autouse=True)
def remote():
    with configured(threads=1):
        djinn.init()
        yield REMOTE


def equal(ours, theirs):
    ours = ours.cpu()
    return ours.dtype is theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)


class TiedLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(30, 8)
        self.head = torch.nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


def test_checkpoint_equals_torch_load(tmp_path):
    torch.manual_seed(0)
    tensors = TiedLayers().state_dict() | {
        "strided": torch.randn(50, 60)[::2, 3:40].t(),
        "complex": torch.randn(3, dtype=torch.complex128),
        "empty": torch.empty(0, 2),
        "scalar": torch.tensor(3, dtype=torch.int16),
    }
    torch.save({**tensors, "step": 7, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}}, tmp_path / "model.pt")
    local = torch.load(tmp_path / "model.pt", weights_only=True)
    djinn.reset_stats()
    weights = djinn.open_weights(f"file:{tmp_path}/model.pt")
    assert set(weights) == {*tensors, "optimizer.state.0.exp_avg"}
    for name in tensors:
        assert equal(weights[name], local[name]), name
    assert weights.get_slice("complex").get_dtype() == "complex128"
    assert equal(weights.get_slice("strided")[4:9], local["strided"][4:9])
    assert equal(weights["optimizer.state.0.exp_avg"], torch.ones(3))
    assert djinn.stats()["bytes_uploaded"] == 0


def test_sharded_checkpoint_loads_into_model(tmp_path):
    torch.manual_seed(0)
    model = TiedLayers()
    names = list(model.state_dict())
    for number, name in enumerate(names):
        torch.save({name: model.state_dict()[name]}, tmp_path / f"pytorch_model-{number}.bin")
    torch.save([1], tmp_path / "optimizer.bin")
    weight_map = {name: f"pytorch_model-{number}.bin" for number, name in enumerate(names)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    weights = djinn.open_weights(f"file:{tmp_path}")
    with torch.device("meta"):
        ours = TiedLayers()
    ours.load_state_dict(dict(weights), assign=True)
    ids = torch.arange(12).view(3, 4)
    assert torch.equal(ours(ids.to(REMOTE)).cpu(), model(ids))


def test_gguf_files_are_opened(tmp_path):
    torch.manual_seed(0)
    blocks, numbers = quantized(torch.randn(300, 64))
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.arange(4, dtype=torch.int32)}
    stored = {"q": (Q8_0, (300, 64), blocks), "k": (Q4_K, (2, 256), bytes(288)), **tensors}
    (tmp_path / "model.gguf").write_bytes(gguf_file(stored))
    weights = djinn.open_weights(f"file:{tmp_path}")
    assert set(weights) == set(stored)
    assert len(weights) == len(stored)
    for name, tensor in (tensors | {"q": numbers}).items():
        assert equal(weights[name], tensor), name
    assert equal(weights.get_slice("q")[17:23], numbers[17:23])
    for look in (weights.__getitem__, weights.get_slice):
        with pytest.raises(djinn.errors.WeightsUnavailable, match=r"'k' at .* is stored as Q4_K"):
            look("k")
    assert "k" in weights
    with pytest.raises(KeyError):
        weights["none"]
    assert weights.nbytes == sum(tensor.nbytes for tensor in (*tensors.values(), numbers))


def test_pickle_with_code_is_refused(tmp_path):
    class RunsCommand:
        def __reduce__(self):
            return eval, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    kept = torch.ones(3, device=REMOTE)
    torch.save({"a": torch.ones(2), "b": RunsCommand()}, tmp_path / "model.pt")
    with pytest.raises(djinn.errors.WeightsUnavailable, match=r"names __builtin__\.eval"):
        djinn.open_weights(f"file:{tmp_path}/model.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(djinn.errors.WeightsUnavailable, match=r"before version 1\.6.*convert it to safetensors"):
        djinn.open_weights(f"file:{tmp_path}/old.pt")
    assert not (tmp_path / "ran").exists()
    assert kept.sum().item() == 3


def test_tied_weights_are_read_once(tmp_path):
    values = torch.arange(100_000.0)
    torch.save({"embedding": values, "head": values, "other": values + 1}, tmp_path / "tied.pt")
    before = torch.accelerator.memory_allocated()
    found = djinn.open_weights(f"file:{tmp_path}/tied.pt")
    embedding, head, other = found["embedding"], found["head"], found["other"]
    assert equal(head, values)
    assert equal(other, values + 1)  # what is still being read is not counted
    assert torch.accelerator.memory_allocated() - before == 2 * values.nbytes
    head += 1
    assert equal(embedding, values)
    assert equal(head, values + 1)
    assert equal(other, values + 1)
    assert torch.accelerator.memory_allocated() - before == 3 * values.nbytes
