"""Large buffers of one connection over UCX."""

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

_SPIN_SECONDS: Final = 0.0003  # of progress without effect, after which a thread sleeps until something happens
_NAP_SECONDS: Final = 0.005  # at most: another thread may have taken the event that would have woken this one
_QUIET_SECONDS: Final = 1.0  # for which a closed channel still takes in and throws away what the other end sends
_LOST_SECONDS: Final = 3.0  # after which a message that was awaited is not awaited any more
_STRANDED_SECONDS: Final = 60.0  # after which a message that cannot be sent to its end is given up
_MOST_STRANDED: Final = 8
_MESSAGES: Final = 1 << 16  # of different tags
log = get_logger("djinn.ucx")


class StrandedChannels:
    """Number of channels of this process whose memory and file descriptors UCX keeps. There are `_MOST_STRANDED` at most: then UCX is not used any more."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    @property
    def full(self) -> bool:
        """True if UCX has kept so much that it is not used any more."""
        return self._count >= _MOST_STRANDED

    def add(self) -> None:
        """Count another one."""
        with self._lock:
            self._count += 1
            count = self._count
        log.warning("UCX keeps what belonged to a connection that broke", connections=count, most=_MOST_STRANDED)


@attrs.define(eq=False)
class Message:
    """A message under way: the request, and the memory that has to stay until it is complete. Both are None once its channel has closed."""

    request: Any
    memory: Any

    @property
    def complete(self) -> bool:
        """True if UCX does not touch the memory any more."""
        request = self.request
        return request is None or bool(request.completed)


class BulkChannel:
    """Sends and receives the large buffers of one connection.

    It has a UCX worker of its own, so that all that UCX keeps of a connection goes with it, and a connection that breaks in the middle
    of a message disturbs no other. What must not be left to UCX is a message that the other end never takes: it cannot be cancelled, and
    would keep the worker. So each end takes in what was sent to it after it has closed, too, and throws it away. Methods may be called
    by any thread.
    """

    def __init__(self, local: bool, stranded: StrandedChannels) -> None:
        """`local`: the other end is on this machine, and UCX need not listen at other interfaces.

        Raises:
            TransportError: UCX is not installed, or cannot be used.
        """
        self._api = api = library()
        self._stranded = stranded
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._endpoint: Any = None
        self._sent: list[Message] = []
        self._awaited: list[Message] = []
        self._all: weakref.WeakSet[Message] = weakref.WeakSet()
        self._random = secrets.randbits(48) << 16
        self._next_in = self._next_out = 0
        self._theirs = 0
        try:
            self._context, self._worker = open_worker(api, local)
            address = api.UCXAddress.create_from_worker(self._worker).tobytes()
        except Exception as error:
            raise TransportError(f"UCX cannot be used: {error}") from error
        self.offer = Offer(address, self._random.to_bytes(8, "little"))

    def __del__(self) -> None:
        # The destructors of a forked child would speak for its parent.
        if self.__dict__.get("_process", 0) not in {0, os.getpid()}:
            for kept in (self._context, self._worker, self._endpoint, *self._sent, *self._awaited):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def connect(self, offer: Offer) -> None:
        """Send to the worker of that offer from now on. Its address was tried in another process (`AddressTrials`).

        Raises:
            TransportError: UCX finds no way to it.
        """
        with self._lock:
            self._check()
            try:
                self._endpoint = open_endpoint(self._api, self._worker, offer.address)
            except Exception as error:
                raise TransportError(f"UCX finds no way to the other end: {error}") from error
            self._theirs = int.from_bytes(offer.tag, "little")

    def send(self, memory: memoryview | bytes) -> Message:
        """Begin to send the next message. Its memory must not change before it is complete."""
        from ucxx._lib.arr import Array

        with self._lock:
            self._check()
            tag = self._api.UCXXTag(self._theirs | self._next_out)
            self._next_out = (self._next_out + 1) % _MESSAGES
            message = Message(self._endpoint.tag_send(Array(memory), tag), memory)
            self._sent = [one for one in self._sent if not one.complete]
            self._sent.append(message)
            self._all.add(message)
            return message

    def receive(self, memory: memoryview | bytearray) -> Message:
        """Begin to receive the next message, which has the length of `memory`."""
        from ucxx._lib.arr import Array

        with self._lock:
            self._check()
            tag = self._api.UCXXTag(self._random | self._next_in)
            self._next_in = (self._next_in + 1) % _MESSAGES
            message = Message(self._worker.tag_recv(Array(memory), tag), memory)
            self._awaited = [one for one in self._awaited if not one.complete]
            self._awaited.append(message)
            self._all.add(message)
            return message

    def wait(self, message: Message, look: Callable[[], None], deadline: float | None = None) -> bool:
        """Wait until `message` is complete; False when `deadline` of `time.monotonic()` passed first.

        `look` is called while nothing happens; an exception of its ends the wait.

        Raises:
            TransportError: the channel was closed, or the message failed.
        """
        moved = time.monotonic()
        while not message.complete:
            if self._progress():
                moved = time.monotonic()
                continue
            now = time.monotonic()
            if now - moved < _SPIN_SECONDS or message.complete:
                continue
            look()
            if deadline is not None and now >= deadline:
                return False
            self._sleep(_NAP_SECONDS if deadline is None else min(_NAP_SECONDS, deadline - now))
        reason = _failure(message)
        if reason:
            raise TransportError(reason)
        return True

    def close(self) -> None:
        """Send and receive nothing more. What is under way is brought to its end by a thread, which then gives all back."""
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
        self._worker.progress()  # alone takes back what belongs to endpoints that failed
        return False

    def _sleep(self, seconds: float) -> None:
        poll = poller()  # two threads may not use one at a time
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
            if self._progress_once() or self._throw_away():
                quiet = now
            lost = now - quiet >= _LOST_SECONDS
            waiting = _unfinished(self._sent) or (not lost and _unfinished(self._awaited))
            if now - quiet >= _QUIET_SECONDS and not waiting:
                break
            if now - begun >= _STRANDED_SECONDS:
                break
            time.sleep(_NAP_SECONDS)
        try:
            self._give_back()
        except Exception as error:
            log.warning("UCX cannot close a connection", error=str(error))

    def _throw_away(self) -> bool:
        """Take a message that is not waited for; True if there was one. Its sender learns that it was taken, and its bytes are not fetched."""
        from ucxx._lib.arr import Array

        tags = self._api.UCXXTag(self._random)
        found = self._worker.tag_probe(
            tags, tag_mask=self._api.UCXXTagMask(~(_MESSAGES - 1) & (1 << 64) - 1), remove=True
        )
        if not found.matched:
            return False
        nothing = bytearray(1)
        self._awaited.append(Message(self._worker.tag_recv_with_handle(Array(nothing), found), nothing))
        return True

    def _give_back(self) -> None:
        if _unfinished(self._sent):
            self._stranded.add()
        if self._endpoint is not None and self._endpoint.alive:
            self._endpoint.close_blocking()
        with suppress(Exception):
            self._progress_once()
        # Requests keep the endpoint, which keeps the worker, and tracebacks of exceptions may keep messages.
        for message in self._all:
            message.request = message.memory = None
        self._sent, self._awaited = [], []
        self._endpoint = self._worker = self._context = None


def _failure(message: Message) -> str:
    """Return why a complete message failed, or an empty text.

    An exception in place of the text would keep the request and its worker alive by its traceback.
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
