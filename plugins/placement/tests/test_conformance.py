from __future__ import annotations

import pytest

from djinn.testing import PlacementPolicyConformance, PluginConformance
from djinn_placement import balanced, pinned, round_robin

PLUGINS = {"balanced": balanced, "pinned": pinned, "round_robin": round_robin}


@pytest.fixture(params=sorted(PLUGINS))
def name(request):
    return request.param


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self, name):
        return PLUGINS[name]


class TestPolicy(PlacementPolicyConformance):
    @pytest.fixture
    def policy(self, name):
        (policy,) = PLUGINS[name].djinn_register_placement_policies()
        assert policy.name == name
        return policy
