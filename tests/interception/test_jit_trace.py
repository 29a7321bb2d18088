"""`torch.jit.trace` of modules on the device."""

import pytest
import torch


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    ("convolution", "shape"), [(torch.nn.Conv2d, (2, 3, 8, 8)), (torch.nn.ConvTranspose1d, (2, 3, 8))]
)
def test_jit_traced_convolution_uses_new_inputs(embedded, convolution, shape, trains):
    model = torch.nn.Sequential(convolution(3, 4, 3), torch.nn.ReLU()).to(embedded).requires_grad_(trains)
    first, second = (torch.randn(*shape, device=embedded) for _ in range(2))
    model(first)  # the call is known when it is traced
    traced = torch.jit.trace(model, (first,))
    assert torch.equal(traced(second).cpu(), model(second).cpu())
