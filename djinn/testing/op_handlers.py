"""Conformance suite for op handlers."""

from __future__ import annotations

import pytest
import torch

from djinn.testing.suite import missing, require_protocol
from djinn_client.sink import OpHandler


class OpHandlerConformance:
    """Conformance suite. Subclass it and define the fixture `op_handler`. Test results of ops in your own tests."""

    @pytest.fixture
    def op_handler(self) -> OpHandler:
        """Return the op handler under test."""
        return missing(self, "op_handler", "your op handler")  # type: ignore[return-value]

    def test_it_is_an_op_handler(self, op_handler: OpHandler) -> None:
        """The op handler has every member."""
        require_protocol(op_handler, "op_handlers")

    def test_it_says_if_it_is_needed(self, op_handler: OpHandler) -> None:
        """The op handler decides about each call, even about a call without tensors."""
        needed = op_handler.needed(torch.ops.aten.relu.default, (), {}, [], ())
        assert isinstance(needed, bool), f"`needed` returned {needed!r}, which is no bool"
