"""Both commands are Djinn's, as those of any package."""

from __future__ import annotations

import djinn_planning
import pytest
from djinn_planning.explain_command import explain
from djinn_planning.plan_command import plan

from djinn.testing import CommandConformance


class TestExplain(CommandConformance):
    @pytest.fixture
    def command(self):
        return explain

    @pytest.fixture
    def plugin(self):
        return djinn_planning


class TestPlan(CommandConformance):
    @pytest.fixture
    def command(self):
        return plan

    @pytest.fixture
    def plugin(self):
        return djinn_planning
