import djinn_example
import pytest
import torch

import djinn
from djinn.testing import ApiNameConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestName(ApiNameConformance):
    @pytest.fixture
    def api_name(self):
        (found,) = djinn_example.djinn_register_api_names()
        return found


def test_ops_are_counted():
    with djinn.example() as count:
        kept = torch.ones(2, device="remote_accelerator:0") + 1
    assert count() >= 1
    del kept
