"""Stage 5: place nodes and values on devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from djinn_core.errors import DoesNotFit, InvalidStage
from djinn_core.hookspecs.placement_policies import PlacementContext, PlacementPolicy
from djinn_core.ir.costs import DeviceCapabilities
from djinn_core.ir.indexes import bind, bound_nodes, only_bound
from djinn_core.ir.placement import Placement
from djinn_core.ir.replicas import with_replicas
from djinn_core.logs import get_logger
from djinn_core.planning.stages.attribution import title, warn_skipped
from djinn_core.planning.stages.placement_fit import shortage_message, shortages
from djinn_core.planning.stages.placement_search import NAME, search
from djinn_core.planning.stages.verify import check_placement

ROUNDS = 4  # maximum number of times a policy is asked again, without the devices whose memory it exceeded
_log = get_logger("djinn.stages")


def place(context: PlacementContext, policy: PlacementPolicy, *fallbacks: PlacementPolicy) -> Placement:
    """Return the first placement that is valid and fits.

    The order of attempts: the policy with all devices; the policy without the devices whose memory it exceeded; each
    fallback; a search; a placement that fits with spilling; a placement that may fit if a scheduler finds another order
    of ops. If the user chose devices for some nodes, only the other nodes move.

    A warning names a policy that fails or breaks a rule. `Placement.rejections` has the reasons of the attempts that do
    not fit, with figures.

    Raises:
        DoesNotFit: nothing fits; the message names devices, shortages and causes.
        InvalidStage: the fallbacks break a rule as well, or there are no devices.
    """
    if not context.topology.devices:
        raise InvalidStage("no device can run this program, because there are none; connect a server")
    attempts = _Attempts(context)
    for candidate in (policy, *(f for f in fallbacks if f is not policy)):
        is_fallback = any(candidate is f for f in fallbacks)
        placement = attempts.try_policy(candidate, "" if is_fallback else f"{fallbacks[0].name!r} places this graph")
        if placement is not None:
            return placement
    for spill in (False, True):
        if (placement := attempts.search_elsewhere(fallbacks[0], spill=spill)) is not None:
            return placement
    if attempts.fallback_candidate is not None:
        return attempts.accept(attempts.fallback_candidate, spills=attempts.alone)
    raise attempts.verdict()


@attrs.define
class _Attempts:
    context: PlacementContext
    rejections: list[str] = attrs.field(factory=list)
    first_error: InvalidStage | None = None
    lacks_resources: bool = False  # True if a placement was rejected because memory, dtypes or ops are missing
    has_figures: bool = False  # True if `rejections` has the figures of each device
    fallback_candidate: Placement | None = None  # a placement that may fit if a scheduler finds another order of ops

    @property
    def alone(self) -> bool:
        """Return True if there is only one device. Its spill memory then counts from the first attempt."""
        return len(self.context.topology.devices) == 1

    def try_policy(self, policy: PlacementPolicy, instead: str) -> Placement | None:
        """Return a policy's placement on all devices, or on the devices whose memory it did not exceed.

        Return None if nothing fits, or if the policy fails or breaks a rule.

        `instead`: consequence of a failure, as text for a warning; empty for a fallback, which causes no warning.

        Raises:
            DoesNotFit: nothing fits with the user's pins.
            Exception: a fallback raised it, and it is not an `InvalidStage`.
        """
        devices = self.context.topology.devices
        bound = bound_nodes(self.context.graph, self.context.plan.nodes)
        for _ in range(1 if bound else ROUNDS):
            placement = self._try_place(_restricted_to(self.context, devices), policy, instead)
            if placement is None:
                return None
            short = shortages(self.context, placement, spill=self.alone)
            if not short:
                return self.accept(placement, spills=self.alone)
            self._note_refusal(policy.name, devices, shortage_message(short))
            self.lacks_resources = self.has_figures = True
            if placement.fixed_nodes:
                return self._around_pins(placement, policy)
            if self.fallback_candidate is None and not shortages(
                self.context, placement, spill=self.alone, any_order=True
            ):
                self.fallback_candidate = placement
            over = {s.device for s in short}
            devices = tuple(d for d in devices if d.id not in over)
            if not devices:
                break
        return None

    def search_elsewhere(self, policy: PlacementPolicy, *, spill: bool) -> Placement | None:
        """Return a placement that the search finds, or None if no placement fits.

        With `spill`, count spill memory of executors, and try the policy before the search.
        """
        devices = self.context.topology.devices
        if len(devices) < 2 or (spill and not any(d.spill for d in devices)):
            return None
        if spill:
            placement = self._try_place(self.context, policy, "")
            if placement is not None and not shortages(self.context, placement, spill=True):
                return self.accept(placement, spills=True)
        if bound_nodes(self.context.graph, self.context.plan.nodes):
            return None  # most nodes are bound to a device by their index
        try:
            return self.accept(search(self.context, spill=spill), spills=spill)
        except DoesNotFit as error:
            self.lacks_resources = True
            self._note_refusal(NAME, devices, str(error))
        return None

    def _around_pins(self, placement: Placement, policy: PlacementPolicy) -> Placement:
        """Return the placement that the search finds with the user's pins.

        Raises:
            DoesNotFit: no placement fits.
        """
        devices = self.context.topology.devices
        fixed_devices = {d.node: d.device for d in placement.decisions if d.node in placement.fixed_nodes}
        for spill in dict.fromkeys((self.alone, any(d.spill for d in devices))):
            try:
                return self.accept(search(self.context, spill=spill, fixed=fixed_devices), spills=spill)
            except DoesNotFit as error:
                self._note_refusal(NAME, devices, str(error))
        counts = ", ".join(f"{n:,} on {d}" for d, n in Counter(fixed_devices.values()).items())
        refusal = DoesNotFit(
            f"the requested devices do not suffice ({policy.name}: {counts} ops). Tried: "
            f"{'; '.join(dict.fromkeys(self.rejections))}. Name other devices, or fewer modules"
        )
        refusal.excluded_by_pins = True
        raise refusal

    def verdict(self) -> InvalidStage:
        """Return the error that says why no placement was accepted."""
        if self.first_error is not None and not self.lacks_resources:
            return self.first_error
        cause = str(self.first_error) if self.first_error is not None else "no device can run this program"
        other_attempts = "; ".join(r for r in dict.fromkeys(self.rejections) if cause not in r)
        attempts_text = f". Tried: {other_attempts}" if other_attempts else ""
        return DoesNotFit(f"{cause}{attempts_text}. Use more or larger devices, or keep fewer tensors at a time")

    def _try_place(self, context: PlacementContext, policy: PlacementPolicy, instead: str) -> Placement | None:
        """Return a policy's placement; None if the policy fails or breaks a rule. A fallback's other errors propagate."""
        try:
            placement = _placement_of(context, self.context, policy)
            check_placement(self.context, placement, title("placement policy", policy))
        except Exception as error:
            refusal = error
        else:
            return placement
        # With fewer devices, a policy may raise because it lacks the devices that it needs.
        refuses = isinstance(refusal, InvalidStage if context is not self.context else DoesNotFit)
        if instead and not refuses:
            warn_skipped("placement policy", policy, refusal, instead, context.graph)
        if isinstance(refusal, InvalidStage):
            self.first_error = self.first_error or refusal
            self.lacks_resources = self.lacks_resources or isinstance(refusal, DoesNotFit)
            self._note_refusal(policy.name, context.topology.devices, str(refusal))
            self.has_figures = self.has_figures or (not instead and self.lacks_resources)
        elif not instead:
            raise refusal
        return None

    def _note_refusal(self, author: str, devices: Sequence[DeviceCapabilities], why: str) -> None:
        if self.alone and self.has_figures:
            return  # the same figures again
        where = devices[0].id if len(devices) == 1 else f"{len(devices)} devices"
        self.rejections.append(f"{author} on {where}: {why}")

    def accept(self, placement: Placement, *, spills: bool) -> Placement:
        """Return the placement with `spills`, the earlier rejections, and the plan's replicas if all of them fit."""
        if self.rejections:
            _log.info("placement_refused", refused=self.rejections, instead=placement.policy)
        placement = attrs.evolve(placement, rejections=tuple(self.rejections), spills=spills)
        return _with_replicas(self.context, placement) if self.context.plan.replicas else placement


def _restricted_to(context: PlacementContext, devices: tuple[DeviceCapabilities, ...]) -> PlacementContext:
    """Return the context restricted to some devices. Values on other devices have no home."""
    if len(devices) == len(context.topology.devices):
        return context
    ids = {d.id for d in devices}
    return attrs.evolve(
        context,
        topology=attrs.evolve(context.topology, devices=devices),
        resident={v: home for v, home in context.resident.items() if home in ids},
        copies={
            v: remaining
            for v, holders in context.copies.items()
            if (remaining := tuple(d for d in holders if d in ids))
        },
    )


def _placement_of(context: PlacementContext, whole: PlacementContext, policy: PlacementPolicy) -> Placement:
    """Return a placement. The policy decides about tensors of index 0 (`remote_accelerator:0`).

    Tensors of index k are placed on the k-th device of `whole`, the context with all devices.
    """
    graph, nodes, devices = context.graph, context.plan.nodes, whole.topology.by_index
    bound = bound_nodes(graph, nodes)
    if not bound:
        return policy.place(context)
    if len(bound) == len(nodes):
        return only_bound(graph, nodes, bound, devices)
    return bind(graph, policy.place(context), bound, devices)


def _with_replicas(context: PlacementContext, placement: Placement) -> Placement:
    """Return the placement with the replicas that optimizations requested, or without them if they are illegal."""
    extended = with_replicas(context.graph, placement, context.plan, context.profile)
    try:
        check_placement(context, extended, "optimizations with replicas")
        if short := shortages(context, extended, spill=placement.spills):
            raise DoesNotFit(shortage_message(short))
    except InvalidStage as error:
        _log.warning("replicas are ignored", error=str(error), instead="values are sent between devices")
        return placement
    return extended
