"""Peak memory of a program on one device, by kind of value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import attrs

from djinn.planning import DataResidency, Free, PipelineResult, Run, storage_of

KINDS: Final = {
    DataResidency.PERSISTENT_WEIGHT: "weights",
    DataResidency.STATEFUL_KV_CACHE: "cache",
    DataResidency.GRADIENT: "gradients",
    DataResidency.OPTIMIZER_STATE: "optimizer",
}
ACTIVATIONS: Final = "activations"  # all other memory: inputs, results, and workspace of ops


@attrs.frozen
class Peak:
    """Peak memory of a program.

    Attributes:
        bytes: bytes at the moment of the peak.
        kinds: these bytes by kind: `weights`, `cache`, `gradients`, `optimizer` and `activations`.
        most: maximum bytes of each kind. Kinds may have their maximum at different moments.
        left: bytes by kind at the end of the program.
        largest_step: maximum bytes of one op: operands, results and workspace. A lower memory limit is impossible.
    """

    bytes: int
    kinds: Mapping[str, int]
    most: Mapping[str, int]
    left: Mapping[str, int]
    largest_step: int


def peak_of(result: PipelineResult, *, caches: bool = True) -> Peak:
    """Return the peak memory of a program that was scheduled on one device. All inputs are on the device from the beginning.

    A storage counts once, with the largest extent of its values, from the op that creates it until its last value is
    freed. If `caches` is False, values of a KV cache count as activations.

    Raises:
        ValueError: the program was not scheduled, or was scheduled on several devices.
    """
    if result.schedule is None or result.costs is None or len(result.schedule.steps) > 1:
        raise ValueError("peak_of needs a schedule for one device: plan with until='schedule' and one device")
    memory = _Held(result, KINDS if caches else KINDS | {DataResidency.STATEFUL_KV_CACHE: ACTIVATIONS})
    for value in result.graph.inputs:
        memory.hold(value)
    memory.note(0)
    for device, steps in result.schedule.steps.items():
        costs, nodes = result.costs.by_device[device], result.graph.nodes
        for step in steps:
            if isinstance(step, Run):
                for node in step.nodes:
                    for value in nodes[node].outputs:
                        memory.hold(value)
                    memory.note(costs[node].workspace, node)
            elif isinstance(step, Free):
                for value in step.values:
                    memory.free(value)
    return Peak(sum(memory.fullest.values()), dict(memory.fullest), dict(memory.most), memory.left(), memory.largest)


class _Held:
    """Simulates the memory in use while the caller goes through the steps of a schedule.

    Attributes:
        fullest: bytes by kind at the peak so far.
        most: maximum bytes of each kind so far.
        largest: maximum bytes of one op so far.
    """

    def __init__(self, result: PipelineResult, names: Mapping[DataResidency, str]) -> None:
        self._names = names
        self._graph = result.graph
        self._residency = result.profile.residency if result.profile is not None else {}
        self._values: dict[int, set[int]] = {}
        self._sizes: dict[int, int] = {}
        self._kinds: dict[int, str] = {}
        self._now: Counter[str] = Counter()
        self.fullest: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.largest = 0

    def hold(self, value: int) -> None:
        """Add a value to memory. A storage grows to the largest extent of its values."""
        storage, meta = storage_of(value), self._graph.meta(value)
        self._values.setdefault(storage, set()).add(value)
        kind = self._kinds.setdefault(storage, self._kind(value))
        if (
            kind == ACTIVATIONS and (view_kind := self._kind(value)) != ACTIVATIONS
        ):  # a view may have a more specific kind
            self._now[kind] -= self._sizes.get(storage, 0)
            self._now[view_kind] += self._sizes.get(storage, 0)
            kind = self._kinds[storage] = view_kind
        size = meta.extent * meta.dtype.itemsize
        if (more := size - self._sizes.get(storage, 0)) > 0:
            self._sizes[storage] = size
            self._now[kind] += more

    def _kind(self, value: int) -> str:
        residency = self._residency.get(value)
        return self._names.get(residency, ACTIVATIONS) if residency is not None else ACTIVATIONS

    def free(self, value: int) -> None:
        """Free a value, and its storage if no value of it remains."""
        storage = storage_of(value)
        values = self._values.get(storage)
        if values is None:
            return
        values.discard(value)
        if not values:
            del self._values[storage]
            self._now[self._kinds.pop(storage)] -= self._sizes.pop(storage, 0)

    def left(self) -> dict[str, int]:
        """Return the bytes in use by kind."""
        return dict(+self._now)

    def note(self, beside: int, node: int | None = None) -> None:
        """Update the maxima after an op.

        Args:
            beside: workspace bytes of the op.
            node: index of the op in the graph, or None to update the maxima without an op.
        """
        if node is not None:
            node_row = self._graph.nodes[node]
            storages = {storage_of(v) for v in (*node_row.inputs, *node_row.outputs)}
            self.largest = max(self.largest, beside + sum(self._sizes.get(storage, 0) for storage in storages))
        for kind, size in self._now.items():
            self.most[kind] = max(self.most[kind], size)
        if sum(self._now.values()) + beside > sum(self.fullest.values()):
            self.fullest = +self._now
            self.fullest[ACTIVATIONS] += beside
