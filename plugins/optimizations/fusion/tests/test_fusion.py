"""What holds for every optimization; whole models are in Djinn's own tests."""

from __future__ import annotations

import pytest

from djinn.testing import OptimizationConformance
from djinn_fusion import FoldBatchNorms, FuseProjections


class TestProjectionsConform(OptimizationConformance):
    @pytest.fixture
    def optimization(self):
        return FuseProjections()


class TestFoldingConforms(OptimizationConformance):
    @pytest.fixture
    def optimization(self):
        return FoldBatchNorms()
