"""Transports whose listening end is in a separate process, which is controlled over another connection."""

from __future__ import annotations

import gc
import multiprocessing
import queue
import threading
import weakref
from itertools import count
from multiprocessing.managers import BaseManager

import psutil

from djinn.hooks import Connection, Frame, Listener, Transport


def usage():
    """Return the number of open files of this process, and its memory in MiB."""
    gc.collect()  # the server of `multiprocessing` keeps exceptions that it returned in a reference cycle with a frame, and thus the sent data
    process = psutil.Process()
    return process.num_fds(), process.memory_info().rss >> 20


class OtherProcess:
    """The listeners in the other process, and their accepted connections."""

    def __init__(self, make):
        self._transport = make()
        self._listeners, self._connections, self._over = {}, {}, {}
        self._accepted = queue.Queue()
        self._numbers = count()

    def listen(self, url, limits):
        number = next(self._numbers)
        listener = self._listeners[number] = self._transport.listen(url, limits, lambda one: self._accept(number, one))
        return number, listener.url

    def _accept(self, listener, connection):
        number = next(self._numbers)
        self._connections[number] = connection
        over = self._over[number] = threading.Event()
        self._accepted.put((listener, number, connection.peer))
        over.wait()

    def next_accepted(self):
        return self._accepted.get(timeout=1.0)

    def close_listener(self, number):
        self._listeners[number].close()

    def end(self, number):
        self._over.pop(number).set()

    def forget(self, number):
        del self._connections[number]

    def send(self, number, head, body):
        self._connections[number].send(Frame(head, body))

    def receive(self, number, timeout):
        frame = self._connections[number].receive(timeout)
        return frame.head, [bytes(buffer) for buffer in frame.body]

    def close(self, number):
        self._connections[number].close()

    def get(self, number, name):
        return getattr(self._connections[number], name)

    def usage(self):
        return usage()

    def limit(self, number, limits):
        self._connections[number].limits = limits


class Manager(BaseManager):
    pass


Manager.register("OtherProcess", OtherProcess)


class RemoteEnd(Connection):
    """A `Connection` in the other process."""

    peer = ""

    def __init__(self, other, number, peer):
        self._other, self._number, self.peer = other, number, peer

    def send(self, frame):
        self._other.send(self._number, frame.head, [bytes(buffer) for buffer in frame.body])

    def receive(self, timeout=None):
        head, body = self._other.receive(self._number, timeout)
        return Frame(head, [memoryview(bytearray(buffer)) for buffer in body])

    def close(self):
        self._other.close(self._number)

    limits = property(
        lambda self: self._other.get(self._number, "limits"),
        lambda self, limits: self._other.limit(self._number, limits),
    )
    bytes_sent = property(lambda self: self._other.get(self._number, "bytes_sent"))
    bytes_received = property(lambda self: self._other.get(self._number, "bytes_received"))
    buffered_bytes = property(lambda self: self._other.get(self._number, "buffered_bytes"))


class RemoteListener(Listener):
    def __init__(self, other, number, url):
        self._other, self._number, self.url = other, number, url

    def close(self):
        self._other.close_listener(self._number)


class TwoProcesses(Transport):
    """A transport like that of `make`, an importable function. `close` ends the other process."""

    def __init__(self, make):
        self._own = own = make()
        self.name, self.schemes, self.capabilities = own.name, own.schemes, own.capabilities
        self._manager = Manager(ctx=multiprocessing.get_context("spawn"))
        self._manager.start()
        self._other = self._manager.OtherProcess(make)
        self._accepts = {}
        self._unused = queue.SimpleQueue()  # numbers of connections that tests have dropped
        self._closing = threading.Event()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def connect(self, url, limits, timeout):
        return self._own.connect(url, limits, timeout)

    def listen(self, url, limits, accept):
        number, actual = self._other.listen(url, limits)
        self._accepts[number] = accept
        return RemoteListener(self._other, number, actual)

    def _accept(self):
        while not self._closing.is_set():
            while not self._unused.empty():
                self._other.forget(self._unused.get())
            try:
                listener, number, peer = self._other.next_accepted()
            except queue.Empty:
                continue
            threading.Thread(target=self._serve, args=(listener, number, peer), daemon=True).start()

    def _serve(self, listener, number, peer):
        end = RemoteEnd(self._other, number, peer)
        weakref.finalize(end, self._unused.put, number)
        try:
            self._accepts[listener](end)
        except Exception:  # as in a listener, an error affects one connection only
            pass
        finally:
            self._other.close(number)
            self._other.end(number)

    def usage(self):
        """Return open files and memory of both processes."""
        return usage(), self._other.usage()

    def close(self):
        self._closing.set()
        self._accepting.join()
        self._manager.shutdown()
