"""Tensors that do not fit into one frame come back in several."""

from __future__ import annotations

import pytest
import torch

import djinn
from djinn_client.interception import sync
from djinn_client.interception.tensors import chunked_fetch

DEVICE = "remote_accelerator:0"


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.permute(2, 0, 1),
        lambda t: t[:, ::2],
        lambda t: t[3:],
        lambda t: t[0].expand(4, 50, 60),
    ],
    ids=["contiguous", "permuted", "with gaps", "with an offset", "expanded"],
)
@pytest.mark.usefixtures("embedded")
def test_parts_make_up_the_whole(monkeypatch: pytest.MonkeyPatch, view) -> None:
    for module in (chunked_fetch, sync):
        monkeypatch.setattr(module, "PART_BYTES", 10_000)
    local = torch.randn(20, 50, 60)
    remote = view(local.to(DEVICE))
    before = djinn.stats()["round_trips"]
    fetched = remote.cpu()
    assert torch.equal(fetched, view(local))
    assert fetched.stride() == view(local).clone().stride()
    assert djinn.stats()["round_trips"] > before + 3
