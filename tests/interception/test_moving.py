"""Modules, optimizers and data on their way to the device and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import djinn
from djinn_core import torch_private


class TiedLayers(torch.nn.Module):
    """A model whose two layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


def test_module_move_keeps_parameters_and_ties(embedded: str) -> None:
    model = TiedLayers()
    weight, values = model.first.weight, model.first.weight.detach().clone()
    model.to(embedded)
    assert model.first.weight is weight
    assert model.second.weight is weight
    assert isinstance(weight, torch.nn.Parameter)
    assert {str(t.device) for t in (*model.parameters(), *model.buffers())} == {embedded}
    model.cpu()
    assert model.first.weight is weight
    assert model.second.weight is weight
    assert type(weight) is torch.nn.Parameter
    assert torch.equal(weight, values)


def test_optimizer_built_before_move_trains_remote_weights(embedded: str) -> None:
    torch.manual_seed(0)
    local, remote = TiedLayers(), TiedLayers()
    remote.load_state_dict(local.state_dict())
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (local, remote)]
    remote.to(embedded)
    x = torch.randn(3, 4)
    for _ in range(3):
        for model, optimizer, data in zip((local, remote), optimizers, (x, x.to(embedded)), strict=True):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
    assert torch.equal(remote.first.weight.cpu(), local.first.weight)
    assert next(iter(optimizers[1].state.values()))["exp_avg"].device == remote.first.weight.device


def test_upload_is_snapshot_of_source(embedded: str) -> None:
    through_torch, through_numpy = torch.zeros(1000), np.zeros(1000, dtype=np.float32)
    remote = through_torch.to(embedded), torch.from_numpy(through_numpy).to(embedded)
    through_torch.fill_(1.0)
    through_numpy[:] = 1.0
    assert [r.sum().item() for r in remote] == [0.0, 0.0]


def test_empty_tensor_needs_no_upload(embedded: str) -> None:
    ones = torch.ones(2, device=embedded)
    assert ones.tolist() == [1.0, 1.0]
    before = djinn.stats()["messages_sent"]
    empties = torch.tensor([], device=embedded), torch.zeros(3, 0).to(embedded), torch.ones(0).to(embedded, torch.int64)
    assert torch.cat([empties[0], ones]).tolist() == [1.0, 1.0]
    assert djinn.stats()["messages_sent"] - before == 1
    assert [(one.shape, one.dtype) for one in empties[1:]] == [((3, 0), torch.float32), ((0,), torch.int64)]
    with pytest.raises(RuntimeError, match="size of tensor"):
        empties[0].copy_(torch.ones(3))


def test_upload_and_fetch_send_viewed_bytes_only(embedded: str) -> None:
    large = torch.arange(4 << 20, dtype=torch.float32)
    djinn.reset_stats()
    part = large[5:10].to(embedded)
    assert djinn.stats()["bytes_uploaded"] == 20
    assert part.tolist() == [5.0, 6.0, 7.0, 8.0, 9.0]
    remote = large.to(embedded)
    djinn.reset_stats()
    assert remote[5].item() == 5.0
    assert djinn.stats()["bytes_received"] < 1 << 14  # over HTTP each part of the upload is acknowledged with headers
    assert djinn.stats()["round_trips"] == 1


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    ],
    ids=str,
)  # fmt: skip
def test_every_dtype_round_trips(embedded: str, dtype: torch.dtype) -> None:
    octets = torch.arange(64, dtype=torch.uint8).remainder(2)
    local = octets.view(dtype).reshape(2, -1)
    fetched = local.to(embedded).cpu()
    assert fetched.dtype == dtype
    assert torch.equal(fetched.view(torch.uint8), local.view(torch.uint8))
    assert local[0, 0].to(embedded).cpu().shape == ()
    assert local[:0].to(embedded).cpu().shape == local[:0].shape


def test_metadata_needs_no_message(embedded: str) -> None:
    remote = torch.ones(2, 3, device=embedded).t()[1:].unsqueeze(0)
    djinn.reset_stats()
    assert (remote.shape, remote.stride(), remote.dtype, str(remote.device)) == (
        (1, 2, 2),
        (2, 1, 3),
        torch.float32,
        embedded,
    )
    assert djinn.stats()["submissions"] == 0


def test_missing_private_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_private.missing() == []
    monkeypatch.delattr("torch.autograd.graph._engine_run_backward")
    assert torch_private.missing() == ["torch.autograd.graph._engine_run_backward"]
