"""Links of a pool as they are now: what executors see of them, when they are measured again, and when plans are."""

from __future__ import annotations

import attrs
import pytest
import torch
from figures import figures

import djinn
from djinn.testing import plans_made
from djinn_core.ir.costs import DeviceCapabilities, Link
from djinn_core.wire.messages import Room
from djinn_core.wire.peer_messages import LinkMeasurement, MeasureLink
from djinn_pool import topology as present
from djinn_pool.topology import PoolTopology

REMOTE = "remote_accelerator:0"
MEGABYTE = 1 << 20


@attrs.define
class FakeRelay:
    """A fake relay of an executor that reports prepared link measurements."""

    seen: list = attrs.field(factory=list)
    told: list = attrs.field(factory=list)
    room: Room | None = None

    @property
    def has_news(self):
        return bool(self.seen) or self.room is not None

    def take_room(self):
        room, self.room = self.room, None
        return room

    def take_seen(self):
        seen, self.seen = self.seen, []
        return seen

    def send(self, message):
        self.told.append(message)


@pytest.fixture
def topology_of_two():
    """Return the topology of two executors with links of 1 GB/s and 1 ms, their relays, and a clock that can be set."""
    now = [1000.0]
    devices = [DeviceCapabilities(name, "cpu") for name in ("a", "b")]
    measured = [Link("a", "b", 1e9, 1e-3), Link("b", "a", 1e9, 1e-3)]
    members = [FakeRelay(), FakeRelay()]
    return PoolTopology(members, devices, measured, lambda: now[0]), members, now


def report_transfer(member, rate, peer=1):
    member.seen.append(LinkMeasurement(peer, True, MEGABYTE, MEGABYTE / rate))


def test_repeated_observations_update_link(topology_of_two):
    links, (_, second), now = topology_of_two
    now[0] += 10
    for _ in range(3):
        assert links.process_reports() == 0
        report_transfer(second, 1e8)
    assert links.process_reports() == 1
    assert links.topology.link("a", "b").bandwidth == pytest.approx(1e8)
    assert links.topology.link("b", "a").bandwidth == 1e9


@pytest.mark.parametrize("rates", [(1e9, 1e7, 1e9, 8e8, 1.2e9), (6e8, 7e8, 1.9e9, 5.5e8, 1e9)])
def test_single_outliers_do_not_update_link(topology_of_two, rates):
    links, (_, second), now = topology_of_two
    now[0] += 10
    for rate in rates:
        report_transfer(second, rate)
        assert links.process_reports() == 0


def test_link_change_is_held(topology_of_two):
    links, (_, second), now = topology_of_two
    for rate in (1e8, 1e9):
        now[0] += 10
        for _ in range(3):
            report_transfer(second, rate)
            links.process_reports()
    assert links.changes == 2
    for _ in range(3):
        report_transfer(second, 1e8)
        assert links.process_reports() == 2
    now[0] += 10
    report_transfer(second, 1e8)
    assert links.process_reports() == 3


def test_quiet_links_are_measured(topology_of_two):
    links, (first, second), now = topology_of_two
    now[0] += 1
    links.process_reports()
    assert first.told == second.told == []
    now[0] += present.QUIET
    report_transfer(second, 1e9)  # from the first executor
    links.process_reports()
    assert (first.told, second.told) == ([], [MeasureLink(1)])
    report_transfer(second, 1e8)
    now[0] += 1
    links.process_reports()
    now[0] += 1
    links.process_reports()
    assert first.told[0] == MeasureLink(2)


def test_latency_changes_update_link(topology_of_two):
    links, (first, _), now = topology_of_two
    now[0] += 10
    for _ in range(3):
        first.seen.append(LinkMeasurement(2, False, MEGABYTE, MEGABYTE / 1e9, 20e-3))
    assert links.process_reports() == 1
    assert links.topology.link("a", "b") == Link("a", "b", 1e9, 20e-3 + present.HANDLING)


def test_remeasured_link_keeps_identity(topology_of_two):
    links, (first, _), now = topology_of_two
    now[0] += 10
    for _ in range(3):
        first.seen.append(LinkMeasurement(2, False, MEGABYTE, MEGABYTE / 1e9, 5e-5))
    assert links.process_reports() == 0
    assert links.topology.link("a", "b") == Link("a", "b", 1e9, 1e-3)


def test_executors_report_transfer_times(round_robin_pool, monkeypatch):
    seen = []
    monkeypatch.setattr(present.ObservedLink, "record", lambda self, one, now: seen.append(one))
    large = torch.zeros(1 << 20).to(REMOTE)
    before = figures(round_robin_pool)["peer_bytes"]
    (large * 2 + large.exp() @ large).sum().item()
    small = torch.zeros(3).to(REMOTE)
    (small + 1).sum().item()
    assert any(one.incoming and one.nbytes >= 4 * MEGABYTE and one.seconds > 0 for one in seen)
    sent = figures(round_robin_pool)["peer_bytes"]
    assert sent > before
    for member, peer in zip(round_robin_pool.executors.members, (2, 1), strict=True):
        member.replies.send(MeasureLink(peer))
    while sum(one.latency is not None for one in seen) < 2:
        (small + 1).sum().item()
    assert all(one.seconds > 0 and one.latency > 0 for one in seen if one.latency is not None)
    assert figures(round_robin_pool)["peer_bytes"] - sent < MEGABYTE  # what measures is not counted


def test_link_change_replans_programs(round_robin_pool, monkeypatch):
    def step():
        return ((given * 3).exp() + given).sum().item()

    given = torch.ones(5).to(REMOTE)
    for _ in range(3):
        step()
    made = plans_made()
    step()
    assert plans_made() == made
    monkeypatch.setattr(round_robin_pool._links, "changes", round_robin_pool._links.changes + 1)
    step()
    assert plans_made() > made
    made = plans_made()
    step()
    assert plans_made() == made


def test_topology_measures_client_and_peer_links(round_robin_pool):
    found = djinn.topology()
    one, other = (device.id for device in found.devices)
    for source, target in ((one, other), (other, one), ("client", one), (other, "client")):
        link = found.link(source, target)
        assert 0 < link.latency < 1
        assert 1e6 < link.bandwidth < 1e12
    assert found.link(one, other) == round_robin_pool.topology().link(one, other)


@pytest.mark.parametrize("limit", ["1 MiB", "64 KiB"])
def test_links_of_small_devices_are_measured(make_pool, limit):
    with make_pool("round_robin", memory_limits={"0": limit}):
        found = djinn.topology()
        links = [
            found.link(*ends) for device in found.devices for ends in (("client", device.id), (device.id, "client"))
        ]
    assert all(1e4 < link.bandwidth < 1e12 for link in links)


@pytest.fixture
def topology_with_memory():
    """Return the topology of two executors with 1 GB each, their relays, and the reported device changes."""
    devices = [DeviceCapabilities(name, "cuda", memory_free=1000 * MEGABYTE) for name in ("a", "b")]
    members, told = [FakeRelay(), FakeRelay()], []
    links = PoolTopology(members, devices, [Link("a", "b", 1e9, 1e-3)])
    links.when_room_changed = told.append
    return links, members, told


def test_plans_use_last_reported_memory(topology_with_memory):
    links, (first, _), told = topology_with_memory
    first.room = Room(900 * MEGABYTE)
    assert links.process_reports() == 0  # the plans that there are hold
    assert links.topology.device("a").memory_free == 900 * MEGABYTE
    assert links.topology.device("b").memory_free == 1000 * MEGABYTE
    assert links.topology.link("a", "b").bandwidth == 1e9
    assert [device.memory_free for device in told[-1]] == [900 * MEGABYTE, 1000 * MEGABYTE]
    measured = [DeviceCapabilities(name, "cuda", memory_free=1000 * MEGABYTE, flops=1e9) for name in ("a", "b")]
    links.replace_devices(measured)  # they were calibrated, as they were when the session began
    assert links.topology.device("a") == attrs.evolve(measured[0], memory_free=900 * MEGABYTE)


def test_plans_are_renewed_after_large_memory_change(topology_with_memory):
    links, (_, second), _ = topology_with_memory
    second.room = Room(400 * MEGABYTE)
    assert links.process_reports() == 1
    second.room = Room(700 * MEGABYTE)
    assert links.process_reports() == 1
    second.room = Room(900 * MEGABYTE)
    assert links.process_reports() == 2


def test_plans_are_renewed_after_memory_shortage(topology_with_memory):
    links, (first, _), _ = topology_with_memory
    first.room = Room(990 * MEGABYTE, short=True)
    assert links.process_reports() == 0  # it wanted more than there ever was: another plan would not help
    first.room = Room(700 * MEGABYTE, short=True)
    assert links.process_reports() == 1
