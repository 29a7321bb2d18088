"""Replies to messages about weight addresses: open, save, remove, and list published names."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Final

import torch

from djinn_core.errors import DjinnError, WeightsUnavailable
from djinn_core.logs import get_logger
from djinn_core.wire import limits
from djinn_core.wire.binding_delta import unpack_handles
from djinn_core.wire.frames import Frame
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import encode
from djinn_core.wire.tensors import dtype_name
from djinn_core.wire.weight_messages import (
    OpenWeights,
    OpenWeightsReply,
    PublishedReply,
    RemoveWeights,
    RemoveWeightsReply,
    SaveWeights,
    SaveWeightsReply,
    SmallFile,
    SmallFilesReply,
    SmallFilesRequest,
    StoredTensorEntry,
)
from djinn_server.hookspecs.weight_formats import HeaderEntry
from djinn_server.hookspecs.weight_sources import NamingSource
from djinn_server.recovery.executor_channel import NO, YES, ExecutorChannel
from djinn_server.running.values import Poison, ValueTable
from djinn_server.session_machine import Cause, Wait
from djinn_server.weights.saving import DifferentContents, save
from djinn_server.weights.weight_reader import OpenedWeights, WeightReader

_log = get_logger("djinn.server")
ASK_SECONDS: Final = 0.25  # a waiting session renews its request for an opening after this time


def opening_reply(request: OpenWeights, future: Future[OpenedWeights], max_bytes: int) -> bytes:
    """Return the encoded reply to `OpenWeights`: the tensors at the address, or why they are refused.

    `future`: the finished opening. `max_bytes`: maximum size of the reply in bytes.
    """
    try:
        weights = future.result()
    except WeightsUnavailable as error:
        return encode(OpenWeightsReply(bytes(32), refused=str(error)[: limits.FAILURE_TEXT]))
    tensors = weights.tensors.items()
    entries = [StoredTensorEntry(name, _dtype_name(place.entry), place.entry.shape) for name, place in tensors]
    address = "" if weights.address == request.address else weights.address
    fields = weights.version, tuple(entries), tuple(weights.metadata.items())
    reply = encode(OpenWeightsReply(*fields, address=address))
    if len(reply) > max_bytes:
        text = f"the list of tensors at {request.address!r} has {len(reply):,} bytes; a reply has at most {max_bytes:,}"
        return encode(OpenWeightsReply(bytes(32), refused=text[: limits.FAILURE_TEXT]))
    return reply


def _dtype_name(entry: HeaderEntry) -> str:
    return entry.stored_as if entry.dtype is None else dtype_name(entry.dtype)


def small_files(reader: WeightReader, request: SmallFilesRequest) -> SmallFilesReply:
    """Return the reply to `SmallFilesRequest`: contents of files in a folder, or why they are refused."""
    try:
        return SmallFilesReply(
            tuple([SmallFile(name, content) for name, content in reader.small_files(request.address)])
        )
    except (WeightsUnavailable, OSError) as error:
        return SmallFilesReply(refused=str(error)[: limits.FAILURE_TEXT])


def list_published(published: NamingSource | None) -> PublishedReply:
    """Return the reply to `PublishedRequest`: the published names. `published` is None if the server publishes none."""
    if published is None:
        return PublishedReply(
            refused="this server does not publish weights (the package in plugins/weights is missing, its setting plugins.published.hours is 0, or no room on "
            "its disk)"
        )
    try:
        return PublishedReply(tuple(published.listing()))
    except OSError as error:
        return PublishedReply(refused=f"published weights cannot be listed: {error.strerror}")


def answer_once(connection: ExecutorChannel, do: Callable[[bool], Message]) -> None:
    """Call `do`, which changes files, and send its reply. In a recovered session, send the logged reply instead.

    The argument of `do` is True if an earlier executor died during the change and may have changed the files already.
    """
    first_decision: list[bytes | None] = []

    def begin(before: bytes | None) -> bytes:
        first_decision.append(before)
        return YES

    connection.journal.decide(begin)
    connection.send(
        Frame(connection.journal.decide(lambda before: before or encode(do(first_decision[0] is not None))))
    )


def remove(reader: WeightReader, request: RemoveWeights, again: bool = False) -> RemoveWeightsReply:
    """Remove the file at an address, and return the reply. `again`: True if a missing file counts as removed."""
    try:
        reader.remove(request.address)
    except WeightsUnavailable as error:
        if again and isinstance(error.__cause__, FileNotFoundError):
            return RemoveWeightsReply()
        return RemoveWeightsReply(str(error)[: limits.FAILURE_TEXT])
    except DjinnError:
        raise
    except Exception as error:
        _log.exception("a weight source failed to remove a file", address=request.address)
        return RemoveWeightsReply(
            f"{request.address!r} cannot be removed: {type(error).__name__}"[: limits.FAILURE_TEXT]
        )
    return RemoveWeightsReply()


def answer_opening(
    request: OpenWeights, weights: WeightReader, connection: ExecutorChannel, wakeup: Callable[[], None]
) -> Iterator[Wait]:
    """Send the tensors at an address, or the progress of its opening after `request.patience` seconds.

    Yield waits. A recovered session repeats the kind of reply in its log. `wakeup`: called when the opening ends.
    """
    opening = weights.openings.of(request.address)
    opening.future.add_done_callback(lambda _: wakeup())
    until = time.monotonic() + request.patience if request.patience else None
    before = connection.journal.decided() if request.patience else None
    while not opening.future.done() and before != NO:
        now = time.monotonic()
        if before is None and until is not None and now >= until:
            break
        soon = now + ASK_SECONDS if until is None or before is not None else min(until, now + ASK_SECONDS)
        yield Wait(((Cause.OPENING, 0),), soon, has_arrived=lambda _: opening.future.done())
        opening.last_request = time.monotonic()
    if request.patience:
        is_open = YES if opening.future.done() and before != NO else NO
        if connection.journal.decide(lambda before: before or is_open) == NO:
            reply = OpenWeightsReply(bytes(32), unfinished=True, done=opening.done, expected=opening.expected)
            connection.send(Frame(encode(reply)))
            return
    weights.openings.remove(request.address, opening)
    connection.send(Frame(opening_reply(request, opening.future, connection.limits.head)))


def save_values(
    request: SaveWeights,
    values: ValueTable,
    weights: WeightReader,
    deliver: Callable[[torch.Tensor], torch.Tensor],
    again: bool = False,
) -> SaveWeightsReply:
    """Save values to an address, and return the reply. If this fails, the reply has the reason.

    Args:
        request: the address, and the names and handles of the values.
        values: the session's values.
        weights: creates the file.
        deliver: copies a tensor to host memory.
        again: True if the file may be complete. Then an existing file with the same contents counts as saved.
    """
    handles = unpack_handles(request.handles)
    if len(handles) != len(request.names):
        return SaveWeightsReply(
            0, f"cannot save weights: {len(request.names)} names were sent for {len(handles)} values"
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, handle in zip(request.names, handles, strict=True):
        value = values[handle] if handle in values else None  # noqa: SIM401 - it has no `get`
        if isinstance(value, Poison):
            return SaveWeightsReply(0, f"the tensor {name!r} could not be computed", name)
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return SaveWeightsReply(0, f"{name!r} is not a dense tensor, so it cannot be saved")
        tensors[name] = value
    try:
        with torch.inference_mode():
            if again and (existing := weights.comparing_sink(request.address)) is not None:
                with contextlib.suppress(DifferentContents, OSError):
                    return SaveWeightsReply(save(tensors, dict(request.metadata), existing, deliver))
            create = partial(weights.create, request.address, seconds=request.seconds)
            return SaveWeightsReply(save(tensors, dict(request.metadata), create, deliver))
    except WeightsUnavailable as error:
        return SaveWeightsReply(0, str(error)[: limits.FAILURE_TEXT])
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        return SaveWeightsReply(0, f"{request.address!r} cannot be written: {error}"[: limits.FAILURE_TEXT])
    except DjinnError:
        raise
    except Exception as error:
        _log.exception("a weight source failed to save a file", address=request.address)
        reason = f"{request.address!r} cannot be written: {type(error).__name__}"
        return SaveWeightsReply(0, reason[: limits.FAILURE_TEXT])
