"""What all suites share."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from djinn_core.conformance.samples import sample_graphs
from djinn_core.ir.graph import ProgramGraph
from djinn_core.plugins.contract import complaint
from djinn_core.plugins.kinds import KINDS


def require_protocol(item: object, kind: str) -> None:
    """Fail where `item` does not satisfy the Protocol of its kind; the message names the member at fault."""
    wanted = next(entry for entry in KINDS if entry.name == kind)
    assert not (problem := complaint(item, wanted)), f"a hook would have {problem}"


def missing(suite: object, fixture: str, what: str) -> object:
    """Fail because a suite was not given what it tests."""
    return pytest.fail(f"{type(suite).__name__} needs a fixture `{fixture}` that returns {what}")


class OnGraphs:
    """Base of the suites whose subjects work on graphs."""

    @pytest.fixture
    def graphs(self) -> Mapping[str, ProgramGraph]:
        """The graphs to try, by name. Override to add your own to `djinn.testing.sample_graphs()`."""
        return sample_graphs()
