import djinn_example
import pytest
import torch

from djinn.testing import InterceptorConformance, PluginConformance


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestInterceptor(InterceptorConformance):
    @pytest.fixture
    def interceptor(self):
        return djinn_example.ExampleInterceptor()


def test_ops_are_counted_while_it_is_installed():
    interceptor = djinn_example.ExampleInterceptor()
    interceptor.install()
    torch.ones(2).mul(3)
    interceptor.uninstall()
    torch.ones(2).mul(3)
    assert interceptor.counts["aten.mul.Tensor"] == 1
