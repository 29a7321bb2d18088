"""Answers to questions about addresses: what one has, what is published, and whether something was removed."""

from __future__ import annotations

import time
from concurrent.futures import Future

from djinn_core.errors import WeightsUnavailable
from djinn_core.server.weights.published import PublishedWeights
from djinn_core.server.weights.weight_reader import OpenedWeights, WeightReader
from djinn_core.wire import limits
from djinn_core.wire.messages import encode
from djinn_core.wire.weight_messages import (
    OpenWeights,
    OpenWeightsReply,
    PublishedEntry,
    PublishedReply,
    RemoveWeights,
    RemoveWeightsReply,
    StoredTensorEntry,
)


def listed(request: OpenWeights, found: Future[OpenedWeights], most: int) -> bytes:
    """Answer to a question what an address has, of at most so many bytes."""
    try:
        opened = found.result()
    except WeightsUnavailable as error:
        return encode(OpenWeightsReply(bytes(32), refused=str(error)[: limits.FAILURE_TEXT]))
    tensors = opened.tensors.items()
    entries = [StoredTensorEntry(name, place.entry.dtype_name, place.entry.shape) for name, place in tensors]
    address = "" if opened.address == request.address else opened.address
    described = opened.version, tuple(entries), tuple(opened.metadata.items())
    reply = encode(OpenWeightsReply(*described, address=address))
    if len(reply) > most:
        text = f"what is at {request.address!r} takes {len(reply):,} bytes to list; {most:,} are the limit"
        return encode(OpenWeightsReply(bytes(32), refused=text[: limits.FAILURE_TEXT]))
    return reply


def list_published(published: PublishedWeights | None) -> PublishedReply:
    """Answer to a question what is published."""
    if published is None:
        return PublishedReply(
            refused="the server keeps no published weights (--publish-hours 0, or no room on its disk)"
        )
    try:
        found = published.listing()
    except OSError as error:
        return PublishedReply(refused=f"what is published cannot be listed: {error.strerror}")
    now = time.time()
    times = [(max(0.0, now - one.made / 1000), max(0.0, one.expires / 1000 - now)) for one in found]
    return PublishedReply(
        tuple([PublishedEntry(one.name, one.nbytes, *both) for one, both in zip(found, times, strict=True)])
    )


def remove(reader: WeightReader, request: RemoveWeights) -> RemoveWeightsReply:
    """Remove what an address names; the answer."""
    try:
        reader.remove(request.address)
    except WeightsUnavailable as error:
        return RemoveWeightsReply(str(error)[: limits.FAILURE_TEXT])
    return RemoveWeightsReply()
