"""The two commands of the package appear under `djinn`."""

from __future__ import annotations

import pytest

import djinn_commands.planning
from djinn.testing import CommandConformance
from djinn_commands.planning.explain_command import explain
from djinn_commands.planning.plan_command import plan


class TestExplain(CommandConformance):
    @pytest.fixture
    def command(self):
        return explain

    @pytest.fixture
    def plugin(self):
        return djinn_commands.planning


class TestPlan(CommandConformance):
    @pytest.fixture
    def command(self):
        return plan

    @pytest.fixture
    def plugin(self):
        return djinn_commands.planning
