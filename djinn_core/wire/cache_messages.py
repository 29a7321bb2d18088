"""Messages about KV caches under a memory limit: pin, evict, restore, and query their locations."""

from typing import Literal

from djinn_core.wire.binding_delta import Handles
from djinn_core.wire.message_base import Count, Message

CacheAction = Literal["look", "pin", "unpin", "evict", "restore"]


class CacheRequest(Message, frozen=True):
    """Client to executor: apply `action` to the memory of values. Their handles are packed as in a submission.

    Without values, the action applies to all KV caches of the session. `pin` restores evicted caches first. `evict`
    unpins them. A cache that a program derives from a pinned cache is pinned as well.
    """

    action: CacheAction
    handles: Handles = ()


class CacheReply(Message, frozen=True):
    """Reply to `CacheRequest`: the values' total bytes, bytes in device memory, and pinned bytes.

    Attributes:
        limited: False if the executor has no memory limit: it evicts nothing.
        refused: the reason why an action failed.
        values: the pinned values, if the request named no values.
    """

    nbytes: Count
    resident: Count
    pinned: Count
    limited: bool
    refused: str = ""
    values: Handles = ()
