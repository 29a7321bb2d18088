"""What holds for every optimization, and when successive inputs may be spread; pools are in Djinn's own tests."""

from __future__ import annotations

import pytest

from djinn.testing import OptimizationConformance
from djinn_pipelining import Pipelining


class TestConforms(OptimizationConformance):
    @pytest.fixture
    def optimization(self):
        return Pipelining()
