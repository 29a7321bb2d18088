"""Checkpoints of `torch.save`: a zip archive with a pickle of tensor names and layouts, and a record for each storage.

No code in the pickle runs (`pickled.py`). Records are uncompressed, so each has an offset in the file.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import attrs

from djinn.hooks import FileHeader, HeaderEntry, WeightFile
from djinn.weights import read_bytes
from djinn_weights.checkpoints.pickled import PickledTensor, pickled_tensors
from djinn_weights.checkpoints.strided import StridedElements, overlaps_itself, span_of

DIRECTORY_LIMIT: Final = 8 << 20  # maximum bytes of the archive's directory: about 70,000 records
PICKLE_LIMIT: Final = 32 << 20  # in bytes
READERS: Final = 8  # threads that look up the offsets of records; over a network each look-up is a round trip
_LOCAL_HEADER: Final = struct.Struct(
    "<4s22xHH"
)  # header of a record: a signature, and the lengths of its name and extra field
_ENCRYPTED: Final = 0x1
_OLD_FORMAT: Final = (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", b"\x80\x02\x8a\nl")


def read_pytorch(file: WeightFile) -> FileHeader:
    """Read the header of a checkpoint: names, layouts and offsets of its tensors.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a zip archive of `torch.save`, or has unsupported contents.
    """
    archive = _archive(file)
    tensors = _read_tensors(file, archive)
    keys = dict.fromkeys(tensor.storage.key for tensor in tensors.values())
    ranges = _record_ranges(file, {key: archive.record(f"data/{key}") for key in keys})
    return FileHeader(
        {name: _entry(name, pickled, *ranges[pickled.storage.key]) for name, pickled in tensors.items()},
        {"format": "pt"},
    )


@attrs.frozen
class _Archive:
    """Directory of a checkpoint's archive. `records`: entries by name, without the name of their common folder."""

    records: dict[str, zipfile.ZipInfo]

    def record(self, name: str) -> zipfile.ZipInfo:
        """Return the entry of a record.

        Raises:
            ValueError: the record is missing, compressed or encrypted.
        """
        record = self.records.get(name)
        if record is None:
            raise ValueError(f"the archive has no record {name[:200]!r}")
        if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
            raise ValueError(f"the record {name[:200]!r} is compressed: save it with torch.save")
        if record.flag_bits & _ENCRYPTED:
            raise ValueError(f"the record {name[:200]!r} is encrypted: save it with torch.save")
        return record


def _archive(file: WeightFile) -> _Archive:
    first_bytes = read_bytes(file, 0, min(file.size, 16))
    if first_bytes.startswith(_OLD_FORMAT):
        raise ValueError(
            f"{file.name!r} has the format that PyTorch wrote before version 1.6: load and save it again with torch, or convert it to safetensors"
        )
    if not first_bytes.startswith(b"PK"):
        raise ValueError(f"{file.name!r} is not a checkpoint of torch.save")
    seekable = _Seekable(file)
    try:
        entries = zipfile.ZipFile(seekable).infolist()
    except (zipfile.BadZipFile, NotImplementedError, struct.error, OverflowError, IndexError) as error:
        if seekable.failure is not None:
            raise seekable.failure from error
        raise ValueError(f"the archive is malformed: {error}") from error
    names = [entry.filename for entry in entries]
    if len(set(names)) != len(names):
        raise ValueError("the archive has two records of the same name")
    folders = [name.removesuffix("data.pkl") for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(folders) != 1:
        raise ValueError("the archive does not have exactly one data.pkl: save it with torch.save")
    records = {
        entry.filename.removeprefix(folders[0]): entry for entry in entries if entry.filename.startswith(folders[0])
    }
    if "constants.pkl" in records or any(name.startswith("code/") for name in records):
        raise ValueError(f"{file.name!r} is a TorchScript program: save its state_dict(), or convert it to safetensors")
    return _Archive(records)


def _read_tensors(file: WeightFile, archive: _Archive) -> dict[str, PickledTensor]:
    order = archive.records.get("byteorder")
    if order is not None and _read_all(file, archive.record("byteorder"), 16) != b"little":
        raise ValueError("the file is not little-endian: load and save it again on a little-endian machine")
    return pickled_tensors(_read_all(file, archive.record("data.pkl"), PICKLE_LIMIT))


def _read_all(file: WeightFile, record: zipfile.ZipInfo, max_bytes: int) -> bytes:
    if record.file_size > max_bytes:
        raise ValueError(
            f"the record {record.filename[:200]!r} has {record.file_size:,} bytes; the limit is {max_bytes:,}"
        )
    start, size = _record_range(file, record)
    data = read_bytes(file, start, size)
    if zlib.crc32(data) != record.CRC:
        raise ValueError(f"the record {record.filename[:200]!r} is damaged")
    return data


def _record_ranges(file: WeightFile, records: dict[str, zipfile.ZipInfo]) -> dict[str, tuple[int, int]]:
    """Return the offset in the file and the size, in bytes, of each record.

    Raises:
        ValueError: two records overlap, or a record exceeds the file.
    """
    with ThreadPoolExecutor(READERS, "djinn-archive") as readers:
        ranges = list(readers.map(partial(_record_range, file), records.values()))
    end = 0
    for record, (start, size) in sorted(
        zip(records.values(), ranges, strict=True), key=lambda item: item[0].header_offset
    ):
        if record.header_offset < end:
            raise ValueError(f"the record {record.filename[:200]!r} overlaps another")
        end = start + size
    return dict(zip(records, ranges, strict=True))


def _record_range(file: WeightFile, record: zipfile.ZipInfo) -> tuple[int, int]:
    header_start = record.header_offset
    if not 0 <= header_start <= file.size - _LOCAL_HEADER.size:
        raise ValueError(f"the record {record.filename[:200]!r} is outside of the archive")
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(read_bytes(file, header_start, _LOCAL_HEADER.size))
    start = header_start + _LOCAL_HEADER.size + name_length + extra_length
    if signature != b"PK\3\4" or record.file_size > file.size - start:
        raise ValueError(f"the record {record.filename[:200]!r} is outside of the archive")
    return start, record.file_size


def _entry(name: str, tensor: PickledTensor, start: int, size: int) -> HeaderEntry:
    """Return the header entry of a tensor.

    `start`, `size`: offset of its storage in the file, and the storage's size, in bytes.

    Raises:
        ValueError: the tensor exceeds its storage.
    """
    dtype, shape, itemsize = tensor.dtype, tensor.shape, tensor.dtype.itemsize
    if tensor.storage.size > size:
        raise ValueError(f"the storage of the tensor {name!r} has {size} bytes, not {tensor.storage.size}")
    first, nbytes = start + tensor.offset * itemsize, math.prod(shape) * itemsize
    if not nbytes:
        return HeaderEntry(dtype, shape, start, 0)
    if (tensor.offset + span_of(shape, tensor.strides)) * itemsize > tensor.storage.size:
        raise ValueError(f"the tensor {name!r} reaches beyond its storage")
    if _is_contiguous(shape, tensor.strides):
        return HeaderEntry(dtype, shape, first, nbytes)
    if overlaps_itself(shape, tensor.strides):
        raise ValueError(f"elements of the tensor {name!r} share memory (an expanded tensor): save a clone of it")
    return HeaderEntry(dtype, shape, first, nbytes, decoding=StridedElements(first, dtype, shape, tensor.strides))


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    stride_expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != stride_expected:
            return False
        stride_expected *= size
    return True


class _Seekable(io.RawIOBase):
    """File object over a weight file, with which `zipfile` reads the directory of an archive.

    Attributes:
        failure: the last read error, or None. It is kept here, because `zipfile` hides read errors.
    """

    def __init__(self, file: WeightFile) -> None:
        super().__init__()
        self._file = file
        self._position = 0
        self._bytes_left = DIRECTORY_LIMIT
        self.failure: OSError | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        if base + offset < 0:
            raise ValueError("the archive is malformed: it has a negative offset")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        remaining = max(0, self._file.size - self._position)
        count = remaining if size is None or size < 0 else min(size, remaining)
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise ValueError(f"the directory of the archive has more than {DIRECTORY_LIMIT:,} bytes")
        try:
            data = read_bytes(self._file, self._position, count)
        except OSError as error:
            self.failure = error
            raise
        self._position += count
        return data
