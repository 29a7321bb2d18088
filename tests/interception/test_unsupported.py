"""Unsupported features of a strided-only device are refused at the op, by name, and nothing else is harmed."""

from __future__ import annotations

import pytest
import torch

import djinn

CASES = {
    "dequantize": lambda x: x.dequantize(),
    "to_mkldnn": lambda x: x.to_mkldnn(),
}


@pytest.mark.parametrize("case", CASES)
def test_other_layouts_raise_at_op(embedded, case):
    x = torch.ones(2, 2, device=embedded)
    with pytest.raises(NotImplementedError) as caught:
        CASES[case](x)
    assert isinstance(caught.value, djinn.errors.UnsupportedOperation), caught.value
    assert "no MKL-DNN tensors" in str(caught.value), caught.value
    assert "report this op" not in str(caught.value)
    assert x.sum().item() == 4
    djinn.synchronize()  # nothing failed on the executor


@pytest.mark.filterwarnings("ignore:.*(deprecated|functions that produce|TypedStorage)")
def test_packed_weights_raise_by_name(embedded):
    converted = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(4, 3)), {torch.nn.Linear})
    x = torch.ones(2, 4, device=embedded)
    with pytest.raises(djinn.errors.UnsupportedOperation, match=r"LinearPackedParamsBase.*Run the module on the CPU"):
        converted(x)
    assert x.sum().item() == 8


def test_mapping_file_to_device_raises(embedded, tmp_path):
    file = tmp_path / "data"
    file.write_bytes(bytes(16))
    with pytest.raises(NotImplementedError):
        torch.from_file(str(file), size=4, device=embedded)


def test_jiterator_raises_as_without_cuda(embedded):
    from torch.cuda.jiterator import _create_jit_fn

    doubled = _create_jit_fn("template <typename T> T doubled(T x) { return x + x; }")
    with pytest.raises(AssertionError, match="only supported on CUDA"):
        doubled(torch.ones(2, device=embedded))
