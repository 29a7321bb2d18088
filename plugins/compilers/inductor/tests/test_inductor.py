"""The compiler, by the suite for all compilers, and with no C++ compiler."""

from __future__ import annotations

import pytest

import djinn_inductor
from djinn.testing import CompilerConformance, PluginConformance
from djinn_inductor.compiler import Inductor
from djinn_inductor.toolchain import missing_toolchain


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_inductor


@pytest.mark.skipif(bool(missing_toolchain()), reason=missing_toolchain())
class TestInductor(CompilerConformance):
    @pytest.fixture
    def compiler(self):
        return Inductor()
