"""`djinn_register_weight_formats`: how files with weights are laid out: the tensors, and how each is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from attrs.validators import instance_of, optional

from djinn_core.hookspecs import hookspec, weight_sources
from djinn_core.ir.checked_fields import mapping_of, tuple_of


class Decoding(Protocol):
    """Makes a tensor's contents from bytes of the file that are not these contents one after another."""

    def read_into(self, file: weight_sources.WeightFile, first: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes) with the contents of the contiguous tensor from byte `first` on.

        Raises:
            OSError: the file cannot be read.
        """


@attrs.frozen
class HeaderEntry:
    """A tensor in a file.

    Attributes:
        dtype: of what is read; None: it cannot be read.
        shape: its sizes.
        start: the byte of the file where its contents begin, if there is no `decoding`.
        size: bytes of its contents as they are read.
        stored_as: the format's name for what it is stored as, where it cannot be read.
        decoding: how its contents are made from the file; None: they lie in it as they are.
    """

    dtype: torch.dtype | None = attrs.field(validator=optional(instance_of(torch.dtype)))
    shape: tuple[int, ...] = attrs.field(validator=tuple_of(int))
    start: int = attrs.field(validator=instance_of(int))
    size: int = attrs.field(validator=instance_of(int))
    stored_as: str = attrs.field(default="", validator=instance_of(str))
    decoding: Decoding | None = None

    def read_into(self, file: weight_sources.WeightFile, first: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes) with the contents of the contiguous tensor from byte `first` on.

        Raises:
            OSError: the file cannot be read.
        """
        if self.decoding is None:
            file.read_into(self.start + first, buffer)
        else:
            self.decoding.read_into(file, first, buffer)


@attrs.frozen
class FileHeader:
    """Contents of a header.

    Attributes:
        tensors: entries by name, in the order of the file.
        metadata: texts that the file says of itself.
    """

    tensors: dict[str, HeaderEntry] = attrs.field(validator=mapping_of(str, HeaderEntry))
    metadata: dict[str, str] = attrs.field(validator=mapping_of(str, str))


@runtime_checkable
class WeightFormat(Protocol):
    """Reads the headers of files of one format.

    Attributes:
        name: unique among formats, such as `gguf`.
        suffixes: how the names of such files end, each with its dot.
        whole: names of the one file to read of a folder that has others with the same suffix, which are no weights.
    """

    name: str
    suffixes: tuple[str, ...]
    whole: tuple[str, ...]

    def read_header(self, file: weight_sources.WeightFile) -> FileHeader:
        """Read and check the header of a file. Files come from strangers: nothing in one is run, and what it says is bounded.

        Raises:
            OSError: it cannot be read.
            ValueError: it is malformed.
        """


@hookspec
def djinn_register_weight_formats(settings: Any) -> Iterable[WeightFormat]:
    """Return the formats of files with weights that this plugin reads.

    Called once in each executor process. safetensors is built in. The end of a file's name says its format; of two plugins with one
    ending the second is refused. Of a folder with files of several formats the built-in one counts, then the first by name. An
    exception disables the plugin. Since API version 1.
    """
    del settings
    raise NotImplementedError
