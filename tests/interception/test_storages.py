"""Tensors of storages, and alerts, as PyTorch's own tests look at them."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_tensor_from_storage(embedded):
    source = torch.arange(6.0, device=embedded)
    for storage in (source.storage(), source.untyped_storage()):
        there = torch.tensor(storage, dtype=torch.float32, device=embedded)
        assert there.device == source.device
        source[0] += 1
        assert there.tolist() == source.tolist()  # it looks into the storage, as on the CPU
        here = torch.tensor(storage, dtype=torch.float32)
        assert here.device.type == "cpu"
        assert here.tolist() == source.tolist()
    for make in (torch.as_tensor, torch.asarray):
        assert make(source.untyped_storage()).tolist() == make(source.cpu().untyped_storage()).tolist()
    with pytest.raises(RuntimeError, match="Expected a Storage of type"):
        torch.tensor(source.storage(), dtype=torch.int32)


def test_nondeterministic_alerts_raise_at_op(embedded):
    given, index = torch.zeros(3, device=embedded), torch.tensor([0, 0], device=embedded)
    given.put_(index, torch.ones(2, device=embedded))  # the same call, before
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic"):
            given.put_(index, torch.ones(2, device=embedded))
        given.put_(index, torch.ones(2, device=embedded), accumulate=True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        image, places = torch.randn(1, 1, 7, device=embedded), torch.zeros(1, 1, 7, dtype=torch.int64, device=embedded)
        with pytest.warns(UserWarning, match="max_unpooling2d_forward_out does not have"):
            torch.nn.MaxUnpool1d(3, 1)(image, places)
    finally:
        torch.use_deterministic_algorithms(False)


def test_lossy_in_place_write_raises_at_op(embedded):
    given, mask = torch.arange(4.0, device=embedded), torch.tensor([True, False, True, True], device=embedded)
    with pytest.raises(RuntimeError):
        given.masked_scatter_(mask, torch.zeros(2, device=embedded))
    with pytest.raises(RuntimeError):
        given.masked_scatter_(torch.ones(2, 4, dtype=torch.bool, device=embedded), given)
    with pytest.raises(RuntimeError, match="unsupported operation"):
        given[:-1] >>= given[1:]
    assert given.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_storage_slice_shares_memory(embedded):
    source = torch.arange(8.0, device=embedded)
    part = source.untyped_storage()[8:16]
    looking = torch.empty(0, device=embedded).set_(part)
    looking.add_(100)
    assert source.tolist() == [0.0, 1.0, 102.0, 103.0, 4.0, 5.0, 6.0, 7.0]
    assert torch.tensor(part, dtype=torch.uint8).tolist() == list(source[2:4].cpu().untyped_storage())
    part.fill_(0)
    assert source.tolist() == [0.0, 1.0, 0.0, 0.0, 4.0, 5.0, 6.0, 7.0]
