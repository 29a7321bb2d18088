"""Reports of executors of the memory that a session can have."""

from __future__ import annotations

import attrs
import msgspec

from djinn_client.runtime.planning.run_pipeline import capabilities_of
from djinn_core.ir.costs import DeviceCapabilities
from djinn_core.wire.message_base import Failure
from djinn_core.wire.messages import DeviceInfo, Room
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.devices import OpenDevice
from djinn_server.memory.room import RoomReport

NO_MEMORY = Failure(0, 0, "aten::mm", "OutOfMemoryError", "there is none")
OTHER = Failure(0, 0, "aten::mm", "RuntimeError", "shapes differ")


@attrs.define
class Runtime:
    """A fake device with the memory that the test sets."""

    found: dict
    asked: int = 0

    def memory(self):
        self.asked += 1
        return self.found


def reports(**found):
    now = [0.0]
    runtime = Runtime({"total": 1000, "free": 600, "allocated": 0} | found)
    return RoomReport(runtime, lambda: now[0]), runtime, now


def test_first_report_has_free_and_held_memory():
    report, _, _ = reports()
    assert report.due(100, ()) == Room(700)


def test_reserved_memory_counts_as_free():
    report, _, _ = reports(reserved=300, allocated=100)
    assert report.due(100, ()) == Room(900)


def test_memory_is_polled_once_per_second():
    report, runtime, now = reports()
    report.due(100, ())
    runtime.found["free"] = 200
    assert report.due(100, [OTHER]) is None
    assert runtime.asked == 1
    now[0] = 1.5
    assert report.due(100, ()) == Room(300)
    now[0] = 3.0
    runtime.found["free"] = 190
    assert report.due(110, ()) is None  # another holds no more, and this session holds what was free
    assert runtime.asked == 3


def test_memory_shortage_is_reported_at_once():
    report, _, _ = reports()
    report.due(100, ())
    assert report.due(100, [OTHER, NO_MEMORY]) == Room(700, short=True)


def test_device_capabilities_reach_client():
    stated = DeviceCapabilities(
        "npu:0", "npu", dtypes=frozenset({"float32", "int64"}), unsupported=frozenset({"aten::sort", "aten::mm.out"})
    )
    info = msgspec.msgpack.decode(msgspec.msgpack.encode(OpenDevice(stated, CpuRuntime()).info()), type=DeviceInfo)
    known = capabilities_of(info)
    assert (known.dtypes, known.unsupported) == (stated.dtypes, stated.unsupported)
    assert not known.runs("aten::sort.stable")
    assert known.runs("aten::mm")
