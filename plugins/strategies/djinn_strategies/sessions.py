"""Assign sessions to executors.

`affinity` prefers the executor with the tenant's data. `fair_share` limits each tenant to its share of the executors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from djinn_core.hookspecs import hookimpl
from djinn_server.hookspecs.assignment_policies import (
    AssignmentPolicy,
    AssignmentRefusal,
    AssignmentRequest,
    ExecutorLoad,
)

djinn_api_version = "2.0"


def _parse_pairs(texts: Iterable[str], example: str) -> list[tuple[str, str]]:
    parts = [text.partition("=") for text in texts]
    pairs = [(key.strip(), value.strip()) for key, _, value in parts]
    if not all(key and value for key, value in pairs):
        raise ValueError(f"must be entries like {example}")
    return pairs


def _check_shares(_: object, __: object, shares: Iterable[str]) -> None:
    for _tenant, share in _parse_pairs(shares, "alice=2"):
        if not 0.0 < float(share) < float("inf"):
            raise ValueError("must be shares above 0, like alice=2")


def _check_reservations(_: object, __: object, reservations: Iterable[str]) -> None:
    _parse_pairs(reservations, "0=alice")


@attrs.frozen
class AssignmentSettings:
    """Settings of `affinity` and `fair_share`, from the table `[plugins.assignment]`.

    Attributes:
        margin: the preferred executor may have this much more load than the least loaded executor. A load of 1 is a
            fully used device.
        shares: shares of tenants, such as `alice=2`. A tenant that is not listed has the share 1.
        reservations: devices that only some tenants may use, such as `0=alice`. Each entry has the device's number or
            id, and one tenant.
    """

    margin: float = attrs.field(default=0.5, validator=attrs.validators.ge(0))
    shares: tuple[str, ...] = attrs.field(default=(), validator=_check_shares)
    reservations: tuple[str, ...] = attrs.field(default=(), validator=_check_reservations)


djinn_settings = AssignmentSettings


def _least_loaded(loads: Sequence[ExecutorLoad]) -> ExecutorLoad:
    return min(loads, key=lambda load: load.rank)


@attrs.frozen
class Affinity(AssignmentPolicy):
    """Assign a session to the executor that holds its data, unless another executor has much less load.

    If the session has a hint, the policy prefers executors on which a session with this hint began. Otherwise, it
    prefers the executor with most of the tenant's data.
    """

    name = "affinity"
    margin: float = 0.5

    def assign(self, request: AssignmentRequest) -> int | AssignmentRefusal:
        """Return the number of the preferred executor, as `AssignmentPolicy.assign` does."""
        best = _least_loaded(request.executors)
        limit = best.device_load + self.margin
        near = [load for load in request.executors if load.device_load <= limit]
        if request.hint:
            hinted = [load for load in near if request.hint in load.hints]
            return _least_loaded(hinted or request.executors).number
        max_held = max(load.held for load in near)
        return _least_loaded([load for load in near if load.held == max_held]).number


@attrs.frozen
class FairShareAssignment(AssignmentPolicy):
    """Limit each tenant to its share of the executors, and keep other tenants away from reserved executors.

    A tenant that is alone on the server may use all executors.
    """

    name = "fair_share"
    shares: Mapping[str, float] = attrs.field(factory=dict)
    reservations: Mapping[str, frozenset[str]] = attrs.field(factory=dict)  # tenants by device

    @classmethod
    def of(cls, settings: AssignmentSettings) -> FairShareAssignment:
        """Return the configured policy."""
        reserved: dict[str, set[str]] = {}
        for device, tenant in _parse_pairs(settings.reservations, "0=alice"):
            reserved.setdefault(device, set()).add(tenant)
        shares = {tenant: float(share) for tenant, share in _parse_pairs(settings.shares, "alice=2")}
        return cls(shares, {device: frozenset(tenants) for device, tenants in reserved.items()})

    def assign(self, request: AssignmentRequest) -> int | AssignmentRefusal:
        """Return the number of the least loaded executor within the tenant's share, or a refusal."""
        reserved = [load for load in request.executors if request.tenant in self._owners(load)]
        allowed = reserved or [load for load in request.executors if not self._owners(load)]
        if not allowed:
            devices = ", ".join(load.device or str(load.number) for load in request.executors)
            return AssignmentRefusal(f"{devices} is reserved for other tenants: ask for another device")
        if reserved:
            return _least_loaded(reserved).number
        occupied = [load for load in allowed if load.sessions or load.beginning]
        return _least_loaded(
            occupied if len(occupied) >= self._max_executors(request, len(allowed)) else allowed
        ).number

    def _owners(self, load: ExecutorLoad) -> frozenset[str]:
        none: frozenset[str] = frozenset()
        return self.reservations.get(str(load.number), none) | self.reservations.get(load.device, none)

    def _max_executors(self, request: AssignmentRequest, executors: int) -> int:
        """Return the number of executors that the tenant's sessions may use."""
        share = self.shares.get(request.tenant, 1.0)
        other_tenants = {
            tenant_load.tenant for load in request.executors for tenant_load in load.others if tenant_load.sessions
        }
        total_shares = share + sum(self.shares.get(tenant, 1.0) for tenant in other_tenants)
        return max(1, round(executors * share / total_shares))


@hookimpl
def djinn_register_assignment_policies(settings: Any) -> list[AssignmentPolicy]:
    """Return the assignment policies `affinity` and `fair_share`."""
    assignment_settings = settings if isinstance(settings, AssignmentSettings) else AssignmentSettings()
    return [Affinity(assignment_settings.margin), FairShareAssignment.of(assignment_settings)]
