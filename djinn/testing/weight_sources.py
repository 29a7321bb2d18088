"""Conformance suite for weight sources."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath

import pytest
import torch

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_core.errors import WeightsUnavailable
from djinn_server.hookspecs.weight_sources import WeightFile, WeightPermissions, WeightSource
from djinn_server.weights.permitted_places import open_permitted
from djinn_server.weights.shared_weights import WeightKey
from djinn_server.weights.weight_reader import WeightReader

_HEADER = b'{"weight":{"dtype":"I32","shape":[4096],"data_offsets":[0,16384]}}'
_TENSOR = torch.arange(4096, dtype=torch.int32)
SAMPLE_FILE = len(_HEADER).to_bytes(8, "little") + _HEADER + _TENSOR.numpy().tobytes()
"""Bytes of a safetensors file with one tensor, `weight`: the integers from 0 to 4095."""

_MISSING = "-missing"
__all__ = ["SAMPLE_FILE", "WeightSourceConformance", "open_permitted"]
Place = Callable[[bytes], tuple[str, WeightPermissions]]


class WeightSourceConformance(Ending):
    """Tests that every weight source must pass. Subclass this class and define the fixtures `source` and `place`."""

    @pytest.fixture
    def source(self) -> WeightSource:
        """Return the weight source under test."""
        return missing(self, "source", "your weight source")  # type: ignore[return-value]

    @pytest.fixture
    def place(self) -> Place:
        """Return a function that stores the bytes of a file where the source can read them.

        The function returns the address of the file, and permissions to read it.
        """
        return missing(self, "place", "a function that stores bytes, and returns their address and permissions")  # type: ignore[return-value]

    def test_weight_source_has_every_member(self, source: WeightSource) -> None:
        """The source has all attributes and methods of `WeightSource`, and its name is a URL scheme."""
        require_protocol(source, "weight_sources")
        assert source.name.islower(), "`name` must be the URL scheme of the addresses, in lower case"

    def test_every_range_can_be_read(self, source: WeightSource, place: Place) -> None:
        """Any range of bytes can be read in any order, by several threads at the same time.

        The version does not change.
        """
        file = _open_file(source, *place(SAMPLE_FILE))
        assert file.size == len(SAMPLE_FILE)
        before = file.version()
        parts = [(start, min(1000, file.size - start)) for start in range(0, file.size, 1000)]
        with ThreadPoolExecutor(4) as threads:
            parts_read = list(threads.map(lambda part: _bytes(file, *part), reversed(parts)))
        assert b"".join(reversed(parts_read)) == SAMPLE_FILE
        assert _bytes(file, 5, 0) == b""
        assert file.version() == before

    def test_a_mapping_has_every_byte(self, source: WeightSource, place: Place) -> None:
        """A memory mapping has the bytes of the file. A write to the mapping does not change the file."""
        file = _open_file(source, *place(SAMPLE_FILE))
        with contextlib.suppress(OSError):
            buffer = file.map()
            if buffer is None:
                return
            mapping = memoryview(buffer).cast("B")
            assert bytes(mapping) == SAMPLE_FILE
            mapping[-1] ^= 1
            assert _bytes(file, 0, file.size) == SAMPLE_FILE

    def test_reads_beyond_the_end_fail(self, source: WeightSource, place: Place) -> None:
        """A read beyond the end raises `OSError` instead of returning fewer bytes."""
        file = _open_file(source, *place(SAMPLE_FILE))
        with pytest.raises(OSError):
            _bytes(file, file.size - 1, 2)

    def test_nothing_is_read_without_permission(self, source: WeightSource, place: Place) -> None:
        """Without permissions, no file can be read, and errors do not show which files exist."""
        address, _ = place(SAMPLE_FILE)
        messages = []
        end = PurePosixPath(address).suffix  # which alone says the format
        for wrong_address in (address, address.removesuffix(end) + _MISSING + end):
            with pytest.raises(WeightsUnavailable) as raised:
                open_permitted(source, wrong_address, WeightPermissions())
            messages.append(str(raised.value).replace(_MISSING, ""))
        assert messages[0] == messages[1], (
            "`places` must not reveal which files exist: it runs before the permission check"
        )

    def test_missing_file_is_unavailable(self, source: WeightSource, place: Place) -> None:
        """A missing file raises `WeightsUnavailable`, and not another error of the source."""
        address, permissions = place(SAMPLE_FILE)
        with pytest.raises(WeightsUnavailable):
            open_permitted(source, address + _MISSING, permissions)

    def test_executor_finds_the_tensors(self, source: WeightSource, place: Place) -> None:
        """An executor opens the address of a file and finds the tensors in it."""
        address, permissions = place(SAMPLE_FILE)
        reader = WeightReader([source], permissions)
        file = reader.open(address)
        assert list(file.tensors) == ["weight"]
        part = reader.read(address, WeightKey(file.version, "weight", 400, 40)).result(60)
        assert part.view(torch.int32).tolist() == list(range(100, 110))


def _open_file(source: WeightSource, address: str, permissions: WeightPermissions) -> WeightFile:
    (file,) = open_permitted(source, address, permissions)
    return file


def _bytes(file: WeightFile, start: int, size: int) -> bytes:
    data = bytearray(size)
    file.read_into(start, memoryview(data))
    return bytes(data)
