"""Latency and bandwidth between this process and the devices of its session, measured on first request."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

import attrs
import torch

from djinn_client.runtime import client
from djinn_client.runtime.planning.run_pipeline import NOWHERE, topology_of
from djinn_client.tracebacks import for_users
from djinn_core.ir.costs import Link, NetworkTopology

CLIENT: Final = "client"
PINGS: Final = 7
BULK: Final = 4 << 20  # bytes that are sent and fetched
_NAME: Final = "remote_accelerator"


@for_users
def topology() -> NetworkTopology:
    """The devices behind the session, with the links there and back, and what submissions lately waited for their turn.

    Where there are several, the links between them are those that plans count on now. Connects if need be. Links are measured
    at the first call in a session, with a few empty submissions and 4 MiB each way; on a link slower than 1 MB/s that takes
    seconds.

    Raises:
        DjinnError: nothing can be reached, or the session was lost.
    """
    client.init()
    session = client.session_name()
    known = client.pool_topology() or topology_of(client.device() or NOWHERE)
    if client.context.links[0] != session:
        client.context.links = session, _links_to(known)
    devices = tuple(attrs.evolve(device, queue=client.queue_seconds()) for device in known.devices)
    return NetworkTopology(devices, (*client.context.links[1], *known.links))


def _links_to(known: NetworkTopology) -> tuple[Link, ...]:
    first = 0 if len(known.devices) == 1 else 1  # index 0 of a pool is none of its devices
    pairs = (measure_links(device.id, f"{_NAME}:{i}") for i, device in enumerate(known.devices, first))
    return tuple(link for pair in pairs for link in pair)


def measure_links(device: str, name: str) -> tuple[Link, Link]:
    """The link to a device of the open session, which PyTorch calls `name`, and the one back, by ordinary submissions."""
    probe = torch.zeros((), device=name)
    probe.item()
    latency = min(_seconds(probe.item) for _ in range(PINGS))
    up, down = (min(pair) for pair in zip(_there_and_back(name), _there_and_back(name), strict=True))
    return Link(CLIENT, device, _rate(up, latency), latency / 2), Link(
        device, CLIENT, _rate(down, latency), latency / 2
    )


def _there_and_back(name: str) -> tuple[float, float]:
    """Seconds to upload new bytes, which no server has seen and no coding makes smaller, and to fetch them."""
    data = torch.frombuffer(bytearray(os.urandom(BULK)), dtype=torch.uint8)
    started = time.perf_counter()
    remote = data.to(name)
    remote[-1].item()
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
