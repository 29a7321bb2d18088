"""Uploads that the executor may not need: offered by digest, sent where it has no such bytes."""

from __future__ import annotations

import hashlib
from typing import Final

import attrs

from djinn_core.wire.messages import Offer, TensorHeader

OFFER_BYTES: Final = 64 << 10  # smaller tensors travel at once
COPY_BYTES: Final = 32 << 20  # a larger tensor is not copied: its upload waits for the answer
HELD_BYTES: Final = 256 << 20  # copies that may wait for answers at a time


@attrs.frozen
class Offered:
    """An upload that was offered, and its bytes."""

    header: TensorHeader
    data: memoryview


class Offers:
    """The offers that the executor has not answered."""

    def __init__(self) -> None:
        self._open: dict[int, Offered] = {}
        self.held = 0

    def __contains__(self, handle: int) -> bool:
        return handle in self._open

    def __len__(self) -> int:
        return len(self._open)

    def make(self, handle: int, header: TensorHeader, data: memoryview) -> Offer:
        """The offer of `data`, of which a copy is kept unless it is large: then the caller waits for the answer."""
        kept = data if waits(data) else memoryview(bytes(data))
        self._open[handle] = Offered(header, kept)
        self.held += data.nbytes
        digest = hashlib.sha256(kept).digest()
        return Offer(handle, header.dtype, header.shape, header.stride, data.nbytes, digest)

    def get(self, handle: int) -> Offered | None:
        """What was offered as `handle`, where that is not answered."""
        return self._open.get(handle)

    def close(self, handle: int) -> int:
        """The offer is answered, and its bytes were sent if they were wanted; how many they are."""
        offered = self._open.pop(handle, None)
        size = offered.data.nbytes if offered is not None else 0
        self.held -= size
        return size


def waits(data: memoryview) -> bool:
    """Whether an upload of `data` waits for the answer to its offer."""
    return data.nbytes > COPY_BYTES
