"""Replace views at varying positions by copies, because a recorded graph has fixed addresses.

A write into such a copy is also stored in the tensor that the program views. If another copy would then be stale, the
region is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from djinn_core.errors import DjinnError


class StaleViewError(DjinnError):
    """A write into a copied view cannot be stored in the viewed tensor, or it would leave another copy stale."""


@attrs.frozen(eq=False)
class _CopiedView:
    """A copy that replaces a view.

    Attributes:
        copy: storage of the copy.
        viewed: storage of the tensor that the program views.
        store: copies a written copy back into the viewed tensor. If this is not possible, it is None.
    """

    copy: StorageWeakRef
    viewed: StorageWeakRef
    store: Callable[[torch.Tensor], object] | None = None


class CopiedViews:
    """All copied views of one run."""

    def __init__(self) -> None:
        self._views: list[_CopiedView] = []

    def record_view(self, viewed: torch.Tensor, made: torch.Tensor) -> None:
        """Record `made`, the result of a view op on `viewed`, if it was copied to another storage."""
        copy, source = _storage(made), _storage(viewed)
        if copy.cdata != source.cdata and not any(view.copy.cdata == copy.cdata for view in self._views):
            self._views.append(_CopiedView(copy, source))

    def select(self, tensor: torch.Tensor, dim: int, positions: torch.Tensor) -> torch.Tensor:
        """Return a copy of the entries at `positions`. A later write into the copy is also stored in `tensor`."""
        copy = tensor.index_select(dim, positions)
        shape, stride = copy.shape, copy.stride()

        def store(update: torch.Tensor) -> None:
            tensor.index_copy_(dim, positions, update.as_strided(shape, stride, 0))

        self._views.append(_CopiedView(_storage(copy), _storage(tensor), store))
        return copy

    def store_copy(self, tensor: torch.Tensor) -> None:
        """If the written `tensor` is a copied view, store its contents in the viewed tensor.

        Raises:
            StaleViewError: another copy is now stale, or the contents cannot be stored.
        """
        written_storage = _storage(tensor).cdata
        copies = [view for view in self._views if view.copy.cdata == written_storage]
        changed_storages = {written_storage, *[view.viewed.cdata for view in copies]}
        if any(view.store is None or self._is_copy(view.viewed) for view in copies):
            raise StaleViewError("it writes into a view that was copied and cannot be stored back")
        views = [view for view in self._views if view not in copies and not view.copy.expired()]
        if any(view.viewed.cdata in changed_storages for view in views):
            raise StaleViewError(
                "it writes into a tensor while the program holds a view of the tensor at a varying position"
            )
        for view in copies:
            assert view.store is not None
            view.store(tensor)

    def _is_copy(self, storage: StorageWeakRef) -> bool:
        return any(view.copy.cdata == storage.cdata for view in self._views)


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
