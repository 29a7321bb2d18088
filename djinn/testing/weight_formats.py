"""Conformance suite for weight formats."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import pytest
import torch

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_server.hookspecs.weight_formats import WeightFormat
from djinn_server.hookspecs.weight_sources import WeightFile
from djinn_server.weights.headers import check_header

MakeFile = Callable[[Mapping[str, torch.Tensor]], bytes]
_TENSORS = {
    "first": torch.arange(24, dtype=torch.float32).view(4, 6),
    "second": torch.arange(7, dtype=torch.int32),
    "third": torch.linspace(0, 1, 5).half(),
}


class _InMemory(WeightFile):
    """A weight file in memory."""

    def __init__(self, data: bytes, name: str) -> None:
        self.data, self.name, self.size = data, name, len(data)

    def version(self) -> str:
        """Return a constant text, because the contents never change."""
        return "1"

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of the file that start at position `start`."""
        part = self.data[start : start + len(buffer)]
        if start < 0 or len(part) != len(buffer):
            raise OSError("the read extends beyond the end of the file")
        buffer[:] = part


class WeightFormatConformance(Ending):
    """Tests that every weight format must pass. Subclass this class and define the fixtures `form` and `make_file`."""

    @pytest.fixture
    def form(self) -> WeightFormat:
        """Return the weight format under test."""
        return missing(self, "form", "your weight format")  # type: ignore[return-value]

    @pytest.fixture
    def make_file(self) -> MakeFile:
        """Return a function that encodes tensors, given by name, as the bytes of a file."""
        return missing(self, "make_file", "a function that makes the bytes of a file of tensors by name")  # type: ignore[return-value]

    def test_weight_format_has_every_member(self, form: WeightFormat) -> None:
        """The format has all attributes and methods of `WeightFormat`. Each suffix starts with a dot."""
        require_protocol(form, "weight_formats")
        assert form.suffixes, "`suffixes` is empty, so no file would have this format"
        assert all(suffix.startswith(".") and suffix.islower() for suffix in form.suffixes), "use suffixes like `.bin`"
        assert all(name.endswith(form.suffixes) for name in form.whole), (
            "each name in `whole` must end with one of `suffixes`"
        )

    def test_tensors_are_read_whole_and_in_parts(self, form: WeightFormat, make_file: MakeFile) -> None:
        """Names, dtypes, shapes and contents equal those of the encoded tensors, for whole tensors and for parts."""
        file = _InMemory(make_file(_TENSORS), f"model{form.suffixes[0]}")
        header = form.read_header(file)
        assert header.tensors.keys() == _TENSORS.keys()
        for name, tensor in _TENSORS.items():
            entry = header.tensors[name]
            assert (entry.dtype, entry.shape, entry.size) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
            contents = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            for first in (0, 1, entry.size - 1):
                part = bytearray(entry.size - first)
                entry.read_into(file, first, memoryview(part))
                assert bytes(part) == contents[first:], f"the bytes of {name} from byte {first} on differ"

    def test_damaged_files_raise_documented_errors(self, form: WeightFormat, make_file: MakeFile) -> None:
        """`read_header` raises only `ValueError` or `OSError` for damaged files.

        The executor itself checks that tensors lie within the file.
        """
        data = make_file(_TENSORS)
        for offset in range(0, len(data), 1 + len(data) // 100):
            for damaged in (data[:offset], data[:offset] + bytes([data[offset] ^ 0xFF]) + data[offset + 1 :]):
                self._read_or_refuse(form, _InMemory(damaged, f"model{form.suffixes[0]}"))

    @staticmethod
    def _read_or_refuse(form: WeightFormat, file: _InMemory) -> None:
        with contextlib.suppress(ValueError, OSError):
            check_header(file, form.read_header(file))
