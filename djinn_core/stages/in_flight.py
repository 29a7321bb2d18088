"""Bytes of transfers that are on their way to a device: sent by another one, and not received by a step yet.

An executor takes transfers in as they come, into host memory. On a device that computes in host memory they count from the
moment at which the other device may have sent them, which is long before the step that receives them if that device is ahead.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from djinn_core.hookspecs.schedulers import SchedulingContext
from djinn_core.ir.schedule import Receive, Send, Step
from djinn_core.stages.simulate import copy_bytes

HOST_KINDS: Final = frozenset({"cpu"})  # kinds of devices that compute in host memory

Steps = Mapping[str, Sequence[Step]]


def hosts(context: SchedulingContext, steps: Steps) -> frozenset[str]:
    """The devices among those that run steps whose transfers wait in their own memory."""
    if len(steps) < 2:
        return frozenset()
    return frozenset([d.id for d in context.topology.devices if d.kind in HOST_KINDS and d.id in steps])


def in_flight(context: SchedulingContext, steps: Steps, computing: frozenset[str]) -> dict[str, list[int]]:
    """By device of `computing` the bytes before each of its steps that may have come and that no step has received.

    A device can be ahead of another one as far as it needs nothing of what that one has yet to do.
    """
    found: dict[str, list[int]] = {device: [0] * (len(steps[device]) + 1) for device in computing}
    for device, since, until, value in _waiting(steps, computing):
        if context.placement.values.get(value) == device:
            continue  # an input that comes to stay is counted from the beginning
        size = copy_bytes(context.graph.meta(value))
        found[device][since] += size
        found[device][until] -= size
    for changes in found.values():
        now = 0
        for at, change in enumerate(changes):
            now += change
            changes[at] = now
    return found


def _waiting(steps: Steps, computing: frozenset[str]) -> Iterator[tuple[str, int, int, int]]:
    """Device, step before which a transfer may be there, step that receives it, and the value; where devices of `computing` receive.

    Each device has a clock: how many steps of each receiver must be done for it to have come so far.
    """
    clocks: dict[str, dict[str, int]] = {device: {} for device in steps}
    mail: dict[tuple[str, str, int], deque[dict[str, int]]] = defaultdict(deque)
    at = dict.fromkeys(steps, 0)
    ready = deque(steps)
    waiting: dict[tuple[str, str, int], str] = {}
    while ready:
        device = ready.popleft()
        clock, its = clocks[device], steps[device]
        while at[device] < len(its):
            number, step = at[device], its[at[device]]
            if isinstance(step, Send):
                key = (device, step.target, step.value)
                mail[key].append(dict(clock))
                if key in waiting:
                    ready.append(waiting.pop(key))
            elif isinstance(step, Receive):
                key = (step.source, device, step.value)
                if not mail[key]:
                    waiting[key] = device
                    break
                sent = mail[key].popleft()
                if device in computing:
                    yield device, sent.get(device, 0), number, step.value
                for other, done in sent.items():
                    clock[other] = max(clock.get(other, 0), done)
            at[device] += 1
            if device in computing:
                clock[device] = at[device]
