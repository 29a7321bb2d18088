"""Read GGUF files on a server.

- `header`: names, types, shapes and offsets of the tensors. `quantized`: tensors of the type Q8_0, as float32.
"""

from __future__ import annotations

from djinn.hooks import FileHeader, WeightFile, WeightFormat, hookimpl
from djinn_weights.gguf.header import read_gguf

djinn_api_version = "2.0"


class Gguf(WeightFormat):
    """The weight format of GGUF files."""

    name = "gguf"
    suffixes = (".gguf",)

    def read_header(self, file: WeightFile) -> FileHeader:
        """Read and check the header of a file."""
        return read_gguf(file)


@hookimpl
def djinn_register_weight_formats() -> list[WeightFormat]:
    """Return the weight format `gguf`."""
    return [Gguf()]
