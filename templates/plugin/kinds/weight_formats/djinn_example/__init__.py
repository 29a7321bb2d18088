"""A weight format for Djinn: eight bytes with the length of a header, the header in JSON, the tensors."""

from typing import Literal

import msgspec
import torch

from djinn.hooks import FileHeader, HeaderEntry, WeightFile, WeightFormat, hookimpl
from djinn.weights import read_bytes

djinn_api_version = "2.0"

# The header maps a tensor's name to its dtype, its shape, and its offset in the file in bytes.
Stored = tuple[Literal["float32", "float16", "int32"], tuple[int, ...], int]


class ExampleFormat(WeightFormat):
    """Read files that end in `.example`. The executor checks that the tensors lie in the file."""

    name = "example"
    suffixes = (".example",)

    def read_header(self, file: WeightFile) -> FileHeader:
        """Decode the header. For a malformed header, `msgspec` raises a `ValueError`."""
        length = int.from_bytes(read_bytes(file, 0, 8), "little")
        stored = msgspec.json.decode(read_bytes(file, 8, length), type=dict[str, Stored])
        return FileHeader({name: HeaderEntry(getattr(torch, one[0]), *one[1:]) for name, one in stored.items()})


@hookimpl
def djinn_register_weight_formats() -> list[WeightFormat]:
    """Return the weight formats of this plugin."""
    return [ExampleFormat()]
