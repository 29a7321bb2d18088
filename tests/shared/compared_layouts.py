"""Results of programs with tensors that are not strided, as what can be compared."""

from __future__ import annotations

from typing import Any

import torch

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def plain(found: Any) -> Any:
    """Results as numbers and strided CPU tensors."""
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
    """True if `plain` gave the same for both, bit by bit."""
    if isinstance(here, list):
        return isinstance(there, list) and len(here) == len(there) and all(map(equal, here, there))
    if isinstance(here, torch.Tensor):
        same = isinstance(there, torch.Tensor) and here.dtype == there.dtype and here.shape == there.shape
        return same and torch.equal(here.nan_to_num(), there.nan_to_num())
    return bool(here == there)
