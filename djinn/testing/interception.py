"""Conformance suite for interceptions."""

from __future__ import annotations

import pytest

from djinn.testing.suite import missing, require_protocol
from djinn_client.hookspecs.interception import Interception
from djinn_client.sink import Submission


class InterceptionConformance:
    """Conformance suite. Subclass it and define the fixture `interception`, which has not called `begin`."""

    @pytest.fixture
    def interception(self) -> Interception:
        """Return the interception under test."""
        return missing(self, "interception", "your interception")  # type: ignore[return-value]

    def test_it_is_an_interception(self, interception: Interception) -> None:
        """The interception has every member."""
        require_protocol(interception, "interception")

    def test_it_gives_nothing_before_it_begins(self, interception: Interception) -> None:
        """`take` returns submissions without ops."""
        for submission in interception.take():
            assert isinstance(submission, Submission), f"`take` returned {submission!r}, which is no Submission"
            assert not len(submission.program), "`take` returned ops, and nothing was recorded"

    def test_a_session_may_end_before_anything_was_recorded(self, interception: Interception) -> None:
        """Without recorded ops, a session can end, facts can change, and counts are available."""
        interception.forget()
        interception.reconsider()
        assert interception.ops() == (0, 0), "`ops` counts ops, and nothing was recorded"
        assert interception.live(0) == 0, "`live` counts values, and there are none"
