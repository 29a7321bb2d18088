"""Conformance suite for op handlers."""

from __future__ import annotations

import pytest
import torch

from djinn.testing.suite import missing, require_protocol
from djinn_client.sink import OpHandler


class OpHandlerConformance:
    """Tests that every op handler must pass.

    Subclass this class and define the fixture `op_handler`. Test the results of ops in your own tests.
    """

    @pytest.fixture
    def op_handler(self) -> OpHandler:
        """Return the op handler under test."""
        return missing(self, "op_handler", "your op handler")  # type: ignore[return-value]

    def test_op_handler_has_every_member(self, op_handler: OpHandler) -> None:
        """The op handler has all attributes and methods of `OpHandler`."""
        require_protocol(op_handler, "op_handlers")

    def test_op_handler_decides_about_every_call(self, op_handler: OpHandler) -> None:
        """`needed` returns True or False for a call without tensors as well."""
        needed = op_handler.needed(torch.ops.aten.relu.default, (), {}, [], ())
        assert isinstance(needed, bool), f"`needed` returned {needed!r}, which is no bool"
