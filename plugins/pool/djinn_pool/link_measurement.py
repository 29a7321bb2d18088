"""Measure latency and bandwidth between this process and the devices of its session, on first request."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

import attrs
import torch

from djinn_client.interception.native.install import hide_frames_of
from djinn_client.runtime import client
from djinn_client.runtime.context import context
from djinn_client.runtime.planning.constraints import limits_of
from djinn_client.runtime.planning.run_pipeline import NOWHERE, topology_of
from djinn_client.tracebacks import for_users
from djinn_core.errors import DoesNotFit
from djinn_core.ir.costs import Link, NetworkTopology

hide_frames_of(__name__)
CLIENT: Final = "client"
PINGS: Final = 7
BULK: Final = 4 << 20  # bytes to send and fetch if they fit on the device
_MIN_BYTES: Final = 1 << 12  # minimum bytes to send, even above a memory limit
_PART: Final = 8  # a measurement uses at most 1 / _PART of a memory limit
_NAME: Final = "remote_accelerator"
_links: dict[str, tuple[Link, ...]] = {}  # links to the devices, by name of the session


@for_users
def topology() -> NetworkTopology:
    """Return the session's devices, their links, and the average queueing time of submissions (`queue`, in seconds).

    If no session is open, one is opened. Links between devices have the speeds that plans use now. Links to this process
    are measured at the first call in a session, with empty submissions and at most 4 MiB each way. On a link slower than
    1 MB/s, this takes seconds.

    Raises:
        DjinnError: no device can be reached, or the session was lost.
    """
    client.init()
    session = client.session_name()
    assert context.session is not None
    cluster = context.session.router.topology() or topology_of(client.device() or NOWHERE)
    if session not in _links:
        links = _links_to(cluster)
        _links.clear()
        _links[session] = links
    devices = tuple(attrs.evolve(device, queue=queue_seconds()) for device in cluster.devices)
    return NetworkTopology(devices, (*_links[session], *cluster.links))


def queue_seconds() -> float:
    """Return the average seconds that submissions have waited for the device since `djinn.reset_stats()`."""
    return context.stats.server_queue_us / 1e6 / max(1, context.stats.submissions)


def _links_to(topology: NetworkTopology) -> tuple[Link, ...]:
    first = 0 if len(topology.devices) == 1 else 1  # index 0 of a pool stands for all of its devices
    limits = limits_of(client.settings(), [device.id for device in topology.devices])
    sizes = {device: max(_MIN_BYTES, min(BULK, limit // _PART)) for device, limit in limits.items()}
    pairs = (
        measure_links(device.id, f"{_NAME}:{i}", sizes.get(device.id, BULK))
        for i, device in enumerate(topology.devices, first)
    )
    return tuple(link for pair in pairs for link in pair)


def measure_links(device: str, name: str, nbytes: int = BULK) -> tuple[Link, Link]:
    """Measure and return the links from this process to a device and back, by ordinary submissions.

    Args:
        device: id of the device in the links.
        name: the device's name in PyTorch, such as `remote_accelerator:0`.
        nbytes: bytes to send. If they do not fit on the device, fewer bytes are sent.

    Raises:
        DoesNotFit: the device has less than 4 KiB of free memory.
    """
    probe = torch.zeros((), device=name)
    probe.item()
    latency = min(_seconds(probe.item) for _ in range(PINGS))
    try:
        trips = _there_and_back(name, nbytes), _there_and_back(name, nbytes)
    except DoesNotFit:
        if nbytes <= _MIN_BYTES:
            raise
        return measure_links(device, name, max(_MIN_BYTES, nbytes // _PART))
    up, down = (nbytes / max(min(pair) - latency, min(pair) / 4) for pair in zip(*trips, strict=True))
    return Link(CLIENT, device, up, latency / 2), Link(device, CLIENT, down, latency / 2)


def _there_and_back(name: str, nbytes: int) -> tuple[float, float]:
    """Return the seconds to upload and to fetch `nbytes` random bytes, which cannot be cached or compressed."""
    data = torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8)
    start = time.perf_counter()
    remote = data.to(name)
    remote[-1].item()
    upload_end = time.perf_counter()
    remote.cpu()
    return upload_end - start, time.perf_counter() - upload_end


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
