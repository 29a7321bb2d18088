"""Counters of the device, and fault injection for tests."""

from __future__ import annotations

from typing import Literal, Self

import attrs
import torch

FaultKind = Literal["sticky", "hang", "slow", "out_of_memory"]


def counters() -> dict[str, int]:
    """Return the counters of this process by name. A missing name counts as 0.

    - `launches`, `graph_launches`, `ops_outside_graphs`: kernel launches.
    - `busy_ns`: simulated time in which the device ran kernels, without copies.
    - `copies_*` and `bytes_*` by direction: `host_to_device`, `pageable_to_device`, `device_to_host`,
      `device_to_pageable`, `within_device`, `between_devices`.
    - `synchronizations`, in total and by cause.
    - `host_allocations`, `pinned_bytes_peak`, `device_allocations`, `out_of_memory`: memory.
    - `missing_waits`, `misuses`: errors of the program.
    """
    return dict(torch.ops.fakegpu.counters())


def reset_counters() -> None:
    """Reset all counters to 0."""
    torch.ops.fakegpu.reset_counters()


@attrs.frozen
class Counted:
    """Context manager with the counters of its block, such as `counted["launches"]`."""

    before: dict[str, int] = attrs.field(factory=dict)

    def __enter__(self) -> Self:
        self.before.update(counters())
        return self

    def __exit__(self, *_: object) -> None:
        after = counters()
        for name in after.keys() | self.before.keys():
            self.before[name] = after.get(name, 0) - self.before.get(name, 0)

    def __getitem__(self, name: str) -> int:
        return self.before.get(name, 0)


def inject(kind: FaultKind, op: str = "", *, after: int = 0, seconds: float = 0.0) -> None:
    """Inject a fault into the next op whose name contains `op`, or into a later op.

    Args:
        kind: `sticky`: a device-side assert, after which every call fails until the process ends. `hang`: the op never
            ends. `slow`: the op takes `seconds` of simulated time longer. `out_of_memory`: the next allocation fails.
        op: part of the op's name, such as `aten::mm`. Copies are `an upload`, `a download` and `a copy between
            devices`.
        after: number of matching ops that run first.
        seconds: additional time, for `slow`.
    """
    torch.ops.fakegpu.inject(kind, op, after, seconds)


def failed_op() -> str:
    """Return the op at which a sticky error occurred, or an empty text. Exceptions do not name this op."""
    return str(torch.ops.fakegpu.failed_op())


def configure(**figures: float) -> None:
    """Change the simulated hardware.

    Args:
        **figures: rates per second: `flops`, `bandwidth`, `link` and `peer`. Seconds: `launch` and `issue`. `pace`:
            real seconds per simulated second; 0: waits take no time. `memory`: bytes. `queue`: maximum number of
            pending launches per stream before the host waits.
    """
    torch.ops.fakegpu.configure({name: float(value) for name, value in figures.items()})


def now() -> float:
    """Return the simulated time of the host in seconds."""
    return float(torch.ops.fakegpu.now())


def stream_time(stream: torch.Stream) -> float:
    """Return the simulated time at which all work issued to a stream is complete."""
    return float(torch.ops.fakegpu.stream_time(stream.device_index, stream.stream_id))
