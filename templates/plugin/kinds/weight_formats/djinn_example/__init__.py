"""A weight format for Djinn: the length of a header, the header in JSON, the tensors."""

from __future__ import annotations

import json
import math

import torch

from djinn.hooks import FileHeader, HeaderEntry, WeightFile, WeightFormat, hookimpl
from djinn.weights import MOST_DIMENSIONS, MOST_TENSORS, read_bytes

djinn_api_version = 1

LENGTH = 8  # bytes of the number that a file begins with
LONGEST = 1 << 20  # bytes of a header
DTYPES = {"float32": torch.float32, "float16": torch.float16, "int32": torch.int32}


class ExampleFormat:
    """Reads files that end in `.example`. Nothing in one is run, and what it says is bounded."""

    name = "example"
    suffixes: tuple[str, ...] = (".example",)
    whole: tuple[str, ...] = ()

    def read_header(self, file: WeightFile) -> FileHeader:
        """The place of each tensor. `json` raises `ValueError` for what is no JSON."""
        length = int.from_bytes(read_bytes(file, 0, LENGTH), "little")
        if length > LONGEST:
            raise ValueError(f"its header has {length:,} bytes; {LONGEST:,} are the limit")
        found = json.loads(read_bytes(file, LENGTH, length).decode())
        if not isinstance(found, dict) or len(found) > MOST_TENSORS:
            raise ValueError("its header is no table of tensors, or has too many")
        return FileHeader({name: _entry(name, said, file.size) for name, said in found.items()}, {})


def _entry(name: str, said: object, end: int) -> HeaderEntry:
    """A tensor, as `{"dtype": "float32", "shape": [2, 3], "start": 100}` says it."""
    if not isinstance(said, dict) or said.get("dtype") not in DTYPES:
        raise ValueError(f"its tensor {name!r} has no dtype that is known")
    shape, start = said.get("shape"), said.get("start")
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS or not isinstance(start, int):
        raise ValueError(f"its tensor {name!r} has no shape or no place")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"its tensor {name!r} has sizes that are none")
    dtype = DTYPES[said["dtype"]]
    nbytes = math.prod(shape) * dtype.itemsize
    if start < 0 or start + nbytes > end:
        raise ValueError(f"its tensor {name!r} does not lie in it")
    return HeaderEntry(dtype, tuple(shape), start, nbytes)


@hookimpl
def djinn_register_weight_formats() -> list[WeightFormat]:
    """The weight formats that this plugin reads."""
    return [ExampleFormat()]
