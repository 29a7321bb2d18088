"""Batched fetches: consecutive reads share one round trip, with the values and errors of separate fetches."""

from __future__ import annotations

import io

import pytest
import torch

import djinn
from djinn_client.interception.tensors import batched_fetch
from djinn_client.interception.tensors.batched_fetch import BatchedFetch, by_handle, expecting


@pytest.fixture
def model(embedded):
    torch.manual_seed(0)
    local = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)], torch.nn.BatchNorm1d(8))
    expected = {name: value.clone() for name, value in local.state_dict().items()}
    model = local.to(embedded)
    djinn.synchronize()
    djinn.reset_stats()
    return model, expected


def assert_equals_local(found, expected):
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in found)


def test_module_to_cpu_is_one_fetch(model):
    model, expected = model
    parameters = list(model.parameters())
    model.cpu()
    assert djinn.stats()["round_trips"] <= 2, "one for each dtype"
    assert assert_equals_local(model.state_dict(), expected)
    assert all(kept is now for kept, now in zip(parameters, model.parameters(), strict=True))


def test_groups_are_requested_before_first_wait(model, monkeypatch):
    model, expected = model
    monkeypatch.setattr(batched_fetch, "GROUP_BYTES", 300)
    model.cpu()
    assert djinn.stats()["submissions"] > 5
    assert assert_equals_local(model.state_dict(), expected)


@pytest.mark.parametrize("new", [True, False])
def test_torch_save_is_one_fetch(model, new):
    model, expected = model
    file = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "views": model[0].weight.detach()[2:]}, file, _use_new_zipfile_serialization=new
    )
    assert djinn.stats()["round_trips"] == 1
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")
    assert assert_equals_local(loaded["model"], expected)
    assert loaded["views"].untyped_storage().data_ptr() == loaded["model"]["0.weight"].untyped_storage().data_ptr()


def test_safetensors_save_is_one_fetch(model, tmp_path):
    from safetensors.torch import load_file, save_file

    model, expected = model
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert djinn.stats()["round_trips"] <= 2, "one for each dtype"
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_module_cast_to_cpu_fetches_converted_bytes_only(model):
    model, expected = model
    model.to("cpu", torch.float64)
    nbytes = sum(value.numel() * 8 for value in expected.values())
    assert djinn.stats()["bytes_received"] < 2 * nbytes + 300 * len(expected)  # headers of HTTP
    assert torch.equal(model[0].weight, expected["0.weight"].double())


def test_write_invalidates_prefetched_value(embedded):
    first, second = (torch.zeros(3, device=embedded) for _ in range(2))
    with expecting(BatchedFetch(lambda: by_handle([first, second]))):
        assert first.cpu().sum() == 0
        second.add_(1)
        assert second.cpu().sum() == 3


def test_failed_value_does_not_fail_batch(embedded):
    good = torch.zeros(3, device=embedded)
    bad = good[torch.tensor([7]).to(embedded)]
    with expecting(BatchedFetch(lambda: by_handle([good, bad]))):
        assert good.cpu().sum() == 0
        with pytest.raises(IndexError, match="index 7 is out of bounds"):
            bad.cpu()
