"""Cluster files: descriptions of devices and links, to plan for hardware that is not present."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

import msgspec

from djinn_core.errors import ConfigurationError
from djinn_core.ir.costs import CLIENT, EVERYWHERE, DeviceCapabilities, Link, NetworkTopology

_GIGA = 1e9
_GIB = 1 << 30


class Wire(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A kind of network link in a cluster file.

    Attributes:
        gbs: gigabytes a second in each direction.
        us: latency in microseconds.
    """

    gbs: float
    us: float = 0.0


class Machines(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Machines of one model, in a cluster file.

    Attributes:
        name: prefix of the machines' names, such as `a` for machines `a0` and `a1`.
        devices: devices per machine, connected by `link`; a machine with one device needs no `link`.
        memory_gib: memory per device in GiB.
        tflops: peak arithmetic throughput per device, in 10^12 operations a second.
        gbs: memory bandwidth per device, in gigabytes a second.
        count: number of machines.
        rack: machines per rack; 0: one rack.
        kind: kind of device.
        dtypes: dtypes that the devices support; empty: all.
    """

    name: str
    devices: int
    memory_gib: float
    tflops: float
    gbs: float
    link: Wire | None = None
    count: int = 1
    rack: int = 0
    kind: str = "cuda"
    dtypes: tuple[str, ...] = ()


class Cluster(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A cluster file.

    Attributes:
        machines: the machines, by model.
        network: links between machines of different racks.
        rack: links between machines of one rack. None means as `network`.
        client: links between the client and every device.
    """

    machines: tuple[Machines, ...]
    network: Wire
    rack: Wire | None = None
    client: Wire = Wire(1.0, 1000.0)


def read_cluster(text: str, source: str = "the cluster file") -> NetworkTopology:
    """Return the devices and links of a cluster file.

    Raises:
        ConfigurationError: the file is not TOML, or a field is missing, unknown or of the wrong type; the message names the field.
    """
    try:
        cluster = msgspec.convert(tomllib.loads(text), Cluster, strict=False)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"{source} does not describe a cluster: {error} (example: docs/planning.md)") from None
    devices: list[DeviceCapabilities] = []
    links: list[Link] = []
    for machines in cluster.machines:
        _check_machines(machines, source)
        devices += _devices(machines)
        links += _inner_links(cluster, machines)
    if len({d.id for d in devices}) < len(devices):
        raise ConfigurationError(f"{source} has two machine types with one name; give each its own name")
    links += _both_ways(EVERYWHERE, EVERYWHERE, cluster.network) + _both_ways(CLIENT, EVERYWHERE, cluster.client)
    return NetworkTopology(tuple(devices), tuple(links))


def _check_machines(machines: Machines, source: str) -> None:
    numbers = (machines.devices, machines.count, machines.memory_gib, machines.tflops, machines.gbs)
    linked = machines.devices == 1 if machines.link is None else machines.link.gbs > 0
    if min(numbers) <= 0 or not linked or "/" in machines.name or not machines.name:
        raise ConfigurationError(
            f"{source}: machines {machines.name!r} need a name without '/', and values above 0 of devices, count, "
            "memory_gib, tflops, gbs and link.gbs"
        )


def _groups(machines: Machines) -> Iterator[tuple[str, str]]:
    """Yield each machine's name, and its device group: a path of rack and name."""
    for number in range(machines.count):
        rack = number // machines.rack if machines.rack else 0
        name = f"{machines.name}{number}"
        yield name, f"{machines.name}-rack{rack}/{name}"


def _devices(machines: Machines) -> list[DeviceCapabilities]:
    memory = int(machines.memory_gib * _GIB)
    return [
        DeviceCapabilities(
            id=f"{name}/{machines.kind}:{index}",
            kind=machines.kind,
            name=f"simulated {machines.name}",
            memory=memory,
            memory_free=memory,
            flops=machines.tflops * 1e12,
            bandwidth=machines.gbs * _GIGA,
            dtypes=frozenset(machines.dtypes),
            group=group,
        )
        for name, group in _groups(machines)
        for index in range(machines.devices)
    ]


def _inner_links(cluster: Cluster, machines: Machines) -> list[Link]:
    groups = [group for _, group in _groups(machines)]
    links = [link for group in groups if machines.link for link in _both_ways(group, group, machines.link)]
    for rack in dict.fromkeys(group.rpartition("/")[0] for group in groups):
        links += _both_ways(rack, rack, cluster.rack or cluster.network)
    return links


def _both_ways(source: str, target: str, wire: Wire) -> list[Link]:
    forward = Link(source, target, wire.gbs * _GIGA, wire.us * 1e-6)
    return [forward] if source == target else [forward, Link(target, source, forward.bandwidth, forward.latency)]
