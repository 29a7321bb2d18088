"""Messages about KV caches under a memory limit: a client pins, evicts and restores them, and asks where they are."""

from typing import Literal

from djinn_core.wire.binding_delta import Handles
from djinn_core.wire.message_base import Count, Message

CacheAction = Literal["look", "pin", "unpin", "evict", "restore"]


class CacheRequest(Message, frozen=True):
    """Do `action` with the memory of some values, packed as in a submission; of all KV caches of the session if there are none.

    `pin` restores them first, and `evict` unpins them. The cache that a program makes of a pinned one is pinned as well.
    """

    action: CacheAction
    handles: Handles = ()


class CacheReply(Message, frozen=True):
    """Reply to `CacheRequest`: bytes of these values in all, in the device's memory, and pinned.

    `limited` is false if the executor has no memory limit: it evicts nothing. `refused` says why an action could not be done.
    `values` are the pinned ones, if the request named no values.
    """

    nbytes: Count
    resident: Count
    pinned: Count
    limited: bool
    refused: str = ""
    values: Handles = ()
