"""An executor that has forgotten a template asks for it, and the run goes on."""

from __future__ import annotations

import pytest
import torch

import djinn
from djinn_core.wire.messages import TemplateRequest
from djinn_server import session

DEVICE = "remote_accelerator:0"


def test_forgotten_template_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in one process, so that the executor alone can be limited to one template."""
    monkeypatch.setattr(session, "TEMPLATES_LIMIT", 1)
    asked: list[tuple[object, ...]] = []

    def request(*said: object) -> TemplateRequest:
        asked.append(said)
        return TemplateRequest(*said)  # type: ignore[arg-type] # as the session calls it

    monkeypatch.setattr(session, "TemplateRequest", request)
    djinn.shut_down()
    djinn.configure(executor="inline", threads=1)
    try:
        x = torch.arange(4.0).to(DEVICE)
        for factor in (1.0, 2.0, 3.0):
            assert (x * factor).sum().item() == 6.0 * factor
            assert (x + factor).relu().tolist() == [factor, factor + 1, factor + 2, factor + 3]
    finally:
        djinn.shut_down()
        djinn.configure()
    assert len(asked) >= 3
