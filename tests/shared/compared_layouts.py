"""Results of programs with tensors that are not strided, as what can be compared."""

from __future__ import annotations

from typing import Any

import torch

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def plain(found: Any) -> Any:
    """Return results as numbers and strided CPU tensors."""
    if isinstance(found, (list, tuple)) and not isinstance(found, torch.Size):
        return [plain(one) for one in found]
    if not isinstance(found, torch.Tensor):
        return found
    found = found.detach().cpu()
    if found.layout == torch.sparse_coo:
        return [found.is_coalesced(), tuple(found.shape), found._indices(), found._values()]
    if found.layout in COMPRESSED:
        by_rows = found.layout in {torch.sparse_csr, torch.sparse_bsr}
        indices = (
            [found.crow_indices(), found.col_indices()] if by_rows else [found.ccol_indices(), found.row_indices()]
        )
        return [str(found.layout), tuple(found.shape), *indices, found.values()]
    if found.is_nested:
        return ["nested", *[plain(one) for one in found.unbind()]]
    if found.is_quantized:
        return [str(found.dtype), str(found.qscheme()), found.int_repr(), found.dequantize()]
    return found


def equal(here: Any, there: Any) -> bool:
    """Return True if two results of `plain` are bitwise equal."""
    if isinstance(here, list):
        return isinstance(there, list) and len(here) == len(there) and all(map(equal, here, there))
    if isinstance(here, torch.Tensor):
        same = isinstance(there, torch.Tensor) and here.dtype == there.dtype and here.shape == there.shape
        return same and torch.equal(here.nan_to_num(), there.nan_to_num())
    return bool(here == there)


def one_of_each(device: Any) -> list[torch.Tensor]:
    """Return a tensor of each non-strided kind, computed on the device."""
    dense = torch.arange(64.0).reshape(8, 8).sin().to(device)
    thinned = dense * (dense > 0)
    scales = torch.linspace(0.01, 0.02, 8).to(device)
    return [
        thinned.to_sparse() * 2,
        thinned.to_sparse_csr() * 3,
        thinned.to_sparse_bsc((2, 2)),
        torch.quantize_per_tensor(dense, 0.01, 3, torch.qint8),
        torch.quantize_per_channel(dense, scales, torch.zeros(8).to(device), 0, torch.quint8),
    ]


def ops_on_each(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return results of ops on the tensors of `one_of_each`."""
    return [t.dequantize() if t.is_quantized else t.to_dense() @ t.to_dense() for t in tensors]
