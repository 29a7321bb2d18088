"""Ops that a server lacks are taken apart or refused by name.

That the server's list of operators is shorter is a fake: there is no other PyTorch here. What the client does with it is real.
"""

from __future__ import annotations

import msgspec
import pytest
import torch

import djinn
from djinn_client.interception.runtime_interface import port
from djinn_client.runtime import client
from djinn_core.ir.operators import allowed_operators

DEVICE = "remote_accelerator:0"
LACKING = {"aten::erfinv", "aten::linear", "aten::relu"}


@pytest.fixture(autouse=True)
def older_server(embedded, monkeypatch):
    """Return a function that opens a session with a server that lacks some ops, as one with an older PyTorch does."""
    real = client.open_connections

    def opened(*args):
        return tuple(
            msgspec.structs.replace(
                one,
                attached=msgspec.structs.replace(
                    one.attached, torch="2.9.0", operators=tuple(sorted(allowed_operators() - LACKING))
                ),
            )
            for one in real(*args)
        )

    djinn.shut_down()
    monkeypatch.setattr(client, "open_connections", opened)
    yield
    djinn.shut_down()
    assert not port.missing, "it is not known what the next server lacks"


def test_missing_op_is_refused_by_name():
    x = torch.full((3,), 0.5, device=DEVICE)
    djinn.init()
    with pytest.raises(
        djinn.errors.UnsupportedOperation, match=r"aten::erfinv .* runs PyTorch 2.9.0, does not have this op"
    ):
        x.erfinv()
    assert x.sum().item() == 1.5


def test_missing_composite_op_is_decomposed():
    weight, bias, x = torch.rand(2, 3), torch.rand(2), torch.rand(4, 3)
    with torch.no_grad():
        made = torch.nn.functional.linear(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE))
    torch.testing.assert_close(made.cpu(), torch.nn.functional.linear(x, weight, bias))
    djinn.shut_down()
    with djinn.capture() as captured, torch.no_grad():
        torch.nn.functional.linear(torch.ones(4, 3), torch.ones(2, 3), torch.ones(2))
    assert "linear" in captured.graph.by_op, "the next server has it"


def test_missing_op_falls_back_to_client():
    djinn.configure(client_fallback=True)
    try:
        x = torch.full((3,), 0.5)
        assert torch.equal(x.to(DEVICE).erfinv().cpu(), x.erfinv())
    finally:
        djinn.configure(client_fallback=False)


def test_missing_op_of_capture_is_reported_at_connect(caplog):
    with djinn.capture():
        kept = torch.ones(3).relu()
    torch.ones(1, device=DEVICE).cpu()
    said = [
        r.getMessage() for r in caplog.records if "a recorded program needs an op that a server lacks" in r.getMessage()
    ]
    assert len(said) == 1
    assert "aten::relu" in said[0]
    del kept
