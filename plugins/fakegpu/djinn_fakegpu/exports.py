"""Device memory that other processes of this user can open once per block.

A Unix socket sends the memory's file descriptor in exchange for a token.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch

from djinn_core.system.files import user_id
from djinn_core.system.tcp import unix_socket

_DESCRIPTION: Final = re.compile(rb"([0-9a-f]{32})/([0-9a-f]{32})")
_LOCATION: Final = struct.Struct("<QQi")  # offset and size in the file, and number of the device
_TIMEOUT_SECONDS: Final = 10.0  # seconds in which the other process must send its token, or this one the memory
_system: Any = socket  # typeshed lacks Linux-only functions on other systems


class Exports:
    """The exported memory of this process, and the thread that sends its file descriptors.

    The export of a tensor ends with the tensor.
    """

    def __init__(self) -> None:
        self._tensors: weakref.WeakValueDictionary[bytes, torch.Tensor] = weakref.WeakValueDictionary()
        self._name = secrets.token_hex(16).encode()
        listener = unix_socket()
        listener.bind(_address(self._name))
        listener.listen()
        threading.Thread(target=self._serve, args=(listener,), name="fakegpu-exports", daemon=True).start()

    def add(self, tensor: torch.Tensor) -> bytes:
        """Return a description with which one process of this user can open the memory of `tensor` once."""
        token = secrets.token_hex(16).encode()
        self._tensors[token] = tensor
        return self._name + b"/" + token

    def _serve(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(
                target=self._send_descriptor, args=(connection,), name="fakegpu-export", daemon=True
            ).start()

    def _send_descriptor(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(_TIMEOUT_SECONDS)
            tensor = self._tensors.pop(connection.recv(32, socket.MSG_WAITALL), None) if _is_own(connection) else None
            if tensor is None:
                return
            path, offset, nbytes = torch.ops.fakegpu.export_memory(tensor)
            file = os.open(path, os.O_RDWR)
            try:
                _system.send_fds(connection, [_LOCATION.pack(offset, nbytes, tensor.device.index)], [file])
            finally:
                os.close(file)
            connection.settimeout(None)
            connection.recv(1)  # returns once the process has copied the memory or ended; until then the tensor lives


@contextmanager
def open_exported(description: bytes) -> Iterator[torch.Tensor]:
    """Context manager with memory that another process exported, as a tensor of bytes.

    Raises:
        RuntimeError: the description is invalid or was used before, or the process has ended.
    """
    match = _DESCRIPTION.fullmatch(description)
    if match is None:
        raise RuntimeError("fakegpu: the description of exported memory is malformed")
    with unix_socket() as connection:
        connection.settimeout(_TIMEOUT_SECONDS)
        try:
            connection.connect(_address(match[1]))
            if not _is_own(connection):
                raise RuntimeError("fakegpu: the exported memory belongs to another user")
            connection.sendall(match[2])
            data, files, _, _ = _system.recv_fds(connection, _LOCATION.size, 1)
        except OSError as error:
            raise RuntimeError(f"fakegpu: exported memory cannot be opened: {error}") from error
        try:
            if len(data) != _LOCATION.size or len(files) != 1:
                raise RuntimeError("fakegpu: the memory is not exported, or has been opened already")
            offset, nbytes, index = _LOCATION.unpack(data)
            yield torch.ops.fakegpu.import_memory(f"/proc/self/fd/{files[0]}", offset, nbytes, index)
        finally:
            for file in files:
                os.close(file)


def _address(name: bytes) -> bytes:
    return b"\0djinn-fakegpu-" + name  # an abstract socket, which has no file


def _is_own(connection: socket.socket) -> bool:
    """Return True if the process at the other end belongs to this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, _system.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == user_id())
