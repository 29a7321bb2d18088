from __future__ import annotations

import pytest

from djinn.testing import OptimizationConformance, PluginConformance, random_graph
from djinn_optimizations import adaptive, cleanup, fusion, pooling, prefill, recomputation
from djinn_optimizations.adaptive import Adaptive
from djinn_optimizations.cleanup import CommonSubexpressions, DeadCode
from djinn_optimizations.fusion import FoldBatchNorms, FuseProjections
from djinn_optimizations.pooling import PoolFirst
from djinn_optimizations.prefill import DivideSequences
from djinn_optimizations.recomputation import Recomputation

PLUGINS = {
    "adaptive": adaptive,
    "cleanup": cleanup,
    "fusion": fusion,
    "pooling": pooling,
    "prefill": prefill,
    "recomputation": recomputation,
}
OPTIMIZATIONS = (Adaptive, FoldBatchNorms, FuseProjections, PoolFirst, DivideSequences)
# These optimizations change graphs of random ops.
GENERAL = {CommonSubexpressions: 40, DeadCode: 40, Recomputation: 20}


class TestPlugin(PluginConformance):
    @pytest.fixture(params=sorted(PLUGINS))
    def plugin(self, request):
        return PLUGINS[request.param]


class TestOptimization(OptimizationConformance):
    @pytest.fixture(params=OPTIMIZATIONS)
    def optimization(self, request):
        return request.param()


class TestGeneralOptimization(OptimizationConformance):
    @pytest.fixture(params=GENERAL)
    def optimization(self, request):
        return request.param()

    @pytest.fixture
    def graphs(self, optimization):
        return {str(seed): random_graph(seed, length=40) for seed in range(GENERAL[type(optimization)])}
