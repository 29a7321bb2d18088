"""Table of the formats that files with weights have, and the choice of those files of a folder that count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import attrs
import msgspec

from djinn_core.hookspecs.weights import WeightFile
from djinn_core.server.weights.formats.file_header import FileHeader, read_bytes
from djinn_core.server.weights.formats.gguf import read_gguf
from djinn_core.server.weights.formats.pytorch import read_pytorch
from djinn_core.server.weights.formats.safetensors import read_safetensors

INDEX: Final = ".index.json"
INDEX_LIMIT: Final = 64 << 20  # bytes of an index


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_index: msgspec.json.Decoder[_Index] = msgspec.json.Decoder(_Index)


@attrs.frozen
class FileFormat:
    """A format of files with weights.

    Attributes:
        name: as people call it.
        suffixes: how the names of such files end.
        read: the header of a file; it raises `OSError`, or `ValueError` for a file that is malformed.
        whole: names of the one file to read of a folder that has others with the same suffix, which are no weights.
    """

    name: str
    suffixes: tuple[str, ...]
    read: Callable[[WeightFile], FileHeader]
    whole: tuple[str, ...] = ()

    def counted(self, files: Sequence[WeightFile]) -> list[WeightFile]:
        """Those of the files that are read: where there is one index, those that it names; empty if none has this format.

        Raises:
            OSError: the index cannot be read.
            ValueError: it is malformed or names files that are not there, or it is not clear which file to read.
        """
        found = [file for file in files if file.name.endswith(self.suffixes)]
        named = [file for file in files if file.name.endswith(tuple(suffix + INDEX for suffix in self.suffixes))]
        if len(named) == 1 and not any(file.name == named[0].name.removesuffix(INDEX) for file in found):
            shards = _shards(named[0])
            found = [file for file in found if file.name in shards]
            if missing := shards.difference(file.name for file in found):
                raise ValueError(f"its index names {min(missing)!r}, which is not there")
            return found
        if self.whole and len(found) > 1:
            found = [file for file in found if file.name in self.whole]
            if len(found) != 1:
                raise ValueError(f"it has several files that may be {self.name}: name one of them")
        return found


FORMATS: Final = (
    FileFormat("safetensors files", (".safetensors",), read_safetensors),
    FileFormat(
        "PyTorch checkpoints",
        (".bin", ".pt", ".pth", ".ckpt"),
        read_pytorch,
        ("pytorch_model.bin", "diffusion_pytorch_model.bin", "adapter_model.bin"),
    ),
    FileFormat("GGUF files", (".gguf",), read_gguf),
)
"""Of a folder that has files of several formats the first one counts."""


def read_headers(files: Sequence[WeightFile]) -> list[tuple[WeightFile, str, FileHeader]]:
    """Those of the files that count, with their versions and headers.

    Raises:
        OSError: a file cannot be read.
        ValueError: none has weights, or one is malformed.
    """
    for kind in FORMATS:
        counted = kind.counted(files)
        if counted:
            return [(file, file.version(), kind.read(file)) for file in counted]
    known = ", ".join(suffix for kind in FORMATS for suffix in kind.suffixes)
    raise ValueError(f"there is no file with weights ({known})")


def _shards(index: WeightFile) -> frozenset[str]:
    if index.size > INDEX_LIMIT:
        raise ValueError("its index is too long")
    return frozenset(_index.decode(read_bytes(index, 0, index.size)).weight_map.values())
