"""Requests to a pool: the choice of the executors that answer, and the merge of their replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from djinn_client.hookspecs.routers import Executors
from djinn_client.runtime.executor_client import ExecutorClient
from djinn_client.sink import M
from djinn_core.errors import UnsupportedOperation, WeightsUnavailable
from djinn_core.ir.handles import storage_of
from djinn_core.wire.binding_delta import pack_handles, unpack_handles
from djinn_core.wire.cache_messages import CacheReply, CacheRequest
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import StatsReply, StatsRequest
from djinn_core.wire.weight_messages import OpenWeights, OpenWeightsReply, SaveWeights
from djinn_pool.value_locations import ValueLocations


def ask(
    message: Message, kind: type[M], device: int, executors: Executors[ExecutorClient], locations: ValueLocations
) -> M:
    """Send a request to executors and merge their replies, as `Sink.ask`.

    A request to save weights goes to an executor that has all tensors. Requests about caches and statistics, and requests
    to open weights, go to several executors. All others go to the first executor of the device index `device`.

    Raises:
        UnsupportedOperation: no single executor has all tensors to save.
        WeightsUnavailable: executors find different weights at the same address.
    """
    reply: Any
    if isinstance(message, CacheRequest):
        reply = _caches(message, executors, locations)
    elif isinstance(message, SaveWeights):
        reply = executors.members[_holder_of_all(message, executors, locations)].ask(message, kind)
    elif isinstance(message, StatsRequest):
        sums = Counter[str]()
        for member in executors.for_index(device):
            sums.update(member.ask(message, StatsReply).values)
        reply = StatsReply(dict(sums))
    elif isinstance(message, OpenWeights):
        reply = _open_on_all(message, executors, device)
    else:
        reply = executors.for_index(device)[0].ask(message, kind)
    return reply  # type: ignore[no-any-return]


def _open_on_all(message: OpenWeights, executors: Executors[ExecutorClient], device: int) -> OpenWeightsReply:
    """Ask all executors to open stored weights, and return their common reply.

    If an executor refuses or has not finished, return its reply.

    Raises:
        WeightsUnavailable: executors find different weights.
    """
    members = executors.for_index(device)
    replies: list[OpenWeightsReply] = []
    for member in members:
        reply = member.ask(message, OpenWeightsReply)
        if reply.unfinished or reply.refused:
            return reply
        replies.append(reply)
    for member, other_reply in zip(members[1:], replies[1:], strict=True):
        if (other_reply.address, other_reply.version, other_reply.tensors) != (
            replies[0].address,
            replies[0].version,
            replies[0].tensors,
        ):
            raise WeightsUnavailable(
                f"the weights at {message.address!r} differ between {member.server} and {members[0].server}: store the same file on both, with "
                "the same timestamp, or use an address that both read"
            )
    return replies[0]


def _holders(handle: int, locations: ValueLocations) -> set[int]:
    home = locations.homes.get(storage_of(handle))
    return {*(locations.copies(handle) or ())} | (set() if home is None else {home})


def _holder_of_all(message: SaveWeights, executors: Executors[ExecutorClient], locations: ValueLocations) -> int:
    holders = set(executors.present)
    for handle in unpack_handles(message.handles):
        holders &= _holders(handle, locations)
    if not holders:
        raise UnsupportedOperation(
            f"no executor of the pool has all tensors to save at {message.address!r}: save the tensors of each device to a separate address, or "
            "fetch all tensors and save them on this machine"
        )
    return min(holders)


def _caches(message: CacheRequest, executors: Executors[ExecutorClient], locations: ValueLocations) -> CacheReply:
    """Ask each executor about the values that it holds, and return the sum of their replies."""
    handles = unpack_handles(message.handles)
    handles_of: dict[int, list[int]] = {} if handles else {number: [] for number in executors.present}
    for handle in handles:
        for number in _holders(handle, locations):
            handles_of.setdefault(number, []).append(handle)
    replies: Sequence[CacheReply] = [
        executors.members[number].ask(msgspec.structs.replace(message, handles=pack_handles(part)), CacheReply)
        for number, part in sorted(handles_of.items())
    ]
    return CacheReply(
        sum(reply.nbytes for reply in replies),
        sum(reply.resident for reply in replies),
        sum(reply.pinned for reply in replies),
        all(reply.limited for reply in replies),
        "; ".join(reply.refused for reply in replies if reply.refused),
    )
