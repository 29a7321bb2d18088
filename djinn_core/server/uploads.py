"""Uploads: bytes that become values, in one part or many."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from djinn_core.errors import ProtocolError
from djinn_core.hookspecs.devices import DeviceRuntime
from djinn_core.hookspecs.transports import Buffer
from djinn_core.server.values import ValueTable
from djinn_core.wire.messages import Upload
from djinn_core.wire.tensors import dtype_from_name


@attrs.define
class _Partial:
    header: Upload
    data: torch.Tensor
    received: int


class Uploads:
    """Collects the parts of each upload; a complete one becomes a value."""

    def __init__(self, runtime: DeviceRuntime, values: ValueTable) -> None:
        self._runtime = runtime
        self._values = values
        self._partial: dict[int, _Partial] = {}

    def take(self, upload: Upload, body: Sequence[Buffer]) -> None:
        """Take one part.

        Raises:
            ProtocolError: it does not fit what came before, or its layout does not fit its size.
        """
        if len(body) != 1:
            raise ProtocolError(f"an upload carries one buffer, not {len(body)}")
        part = body[0]
        size = memoryview(part).nbytes
        if upload.start == 0:
            self._begin(upload, part, size)
            return
        partial = self._partial.get(upload.handle)
        if partial is None or partial.received != upload.start or upload.start + size > upload.size:
            raise ProtocolError(
                f"part of upload {upload.handle} at byte {upload.start} does not follow what came before"
            )
        partial.data[upload.start : upload.start + size] = torch.frombuffer(part, dtype=torch.uint8)
        partial.received += size
        if partial.received == upload.size:
            del self._partial[upload.handle]
            self._finish(partial.header, partial.data)

    def _begin(self, upload: Upload, part: Buffer, size: int) -> None:
        _check_layout(upload)
        if upload.handle in self._values or upload.handle in self._partial:
            raise ProtocolError(f"value {upload.handle} is uploaded twice")
        if size == upload.size:
            data = torch.frombuffer(part, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
            self._finish(upload, data)
        elif 0 < size < upload.size:
            data = torch.empty(upload.size, dtype=torch.uint8)
            data[:size] = torch.frombuffer(part, dtype=torch.uint8)
            self._partial[upload.handle] = _Partial(upload, data, size)
        else:
            raise ProtocolError(f"upload {upload.handle} announces {upload.size} bytes and brings {size}")

    def _finish(self, upload: Upload, data: torch.Tensor) -> None:
        with torch.inference_mode():
            placed = self._runtime.receive(data)
            typed = placed.view(dtype_from_name(upload.dtype))
            self._values[upload.handle] = typed.as_strided(upload.shape, upload.stride)


def _check_layout(upload: Upload) -> None:
    """Raises ProtocolError where shape and strides reach beyond the announced size."""
    if len(upload.shape) != len(upload.stride) or any(n < 0 for n in (*upload.shape, *upload.stride)):
        raise ProtocolError(f"upload {upload.handle} has an impossible layout")
    item = dtype_from_name(upload.dtype).itemsize
    last = sum((n - 1) * s for n, s in zip(upload.shape, upload.stride, strict=True))
    extent = 0 if 0 in upload.shape else (last + 1) * item
    if extent > upload.size or upload.size % item:
        raise ProtocolError(f"upload {upload.handle} needs {extent} bytes and announces {upload.size}")
