"""The path from this process to the device behind its session: latency and bandwidth, measured when somebody first asks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

import attrs
import torch

from djinn_core.ir.costs import Link, NetworkTopology
from djinn_core.runtime import client
from djinn_core.runtime.planning import NOWHERE, topology_of

CLIENT: Final = "client"
PINGS: Final = 7
BULK: Final = 4 << 20  # bytes that are sent and fetched
_DEVICE: Final = "remote_accelerator:0"
_measured: tuple[object, tuple[Link, ...]] = (None, ())


def topology() -> NetworkTopology:
    """The device behind the session, with the links there and back, and what submissions lately waited for their turn.

    Connects if need be. Links are measured at the first call in a session, with a few empty submissions and 4 MiB each way;
    behind a server that is slower than 1 MB/s that takes seconds.

    Raises:
        DjinnError: nothing can be reached, or the session was lost.
    """
    global _measured
    client.init()
    session = client.session_name()
    if _measured[0] != session:
        _measured = (session, measure_links())
    known = topology_of(client.device() or NOWHERE)
    device = attrs.evolve(known.devices[0], queue=client.queue_seconds())
    return NetworkTopology((device,), _measured[1])


def measure_links() -> tuple[Link, Link]:
    """The link to the device of the open session, and the one back, by ordinary submissions."""
    client.synchronize()
    latency = min(_seconds(client.synchronize) for _ in range(PINGS))
    up, down = (min(pair) for pair in zip(_there_and_back(), _there_and_back(), strict=True))
    device = (client.device() or NOWHERE).id
    return Link(CLIENT, device, _rate(up, latency), latency / 2), Link(
        device, CLIENT, _rate(down, latency), latency / 2
    )


def _there_and_back() -> tuple[float, float]:
    """Seconds to upload new bytes, which no server has seen and no coding makes smaller, and to fetch them."""
    data = torch.frombuffer(bytearray(os.urandom(BULK)), dtype=torch.uint8)
    started = time.perf_counter()
    remote = data.to(_DEVICE)
    client.synchronize()
    uploaded = time.perf_counter()
    remote.cpu()
    return uploaded - started, time.perf_counter() - uploaded


def _rate(seconds: float, latency: float) -> float:
    """Bytes a second, of a transfer that took a round trip besides."""
    return BULK / max(seconds - latency, seconds / 4)


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
