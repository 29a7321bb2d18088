from __future__ import annotations

import pytest

from djinn.testing import OptimizationConformance, PatternConformance, PluginConformance
from djinn_cnn import convolution, pipelining
from djinn_cnn.convolution import Convolution
from djinn_cnn.pipelining import Pipelining, SplitBatches


class TestPlugin(PluginConformance):
    @pytest.fixture(params=[convolution, pipelining], ids=["convolution", "pipelining"])
    def plugin(self, request):
        return request.param


class TestPattern(PatternConformance):
    @pytest.fixture
    def pattern(self):
        return Convolution()


class TestOptimization(OptimizationConformance):
    @pytest.fixture(params=[Pipelining, SplitBatches])
    def optimization(self, request):
        return request.param()
