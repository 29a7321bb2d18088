"""The names that this package brings are those of `djinn`, and work there; tests/timeline and tests/runtime have the rest."""

from __future__ import annotations

import pytest
import torch

import djinn
from djinn.testing import ApiNameConformance, PluginConformance
from djinn_profiler import timeline, verification

PLUGINS = [timeline, verification]
NAMES = [name for plugin in PLUGINS for name in plugin.djinn_register_api_names()]


class TestPlugin(PluginConformance):
    @pytest.fixture(params=PLUGINS, ids=lambda plugin: plugin.__name__.rpartition(".")[2])
    def plugin(self, request):
        return request.param


class TestNames(ApiNameConformance):
    @pytest.fixture(params=NAMES, ids=lambda one: one.name)
    def api_name(self, request):
        return request.param


def test_a_block_is_profiled_and_its_waits_are_explained():
    x = torch.ones(3, device="remote_accelerator:0")
    djinn.init()  # clocks are compared where a session begins, which is waited for
    with djinn.profile() as prof, djinn.explain_waits() as report:
        assert (x + 1).sum().item() == 6
    assert prof.totals.round_trips == 1
    assert isinstance(prof, djinn.Timeline)
    assert isinstance(report, djinn.WaitReport)
    assert [wait.times for wait in report.waits] == [1]
    assert ".item()" in prof.table()


def test_ops_of_a_block_are_checked():
    x = torch.ones(3, device="remote_accelerator:0")
    with djinn.verify(bitwise=True) as report:
        assert (x + 1).sum().item() == 6
    assert report.checked >= 2
    with (
        djinn.verify(),
        pytest.raises(djinn.DjinnError, match=r"djinn\.verify\(\) works neither inside another"),
        djinn.verify(),
    ):
        pass
