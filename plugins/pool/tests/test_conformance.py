from __future__ import annotations

import pytest

import djinn_pool
from djinn.testing import PluginConformance, RouterConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_pool


class TestRouter(RouterConformance):
    @pytest.fixture
    def router(self):
        (router,) = djinn_pool.djinn_register_routers()
        return router
