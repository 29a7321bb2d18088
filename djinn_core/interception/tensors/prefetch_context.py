"""Prefetch context: values that are known to be fetched next, which `fetch` looks up before it sends a request."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class ExpectedFetches(Protocol):
    """Knows which values this thread will fetch next."""

    def take(self, key: int) -> torch.Tensor | None:
        """The elements of the value `key`, where it was expected; asks for all that are, the first time."""

    def to_upload(self) -> list[torch.Tensor]:
        """CPU tensors that will be uploaded one after the other, where that is known; once, and none afterwards."""

    def saw(self, storage: Any) -> None:
        """A remote storage was looked at, and may be fetched whole."""
