"""A weight format for Djinn: files that `numpy.savez` wrote, without compression."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import torch

from djinn.hooks import FileHeader, HeaderEntry, WeightFile, WeightFormat, hookimpl
from djinn.weights import read_bytes

djinn_api_version = 1

LARGEST = 64 << 20  # bytes of a file that is read whole for its header
_LOCAL_HEADER = 30  # bytes before the name of a member of the archive


class ExampleFormat:
    """Reads files that end in `.example`. Nothing in one is run, and what it says is bounded."""

    name = "example"
    suffixes: tuple[str, ...] = (".example",)
    whole: tuple[str, ...] = ()

    def read_header(self, file: WeightFile) -> FileHeader:
        """Where each tensor lies."""
        if file.size > LARGEST:
            raise ValueError(f"it has {file.size:,} bytes; {LARGEST:,} are the limit")
        data = read_bytes(file, 0, file.size)
        tensors = {}
        try:
            archive = zipfile.ZipFile(io.BytesIO(data))
            members = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError) as error:
            raise ValueError(f"it is no archive: {error}") from None
        for member in members:
            tensors[member.filename.removesuffix(".npy")] = _entry(data, member)
        return FileHeader(tensors, {})


def _entry(data: bytes, member: zipfile.ZipInfo) -> HeaderEntry:
    """Where the array of a member lies, which is not compressed."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed")
    fixed = data[member.header_offset : member.header_offset + _LOCAL_HEADER]
    if len(fixed) < _LOCAL_HEADER:
        raise ValueError("a member does not lie in it")
    names = int.from_bytes(fixed[26:28], "little") + int.from_bytes(fixed[28:30], "little")
    first = member.header_offset + _LOCAL_HEADER + names
    stream = io.BytesIO(data[first : first + member.file_size])
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_column, dtype = read(stream)
        array = torch.from_numpy(np.empty(0, dtype))
    except (SyntaxError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"a member is no array of numbers: {error}") from None
    start, size = first + stream.tell(), int(np.prod(shape, dtype=object)) * array.itemsize
    if by_column or not 0 <= size <= len(data) - start:
        raise ValueError("a tensor does not lie in it")
    return HeaderEntry(array.dtype, shape, start, size)


@hookimpl
def djinn_register_weight_formats() -> list[WeightFormat]:
    """The weight formats that this plugin reads."""
    return [ExampleFormat()]
