"""The names that this package brings are those of `djinn`; tests/runtime/test_verify.py has what they do."""

from __future__ import annotations

import pytest
import torch

import djinn
import djinn_verification
from djinn.testing import ApiNameConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_verification


class TestNames(ApiNameConformance):
    @pytest.fixture(params=djinn_verification.djinn_register_api_names(), ids=lambda one: one.name)
    def api_name(self, request):
        return request.param


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
