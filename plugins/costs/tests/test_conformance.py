from __future__ import annotations

import pytest

from djinn.testing import CommandConformance, CostModelConformance, PlacementPolicyConformance, PluginConformance
from djinn_costs import cost_based, roofline
from djinn_costs.cost_based import CostBased
from djinn_costs.roofline.model import MeasuredRoofline


class TestPlugin(PluginConformance):
    @pytest.fixture(params=[cost_based, roofline], ids=["cost_based", "roofline"])
    def plugin(self, request):
        return request.param


class TestPolicy(PlacementPolicyConformance):
    @pytest.fixture
    def policy(self):
        return CostBased()


class TestModel(CostModelConformance):
    @pytest.fixture
    def cost_model(self):
        return MeasuredRoofline()


class TestCommands(CommandConformance):
    @pytest.fixture(params=roofline.djinn_register_commands(), ids=lambda command: command.name)
    def command(self, request):
        return request.param

    @pytest.fixture
    def plugin(self):
        return roofline
