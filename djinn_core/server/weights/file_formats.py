"""Choice of those files of a folder that count: by the formats of plugins, and by an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from djinn_core.hookspecs.weight_formats import FileHeader, WeightFormat, read_bytes
from djinn_core.hookspecs.weights import INDEX, WeightFile

INDEX_LIMIT: Final = 64 << 20  # bytes of an index


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_index: msgspec.json.Decoder[_Index] = msgspec.json.Decoder(_Index)


def suffixes_of(formats: Sequence[WeightFormat]) -> tuple[str, ...]:
    """Ends of the names of files with weights, and of their indexes."""
    return (*(suffix for one in formats for suffix in one.suffixes), INDEX)


def read_headers(
    files: Sequence[WeightFile], formats: Sequence[WeightFormat]
) -> list[tuple[WeightFile, str, FileHeader]]:
    """Those of the files that count, with their versions and headers. Of files of several formats the first one counts.

    Raises:
        OSError: a file cannot be read.
        ValueError: none has weights, or one is malformed.
    """
    for form in formats:
        counted = _counted(form, files)
        if counted:
            return [(file, file.version(), form.read_header(file)) for file in counted]
    known = ", ".join(suffix for form in formats for suffix in form.suffixes)
    raise ValueError(
        f"there is no file with weights of a format in use ({known}); packages in plugins/weight_formats of Djinn's repository read others"
    )


def _counted(form: WeightFormat, files: Sequence[WeightFile]) -> list[WeightFile]:
    """Those of the files that are read: where there is one index, those that it names; empty if none has this format.

    Raises:
        OSError: the index cannot be read.
        ValueError: it is malformed or names files that are not there, or it is not clear which file to read.
    """
    found = [file for file in files if file.name.endswith(form.suffixes)]
    named = [file for file in files if file.name.endswith(tuple(suffix + INDEX for suffix in form.suffixes))]
    if len(named) == 1 and not any(file.name == named[0].name.removesuffix(INDEX) for file in found):
        shards = _shards(named[0])
        found = [file for file in found if file.name in shards]
        if missing := shards.difference(file.name for file in found):
            raise ValueError(f"its index names {min(missing)!r}, which is not there")
        return found
    if form.whole and len(found) > 1:
        found = [file for file in found if file.name in form.whole]
        if len(found) != 1:
            raise ValueError(f"it has several files that may be {form.name}: name one of them")
    return found


def _shards(index: WeightFile) -> frozenset[str]:
    if index.size > INDEX_LIMIT:
        raise ValueError("its index is too long")
    return frozenset(_index.decode(read_bytes(index, 0, index.size)).weight_map.values())
