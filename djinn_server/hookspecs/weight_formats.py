"""`djinn_register_weight_formats`: add formats of weight files."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import attrs
import torch
from attrs.validators import instance_of, optional

from djinn_core.hookspecs import hookspec
from djinn_core.ir.checked_fields import mapping_of, tuple_of
from djinn_server.hookspecs.weight_sources import WeightFile


class Decoding(ABC):
    """Decode a tensor that a file stores quantized or strided. Several threads of an executor call it at the same time."""

    @abstractmethod
    def read_into(self, file: WeightFile, first: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes of the contiguous, decoded tensor, beginning at byte `first`.

        Raises:
            OSError: the file cannot be read.
        """


@attrs.frozen
class HeaderEntry:
    """A tensor in a file.

    Attributes:
        dtype: dtype of the tensor that the executor reads; None: this format cannot read the tensor.
        shape: sizes of its dimensions.
        start: byte of the file at which the contents of the tensor begin, if there is no `decoding`.
        size: bytes of the tensor that the executor reads. Default: the size of a contiguous tensor.
        stored_as: the format's name for the stored type, if `dtype` is None.
        decoding: decodes an encoded or strided tensor; None: the bytes are contiguous in the file at `start`.
    """

    dtype: torch.dtype | None = attrs.field(validator=optional(instance_of(torch.dtype)))
    shape: tuple[int, ...] = attrs.field(validator=tuple_of(int))
    start: int = attrs.field(validator=instance_of(int))
    size: int = attrs.field(validator=instance_of(int))

    @size.default
    def _size(self) -> int:
        return 0 if self.dtype is None else math.prod(self.shape) * self.dtype.itemsize

    stored_as: str = attrs.field(default="", validator=instance_of(str))
    decoding: Decoding | None = attrs.field(default=None, validator=optional(instance_of(Decoding)))  # type: ignore[type-abstract]

    def read_into(self, file: WeightFile, first: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes) with bytes of the contiguous tensor, beginning at byte `first`.

        Raises:
            OSError: the file cannot be read.
        """
        if self.decoding is None:
            file.read_into(self.start + first, buffer)
        else:
            self.decoding.read_into(file, first, buffer)


@attrs.frozen
class FileHeader:
    """Content of a file header. The executor refuses tensors that lie outside of the file.

    Attributes:
        tensors: entries by tensor name, in the order of the file.
        metadata: other strings in the header, which clients receive.
    """

    tensors: dict[str, HeaderEntry] = attrs.field(validator=mapping_of(str, HeaderEntry))
    metadata: dict[str, str] = attrs.field(factory=dict, validator=mapping_of(str, str))


class WeightFormat(ABC):
    """Read the headers of weight files of one format, in an executor process. Threads may call it at the same time.

    Attributes:
        name: unique among formats, such as `gguf`.
        suffixes: file name suffixes in lower case, with the dot.
        whole: file names of complete models. If a folder has several files with these suffixes, only a file with such a
            name is read. Empty: all files are read, as shards of one model.
    """

    name: str
    suffixes: tuple[str, ...]
    whole: tuple[str, ...] = ()

    @abstractmethod
    def read_header(self, file: WeightFile) -> FileHeader:
        """Read and check the header of a file.

        Files are not trusted: execute nothing in a file, and bound each size that it states. `djinn.weights` has
        `read_bytes`, `refuse_overlaps` and limits of names, dimensions and tensors. The executor logs any other exception
        and tells the client only its type.

        Raises:
            OSError: the file cannot be read.
            ValueError: the header is malformed.
        """


@hookspec
def djinn_register_weight_formats(settings: Any) -> Iterable[WeightFormat]:
    """Return the formats of files with weights that this plugin reads.

    Called once in each executor process. safetensors is built in. The file name's suffix selects the format. If two
    plugins have the same suffix, the second plugin is refused. If a folder has files of several formats, the built-in
    format is used, then the first by name. An exception disables the plugin.
    """
    del settings
    raise NotImplementedError
