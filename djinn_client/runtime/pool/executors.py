"""Executors that join a pool and leave it, while its session goes on."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final

import attrs

from djinn_client.interception.device.random_state import get_state, set_state
from djinn_client.interception.recording.recorder import current
from djinn_client.runtime.connecting.open_session import OpenSession
from djinn_client.runtime.observing import Observers
from djinn_client.runtime.planning.constraints import limits_of, within
from djinn_client.runtime.planning.planner import Planner
from djinn_client.runtime.planning.run_pipeline import capabilities_of
from djinn_client.runtime.pool.held_uploads import HeldUploads
from djinn_client.runtime.pool.membership import Membership
from djinn_client.runtime.pool.peer_reconnection import PeerReconnection
from djinn_client.runtime.pool.pool_planner import PoolPlanner
from djinn_client.runtime.pool.relay import Relay, look_after_each_other
from djinn_client.runtime.pool.routes import Routes
from djinn_client.runtime.pool.topology import PoolTopology
from djinn_client.runtime.pool.value_locations import ValueLocations
from djinn_client.runtime.receiving.failures import Failures
from djinn_client.runtime.receiving.reply_reader import ReplyReader
from djinn_client.runtime.session import Session
from djinn_client.runtime.stats import Stats
from djinn_core.errors import DjinnError, DoesNotFit, UnsupportedOperation
from djinn_core.ir.costs import DeviceCapabilities, Link, NetworkTopology
from djinn_core.ir.handles import storage_of
from djinn_core.settings import Settings
from djinn_core.system.interrupts import interrupt_mask
from djinn_core.wire.peer_messages import DropPeer

_BATCH_BYTES: Final = 64 << 20  # that leave an executor at a time: they are copied there before they are sent
_BATCH_VALUES: Final = 4096


@attrs.frozen(eq=False)
class PoolExecutors:
    """The parts of a pool's session that know its executors. The caller of all methods holds the recorders' lock."""

    settings: Settings
    rules: Planner
    stats: Stats
    observers: Observers
    failures: Failures
    membership: Membership
    relays: list[Relay]
    locations: ValueLocations
    planner: PoolPlanner
    routes: Routes
    links: PoolTopology
    uploads: HeldUploads
    peer_reconnection: PeerReconnection
    elastic: set[int] = attrs.field(factory=set)  # numbers of those that take `DropPeer`

    def join(self, opened: Sequence[OpenSession]) -> None:
        """Executors are there with which sessions have begun; links from and to them are measured.

        Raises:
            ConfigurationError: a limit of memory is for a device that there is not.
            SessionLost: an executor is gone. If it is one of these, the pool goes on as it was.
        """
        first = len(self.membership.members)
        self._enter([(one, self._session(one, number)) for number, one in enumerate(opened, first + 1)])

    def adopt(self, session: Session, one: OpenSession, others: Sequence[OpenSession]) -> None:
        """As `join`, of the session that was the only one so far, and of others."""
        session.replies.reader = ReplyReader(self.failures, 1)
        joining = [(other, self._session(other, number)) for number, other in enumerate(others, 2)]
        self._enter([(one, session), *joining])
        self.planner.random = 0  # where it has been so far

    def know_values(self, values: Iterable[tuple[int, int]]) -> None:
        """Note values that lie on the first executor, because it was the only one: handles, and bytes of their storages."""
        elsewhere = frozenset(self.locations.homes)
        for handle, nbytes in values:
            if handle not in self.uploads and storage_of(handle) not in elsewhere:
                self.locations.add(handle, 0, nbytes)

    def _session(self, one: OpenSession, number: int) -> Session:
        return Session(
            one.connection,
            self.rules,
            self.stats,
            one.url,
            self.observers,
            caches_weights=one.attached.caches_weights,
            compressions=one.compressions,
            weight_sources=one.attached.weight_sources,
            called=one.server,
            reader=ReplyReader(self.failures, number),
        )

    def _enter(self, joining: Sequence[tuple[OpenSession, Session]]) -> None:
        membership, first = self.membership, len(self.membership.members)
        devices = capabilities_named([one for one, _ in joining], itertools.count(first))
        for device, (one, session) in zip(devices, joining, strict=True):
            number = membership.enter(session)
            self.failures.read_by(number + 1, session.replies.receive_until)
            self.relays.append(Relay(session))
            if one.attached.elastic:
                self.elastic.add(number)
            self.peer_reconnection.join(number, one.connection, one.url, one.attached.instance)
            self.planner.join(device.id)
            self.links.know(device)
        try:
            self._plan_anew(self.routes.links(self.planner.devices))
        except (DjinnError, KeyboardInterrupt):
            for number in range(first, len(membership.members)) if first else ():
                membership.leave(number, membership.present[0])
                self.peer_reconnection.leave(number)
            raise

    def _plan_anew(self, links: Sequence[Link]) -> None:
        """Plan with the executors that there are now."""
        membership = self.membership
        limits = limits_of(self.settings, self.planner.devices)
        self.links.change_executors(membership.present, links, membership.indexes)
        self.planner.know_devices(self.links.topology.devices)
        self.note_room(self.links.devices, limits)
        self.links.when_room_changed = lambda devices: self.note_room(devices, limits)
        look_after_each_other(membership.here)
        self.planner.make_anew()

    def note_room(self, devices: Sequence[DeviceCapabilities], limits: Mapping[str, int]) -> None:
        """Plan and keep uploads for the memory that there is now; `devices` of all executors, by number."""
        topology, _ = within(NetworkTopology(tuple(devices)), limits, {})
        self.planner.memory = [device.memory_free for device in topology.devices]
        self.uploads.fill(self.planner.memory)

    # --- leaving -----------------------------------------------------------------------------------------------

    def leave(self, numbers: Sequence[int]) -> None:
        """Have executors leave, when the others have what they hold; the others' sessions go on.

        Raises:
            UnsupportedOperation: one holds what cannot go elsewhere. Nothing has changed.
            DoesNotFit: the others have no memory for it. Nothing has changed, unless there is none for KV caches that are pinned: these
                have moved, and are not pinned any more.
            SessionLost: an executor was lost, and its values with it.
        """
        membership = self.membership
        members = {number: membership.members[number] for number in numbers}
        pinned = [handle for member in members.values() for handle in _pinned_values(member)]
        rest = [number for number in membership.present if number not in members]
        with interrupt_mask.uninterruptible:  # what all of them have to hear is said to all of them
            state = get_state() if self.planner.random in members else None
            targets = self._targets(members, rest)
            for (source, target), storages in targets.items():
                self._move(source, target, storages)
            self._pin(pinned)
            for member in membership.here:
                member.figures()  # when it answers, what was on its way has come
            for one, other in itertools.product(numbers, rest):
                self._drop(other, one)
                self._drop(one, other)
            for number in numbers:
                received = {target: len(s) for (source, target), s in targets.items() if source == number}
                membership.leave(number, max(received, key=received.__getitem__, default=rest[0]))
                self.locations.leave(number)
                self.peer_reconnection.leave(number)
            self._plan_anew(self.links.among(frozenset(rest)))
            if state is not None:
                self.planner.random = membership.number_at(numbers[0] + 1)
                set_state(state)
                current().flush()
        for member in members.values():
            member.close()

    def _pin(self, handles: Iterable[int]) -> None:
        """Pin the KV caches where they are now.

        Raises:
            DoesNotFit: there is no room for them.
        """
        there: dict[int, list[int]] = {}
        for handle in handles:
            home = self.locations.homes.get(storage_of(handle))
            if home is not None:
                there.setdefault(home, []).append(handle)
        for number, values in there.items():
            member = self.membership.members[number]
            if reason := member.caches("pin", values).refused:
                raise DoesNotFit(
                    f"an executor cannot leave: {member.link.called} has no room to pin the KV caches that were pinned there ({reason}). "
                    "They are on that executor now and not pinned; let go of tensors, and scale again"
                )

    def _drop(self, executor: int, peer: int) -> None:
        if executor in self.elastic:
            self.relays[executor].tell(DropPeer(peer + 1))

    def _targets(self, leaving: Container[int], rest: Sequence[int]) -> dict[tuple[int, int], list[int]]:
        """By executor that leaves and executor that stays the storages that go from one to the other.

        Raises:
            DoesNotFit: those that stay have no memory for it.
        """
        memory, held_there = self.planner.memory, self.locations.held
        room = {e: None if (free := memory[e]) is None else free - held_there[e] for e in rest}
        found: dict[tuple[int, int], list[int]] = {}
        for storage, home in self.locations.homes.items():
            if home not in leaving:
                continue
            size = self.locations.size(storage)
            target = next((e for e, free in room.items() if free is None or free >= size), None)
            if target is None:
                raise DoesNotFit(
                    f"an executor cannot leave: the {len(rest)} others have no memory for what it holds ({size:,} bytes more were to go "
                    f"there, of {sum(free or 0 for free in room.values()):,} that are free). Let go of tensors, or let fewer leave"
                )
            if (free := room[target]) is not None:
                room[target] = free - size
            found.setdefault((home, target), []).append(storage)
        return found

    def _move(self, source: int, target: int, storages: Sequence[int]) -> None:
        batch: list[int] = []
        nbytes = 0
        for storage in storages:
            batch += (values := self.locations.values_in(storage))
            nbytes += self.locations.size(storage)
            self.locations.move(values[0], target)
            if nbytes >= _BATCH_BYTES or len(batch) >= _BATCH_VALUES:
                self.routes.move(source, target, batch)
                batch, nbytes = [], 0
        if batch:
            self.routes.move(source, target, batch)


def _pinned_values(member: Session) -> list[int]:
    """Values of pinned KV caches, which its executor holds.

    Raises:
        UnsupportedOperation: the executor holds what cannot go to another one.
    """
    figures, called = member.figures(), member.link.called
    if bound := figures.get("bound_values", 0):
        raise UnsupportedOperation(
            f"an executor cannot leave: {called} holds {bound} values that cannot go to another one, such as events. Let go of them first"
        )
    if not figures.get("pinned_caches", 0):
        return []
    if found := member.pinned_caches():
        return found
    raise UnsupportedOperation(
        f"an executor cannot leave: {called} has pinned KV caches and does not say which. Unpin them first"
    )


def capabilities_named(opened: Iterable[OpenSession], numbers: Iterable[int]) -> list[DeviceCapabilities]:
    """The devices of executors with these numbers, by the names that they have in plans, with what was measured of them."""
    infos = [(number, one.attached.device) for number, one in zip(numbers, opened, strict=False)]
    return [attrs.evolve(capabilities_of(info), id=f"{number}/{info.id}") for number, info in infos]
