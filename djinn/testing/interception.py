"""Conformance suite for interceptions."""

from __future__ import annotations

import pytest

from djinn.testing.suite import missing, require_protocol
from djinn_client.hookspecs.interception import Interception
from djinn_client.sink import Submission


class InterceptionConformance:
    """Tests that every interception must pass.

    Subclass this class and define the fixture `interception`. The fixture must not have called `begin`.
    """

    @pytest.fixture
    def interception(self) -> Interception:
        """Return the interception under test."""
        return missing(self, "interception", "your interception")  # type: ignore[return-value]

    def test_interception_has_every_member(self, interception: Interception) -> None:
        """The interception has all attributes and methods of `Interception`."""
        require_protocol(interception, "interception")

    def test_nothing_is_recorded_before_begin(self, interception: Interception) -> None:
        """Before `begin`, `take` returns submissions without ops."""
        for submission in interception.take():
            assert isinstance(submission, Submission), f"`take` returned {submission!r}, which is no Submission"
            assert not len(submission.program), "`take` returned ops, but none was recorded"

    def test_session_without_ops_may_end(self, interception: Interception) -> None:
        """Before any op is recorded, `forget` and `reconsider` can be called, and `ops` and `live` return zeros."""
        interception.forget()
        interception.reconsider()
        assert interception.ops() == (0, 0), "`ops` must return zeros before an op is recorded"
        assert interception.live(0) == 0, "`live` must return 0 before a value exists"
