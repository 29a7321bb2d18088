"""Add executors to a pool and remove them during a session."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final

import attrs

from djinn_client.hookspecs.routers import Executors
from djinn_client.interception.device.random_state import get_state, set_state
from djinn_client.interception.recording.recorder import current
from djinn_client.runtime.context import context
from djinn_client.runtime.executor_client import ExecutorClient
from djinn_client.runtime.planning.constraints import limits_of, within
from djinn_client.runtime.planning.run_pipeline import capabilities_of
from djinn_core.errors import DoesNotFit, UnsupportedOperation
from djinn_core.ir.costs import DeviceCapabilities, Link, NetworkTopology
from djinn_core.ir.handles import storage_of
from djinn_core.system.interrupts import interrupt_mask
from djinn_core.wire.binding_delta import pack_handles, unpack_handles
from djinn_core.wire.cache_messages import CacheReply, CacheRequest
from djinn_core.wire.messages import StatsReply, StatsRequest
from djinn_core.wire.peer_messages import DropPeer
from djinn_pool.held_uploads import HeldUploads
from djinn_pool.peer_reconnection import PeerReconnection
from djinn_pool.pool_planner import PoolPlanner
from djinn_pool.relay import Relay, look_after_each_other
from djinn_pool.routes import Routes
from djinn_pool.topology import PoolTopology
from djinn_pool.value_locations import ValueLocations

_BATCH_BYTES: Final = (
    64 << 20
)  # bytes that leave an executor at a time, because values are copied there before they are sent
_BATCH_VALUES: Final = 4096


@attrs.frozen(eq=False)
class ElasticExecutors:
    """Add executors to a pool and remove them. The caller of each method holds the sink's lock."""

    executors: Executors[ExecutorClient]
    relays: list[Relay]
    locations: ValueLocations
    planner: PoolPlanner
    routes: Routes
    links: PoolTopology
    uploads: HeldUploads
    peer_reconnection: PeerReconnection

    def join(self, numbers: Sequence[int]) -> None:
        """Let plans use executors that have joined the session, and measure their links.

        `numbers`: numbers of the new executors.

        Raises:
            ConfigurationError: a memory limit names a device that does not exist.
            SessionLost: an executor was lost.
        """
        # Executors that failed to join before also have a number.
        for number in range(len(self.relays), len(self.executors.members)):
            executor = self.executors.members[number]
            device = capabilities_in_pool(number, executor)
            self.relays.append(Relay(executor))
            self.planner.join(device.id)
            self.links.add_device(device)
        for number in numbers:
            session = self.executors.members[number].opened
            self.peer_reconnection.join(number, session.connection, session.url, session.attached.instance)
        self._discard_plans(self.routes.links(self.planner.devices))

    def undo_join(self, numbers: Sequence[int]) -> None:
        """Remove the executors with these numbers after a failed `join`."""
        with interrupt_mask.uninterruptible:
            for number in numbers:
                self.executors.leave(number, self.executors.present[0])
                self.peer_reconnection.leave(number)
            self._discard_plans(self.routes.links(self.planner.devices))  # these links were measured before

    def _discard_plans(self, links: Sequence[Link]) -> None:
        """Discard all plans, because the executors have changed. `links`: measured links between the present executors."""
        executors = self.executors
        limits = limits_of(context.configured()[1], self.planner.devices)
        self.links.change_executors(executors.present, links, executors.indexes)
        self.planner.know_devices(self.links.topology.devices)
        self.record_free_memory(self.links.devices, limits)
        self.links.when_room_changed = lambda devices: self.record_free_memory(devices, limits)
        look_after_each_other(executors.current)
        self.planner.discard_plans()

    def record_free_memory(self, devices: Sequence[DeviceCapabilities], limits: Mapping[str, int]) -> None:
        """Update planner and deferred uploads with the free memory of executors.

        Args:
            devices: the device of each executor, by the executor's number.
            limits: bytes that a device may use, by device id.
        """
        topology, _ = within(NetworkTopology(tuple(devices)), limits, {})
        self.planner.memory = [device.memory_free for device in topology.devices]
        self.uploads.fill(self.planner.memory)

    # --- leaving -----------------------------------------------------------------------------------------------

    def leave(self, numbers: Sequence[int]) -> None:
        """Move the values of executors to the staying executors, then remove the executors with these numbers.

        Raises:
            UnsupportedOperation: an executor holds a value that cannot move, or does not report its pinned caches.
                Nothing has changed.
            DoesNotFit: the staying executors have too little memory. Nothing has changed, except if pinned KV caches do
                not fit. Then all values have moved, and the KV caches are unpinned.
            SessionLost: an executor was lost, and its values with it.
        """
        executors = self.executors
        members = {number: executors.members[number] for number in numbers}
        pinned_handles = [handle for member in members.values() for handle in _pinned_values(member)]
        staying = [number for number in executors.present if number not in members]
        with interrupt_mask.uninterruptible:  # an interrupt must not leave some executors without their messages
            state = get_state() if self.planner.random in members else None
            targets = self._targets(members, staying)
            for (source, target), storages in targets.items():
                self._move_storages(source, target, storages)
            self._pin_caches(pinned_handles)
            for member in executors.current:
                member.replies.ask(StatsRequest(), StatsReply)  # after this reply, all earlier messages have arrived
            for leaving, staying_number in itertools.product(numbers, staying):
                self._drop_peer(staying_number, leaving)
                self._drop_peer(leaving, staying_number)
            for number in numbers:
                received_counts = {target: len(s) for (source, target), s in targets.items() if source == number}
                executors.leave(number, max(received_counts, key=received_counts.__getitem__, default=staying[0]))
                self.locations.leave(number)
                self.peer_reconnection.leave(number)
            self._discard_plans(self.links.links_among(frozenset(staying)))
            if state is not None:
                self.planner.random = executors.number_at(numbers[0] + 1)
                set_state(state)
                current().flush()
        for member in members.values():
            member.link.close()

    def _pin_caches(self, handles: Iterable[int]) -> None:
        """Pin KV caches on the executors to which they have moved.

        Raises:
            DoesNotFit: an executor has too little memory for the pinned caches.
        """
        by_executor: dict[int, list[int]] = {}
        for handle in handles:
            home = self.locations.homes.get(storage_of(handle))
            if home is not None:
                by_executor.setdefault(home, []).append(handle)
        for number, values in by_executor.items():
            member = self.executors.members[number]
            if reason := member.replies.ask(CacheRequest("pin", pack_handles(values)), CacheReply).refused:
                raise DoesNotFit(
                    f"an executor cannot leave: its KV caches moved to {member.link.name}, which has too little free memory to pin them ({reason}). "
                    "They are unpinned: free tensors, and call djinn.scale() again"
                )

    def _drop_peer(self, executor: int, peer: int) -> None:
        if self.executors.members[executor].opened.attached.elastic:
            self.relays[executor].send(DropPeer(peer + 1))

    def _targets(self, leaving: Container[int], staying: Sequence[int]) -> dict[tuple[int, int], list[int]]:
        """Return the storages that must move, by pair of leaving and staying executor.

        Raises:
            DoesNotFit: the staying executors have too little memory.
        """
        memory, held_there = self.planner.memory, self.locations.held
        room = {e: None if (free := memory[e]) is None else free - held_there[e] for e in staying}
        targets: dict[tuple[int, int], list[int]] = {}
        for storage, home in self.locations.homes.items():
            if home not in leaving:
                continue
            size = self.locations.size(storage)
            target = next((e for e, free in room.items() if free is None or free >= size), None)
            if target is None:
                raise DoesNotFit(
                    f"an executor cannot leave, because no other executor has {size:,} free bytes for one of its values (all {len(staying)} "
                    f"together have {sum(free or 0 for free in room.values()):,}): free tensors, or let fewer executors leave"
                )
            if (free := room[target]) is not None:
                room[target] = free - size
            targets.setdefault((home, target), []).append(storage)
        return targets

    def _move_storages(self, source: int, target: int, storages: Sequence[int]) -> None:
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


def _pinned_values(member: ExecutorClient) -> list[int]:
    """Return the handles of the values in pinned KV caches of an executor.

    Raises:
        UnsupportedOperation: the executor holds a value that cannot move, or does not report its pinned caches.
    """
    figures, executor_name = member.replies.ask(StatsRequest(), StatsReply).values, member.link.name
    if bound_count := figures.get("bound_values", 0):
        raise UnsupportedOperation(
            f"{executor_name} cannot leave, because {bound_count} of its values cannot be moved, such as events: delete them first"
        )
    if not figures.get("pinned_caches", 0):
        return []
    if handles := unpack_handles(member.replies.ask(CacheRequest("look"), CacheReply).values):
        return handles
    raise UnsupportedOperation(
        f"{executor_name} cannot leave, because it has pinned KV caches and does not report their values: unpin them first"
    )


def capabilities_in_pool(number: int, executor: ExecutorClient) -> DeviceCapabilities:
    """Return the capabilities of an executor's device, with its id in plans (`NUMBER/DEVICE`) and its calibration."""
    info = executor.device
    return attrs.evolve(capabilities_of(info), id=f"{number}/{info.id}")
