"""Transfer of the large buffers of one connection over UCX."""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

import attrs

from djinn.errors import TransportError
from djinn.hooks import get_logger
from djinn_core.system.tcp import READABLE, poller
from djinn_ucx.endpoints import open_endpoint, open_worker
from djinn_ucx.library import library
from djinn_ucx.opening import Offer

_SPIN_SECONDS: Final = 0.0003  # seconds of busy polling before a thread sleeps until an event
_NAP_SECONDS: Final = 0.005  # maximum sleep: another thread may have consumed the event that would wake this one
_QUIET_SECONDS: Final = 1.0  # seconds for which a closed channel still receives and discards messages
_LOST_SECONDS: Final = 3.0  # seconds after which a closed channel stops waiting for an expected message
_STRANDED_SECONDS: Final = 60.0  # seconds after which a message that cannot be sent completely is given up
_MAX_STRANDED: Final = 8
_MESSAGES: Final = 1 << 16  # number of different tags
log = get_logger("djinn.ucx")


class StrandedChannels:
    """Counts the channels of this process whose memory and file descriptors UCX cannot release.

    From `_MAX_STRANDED` such channels on, new connections do not use UCX.
    """

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    @property
    def full(self) -> bool:
        """Return True if the limit is reached, so that UCX is disabled."""
        return self._count >= _MAX_STRANDED

    def add(self) -> None:
        """Count one more channel."""
        with self._lock:
            self._count += 1
            count = self._count
        log.warning("UCX cannot release the resources of a broken connection", connections=count, most=_MAX_STRANDED)


@attrs.define(eq=False)
class Message:
    """A pending transfer of one buffer. Both fields are None after the channel's close.

    Attributes:
        request: ucxx's request.
        memory: the buffer, which must exist until the transfer is complete.
    """

    request: Any
    memory: Any

    @property
    def complete(self) -> bool:
        """Return True if UCX no longer accesses the memory."""
        request = self.request
        return request is None or bool(request.completed)


class BulkChannel:
    """Sends and receives the large buffers of one connection. Thread-safe.

    Each channel has its own UCX worker. So its resources are freed with the connection, and a broken connection does not
    affect other connections. UCX cannot cancel a message that the other end never receives, and such a message would keep
    the worker alive. So each end receives and discards messages after its close.

    Attributes:
        offer: address and tag that the other end needs to send to this channel.
    """

    def __init__(self, local: bool, stranded: StrandedChannels) -> None:
        """Create a UCX worker.

        Args:
            local: True if the other end is on this machine. UCX then listens on the loopback interface only.
            stranded: counter of channels that cannot be released.

        Raises:
            TransportError: UCX is not installed, or cannot be used.
        """
        self._api = api = library()
        self._stranded = stranded
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._endpoint: Any = None
        self._sent_messages: list[Message] = []
        self._awaited: list[Message] = []
        self._all: weakref.WeakSet[Message] = weakref.WeakSet()
        self._random = secrets.randbits(48) << 16
        self._next_in = self._next_out = 0
        self._peer_tag = 0
        try:
            self._context, self._worker = open_worker(api, local)
            address = api.UCXAddress.create_from_worker(self._worker).tobytes()
        except Exception as error:
            raise TransportError(f"UCX cannot be used: {error}") from error
        self.offer = Offer(address, self._random.to_bytes(8, "little"))

    def __del__(self) -> None:
        # In a forked child, the destructors would send messages in the parent's name.
        if self.__dict__.get("_process", 0) not in {0, os.getpid()}:
            for resource in (self._context, self._worker, self._endpoint, *self._sent_messages, *self._awaited):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(resource))

    def connect(self, offer: Offer) -> None:
        """Connect to the worker that made `offer`. The caller has tested its address with `AddressTrials`.

        Raises:
            TransportError: UCX has no route to the worker.
        """
        with self._lock:
            self._check()
            try:
                self._endpoint = open_endpoint(self._api, self._worker, offer.address)
            except Exception as error:
                raise TransportError(f"UCX cannot reach the peer: {error}") from error
            self._peer_tag = int.from_bytes(offer.tag, "little")

    def send(self, memory: memoryview | bytes) -> Message:
        """Start to send a message. `memory` must not change until the message is complete."""
        from ucxx._lib.arr import Array

        with self._lock:
            self._check()
            tag = self._api.UCXXTag(self._peer_tag | self._next_out)
            self._next_out = (self._next_out + 1) % _MESSAGES
            message = Message(self._endpoint.tag_send(Array(memory), tag), memory)
            self._sent_messages = [earlier for earlier in self._sent_messages if not earlier.complete]
            self._sent_messages.append(message)
            self._all.add(message)
            return message

    def receive(self, memory: memoryview | bytearray) -> Message:
        """Start to receive the next message into `memory`, which must have the length of the message."""
        from ucxx._lib.arr import Array

        with self._lock:
            self._check()
            tag = self._api.UCXXTag(self._random | self._next_in)
            self._next_in = (self._next_in + 1) % _MESSAGES
            message = Message(self._worker.tag_recv(Array(memory), tag), memory)
            self._awaited = [earlier for earlier in self._awaited if not earlier.complete]
            self._awaited.append(message)
            self._all.add(message)
            return message

    def wait(self, message: Message, check: Callable[[], None], deadline: float | None = None) -> bool:
        """Wait until `message` is complete. Return False if `deadline` passes before (`time.monotonic`).

        `check`: called periodically during the wait. If it raises, `wait` raises its exception.

        Raises:
            TransportError: the channel was closed, or the message failed.
        """
        last_progress = time.monotonic()
        while not message.complete:
            if self._progress():
                last_progress = time.monotonic()
                continue
            now = time.monotonic()
            if now - last_progress < _SPIN_SECONDS or message.complete:
                continue
            check()
            if deadline is not None and now >= deadline:
                return False
            self._sleep(_NAP_SECONDS if deadline is None else min(_NAP_SECONDS, deadline - now))
        reason = _failure(message)
        if reason:
            raise TransportError(reason)
        return True

    def close(self) -> None:
        """Stop sending and receiving. A thread completes pending messages and frees all resources."""
        with self._lock:
            if self._closed or self._process != os.getpid():
                return
            self._closed = True
        threading.Thread(target=self._close_out, name="djinn-ucx-close", daemon=True).start()

    def _check(self) -> None:
        if self._closed:
            raise TransportError("the connection was closed at this end")

    def _progress(self) -> bool:
        with self._lock:
            self._check()
            return self._progress_once()

    def _progress_once(self) -> bool:
        if self._worker.progress_once():
            return True
        self._worker.progress()  # frees resources of failed endpoints
        return False

    def _sleep(self, seconds: float) -> None:
        poll = poller()  # two threads cannot share one
        with self._lock:
            self._check()
            poll.register(self._worker.epoll_file_descriptor, READABLE)
            armed = self._worker.arm()
        if armed:
            poll.poll(seconds * 1000)

    def _close_out(self) -> None:
        quiet = begun = time.monotonic()
        while True:
            now = time.monotonic()
            if self._progress_once() or self._discard_unexpected():
                quiet = now
            is_lost = now - quiet >= _LOST_SECONDS
            waiting = _unfinished(self._sent_messages) or (not is_lost and _unfinished(self._awaited))
            if now - quiet >= _QUIET_SECONDS and not waiting:
                break
            if now - begun >= _STRANDED_SECONDS:
                break
            time.sleep(_NAP_SECONDS)
        try:
            self._give_back()
        except Exception as error:
            log.warning("UCX failed to close a connection", error=str(error))

    def _discard_unexpected(self) -> bool:
        """Discard an arrived message that no `receive` expects, without reading its bytes. Return True if one had arrived."""
        from ucxx._lib.arr import Array

        tags = self._api.UCXXTag(self._random)
        probe = self._worker.tag_probe(
            tags, tag_mask=self._api.UCXXTagMask(~(_MESSAGES - 1) & (1 << 64) - 1), remove=True
        )
        if not probe.matched:
            return False
        nothing = bytearray(1)
        self._awaited.append(Message(self._worker.tag_recv_with_handle(Array(nothing), probe), nothing))
        return True

    def _give_back(self) -> None:
        if _unfinished(self._sent_messages):
            self._stranded.add()
        if self._endpoint is not None and self._endpoint.alive:
            self._endpoint.close_blocking()
        with suppress(Exception):
            self._progress_once()
        # Requests refer to the endpoint, which refers to the worker. Tracebacks of exceptions may refer to messages.
        for message in self._all:
            message.request = message.memory = None
        self._sent_messages, self._awaited = [], []
        self._endpoint = self._worker = self._context = None


def _failure(message: Message) -> str:
    """Return why a message failed, or an empty string if it succeeded.

    The result is no exception, because its traceback would keep the request and its worker alive.
    """
    request = message.request
    if request is None:
        return "the connection was closed at this end"
    try:
        request.check_error()
    except Exception as error:
        return f"UCX: {error}"
    return ""


def _unfinished(messages: Iterable[Message]) -> bool:
    return any(not message.complete for message in messages)
