"""The suite for interceptors."""

from __future__ import annotations

import pytest
import torch

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_core.hookspecs.interceptors import Interceptor


class InterceptorConformance(Ending):
    """Subclass it and give the fixture `interceptor`. It is installed into this process, so run it in one of its own."""

    @pytest.fixture
    def interceptor(self) -> Interceptor:
        """The interceptor."""
        return missing(self, "interceptor", "your interceptor")  # type: ignore[return-value]

    def test_it_is_an_interceptor(self, interceptor: Interceptor) -> None:
        """It has every member."""
        require_protocol(interceptor, "interceptors")

    def test_it_leaves_the_cpu_alone(self, interceptor: Interceptor) -> None:
        """Tensors on the CPU and on meta are what they were, while it is installed and afterwards."""
        interceptor.install()
        try:
            _check_untouched()
        finally:
            interceptor.uninstall()
        _check_untouched()

    def test_it_can_be_installed_again(self, interceptor: Interceptor) -> None:
        """`install` after `uninstall` works."""
        for _ in range(2):
            interceptor.install()
            interceptor.uninstall()


def _check_untouched() -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    (weight * 2).sum().backward()
    assert weight.grad is not None, "backward on the CPU gives no gradient"
    assert torch.equal(weight.grad, torch.full((2, 3), 2.0))
    assert type(torch.zeros(3) + 1) is torch.Tensor, "an op on the CPU gives a tensor of another type"
    assert torch.empty(4, device="meta").device.type == "meta"
