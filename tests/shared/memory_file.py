"""A file with weights whose bytes are in memory, as `WeightFile`."""

from __future__ import annotations

from djinn_server.hookspecs.weight_sources import WeightFile


class MemoryFile(WeightFile):
    """A weight file in memory that counts its reads and their bytes."""

    def __init__(self, data, name="model.bin"):
        self.name, self.size, self.data, self.reads = name, len(data), data, []

    def version(self):
        return "1"

    def read_into(self, start, buffer):
        part = self.data[start : start + len(buffer)]
        if len(part) != len(buffer):
            raise OSError("beyond the end")
        self.reads.append(len(buffer))
        buffer[:] = part


def contents(file, entry, first=0, size=None):
    """Return the bytes of a tensor in a file."""
    data = bytearray(entry.size - first if size is None else size)
    entry.read_into(file, first, memoryview(data))
    return bytes(data)
