"""KV sessions: pin, evict and restore the KV cache of one generation on the executor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Final, Self

import attrs
import torch

from djinn_client.interception.recording.recorder import current
from djinn_client.interception.tensors.batched_fetch import by_handle
from djinn_client.runtime.receiving.failures import RemoteTorchOutOfMemory
from djinn_core.errors import UnsupportedOperation
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.cache_messages import CacheAction, CacheReply, CacheRequest

_MAX_DEPTH: Final = 8  # objects in objects: a cache has layers, and a layer has tensors


@attrs.frozen
class CacheMemory:
    """Memory of KV caches on executors, in bytes.

    Attributes:
        total: size of the caches.
        resident: bytes in device memory.
        pinned: bytes that are pinned in device memory.
        limited: True if each executor that holds a part of the caches has a memory limit. Other executors evict
            nothing.
    """

    total: int = 0
    resident: int = 0
    pinned: int = 0
    limited: bool = True


class KvSession:
    """Control of where the KV cache of one generation is stored.

    Each call looks up the tensors of the cache, because most caches replace their tensors at each token. A cache that a
    program computes from a pinned cache is pinned, too. The end of a `with` block unpins the cache.
    """

    def __init__(self, cache: object = None) -> None:
        """`cache`: object that contains the tensors, or None for all recognised caches, as in `kv_session`."""
        self.cache = cache

    def __repr__(self) -> str:
        if self.cache is None:
            return "<KvSession of all recognised caches>"
        return f"<KvSession of a {type(self.cache).__name__}>"

    def size(self) -> CacheMemory:
        """Return the size of the cache, and its resident and pinned bytes. This needs one round trip."""
        return self._request("look")

    def pin(self) -> CacheMemory:
        """Restore the cache to device memory, and keep it there until `unpin`, `evict` or the end of the session.

        Raises:
            RemoteTorchOutOfMemory: the executor has too little memory.
        """
        return self._request("pin")

    def unpin(self) -> CacheMemory:
        """Allow the executor to evict the cache if device memory is short."""
        return self._request("unpin")

    def evict(self) -> CacheMemory:
        """Spill the cache now, for example while a conversation pauses.

        `restore` or the next use of the cache restores it. Tensors below 64 KiB stay in device memory.

        Raises:
            UnsupportedOperation: the executor has no memory limit, and therefore no spill space.
            RemoteTorchOutOfMemory: the spill space is full.
        """
        memory = self._request("evict")
        if not memory.limited and memory.total:
            raise UnsupportedOperation(
                "cannot evict: the executor has no memory limit. Start it with memory_gib=... or "
                "`djinn serve --memory-gib`, or delete the cache"
            )
        return memory

    def restore(self) -> CacheMemory:
        """Restore the cache to device memory before its next use.

        Raises:
            RemoteTorchOutOfMemory: the executor has too little memory.
        """
        return self._request("restore")

    def close(self) -> None:
        """Unpin the cache. The executor frees it when the Python program drops its tensors."""
        self.unpin()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, action: CacheAction) -> CacheMemory:
        handles = () if self.cache is None else tuple(by_handle(tensors_in(self.cache)))
        if self.cache is not None and not handles:
            return CacheMemory()  # the cache has no tensors before the first token
        reply = current().query(CacheRequest(action, pack_handles(handles)), CacheReply)
        if reply.refused:
            raise RemoteTorchOutOfMemory(f"the executor cannot {action} the KV cache: {reply.refused}")
        return CacheMemory(reply.nbytes, reply.resident, reply.pinned, reply.limited)


def kv_session(cache: object = None) -> KvSession:
    """Return an object that pins, evicts and restores a KV cache on its executor.

    `cache` contains tensors in lists, mappings or objects such as transformers' `DynamicCache`. None selects all values of
    the open session that Djinn recognises as KV caches. Djinn recognises them only if the executor has a memory limit.
    """
    return KvSession(cache)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in an object: in its attributes, and in nested lists, tuples, sets and mappings."""
    visited: set[int] = set()
    level: list[object] = [value]
    for _ in range(_MAX_DEPTH):
        members: list[object] = []
        for item in level:
            if isinstance(item, torch.Tensor):
                yield item
            elif id(item) not in visited:
                visited.add(id(item))
                members.extend(_members(item))
        level = members


def _members(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    return vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
