"""Assign an executor to its only tenant, with the tenant's weight store and quota."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from djinn_core.logs import get_logger
from djinn_server.disk_quota import DiskQuota
from djinn_server.launch.tickets import Badge
from djinn_server.usage_metrics import UsageMetrics
from djinn_server.usage_quota import UsageQuota
from djinn_server.weights.store import WeightStore

_OPERATOR = frozenset({"", "default"})  # tenants whose weights are in the shared store itself
_ORDER_SECONDS = 2.0  # in which the parent's order arrives, which it sends before the client connects
_log = get_logger("djinn.server")


class Tenancy:
    """Assign the executor to the first tenant that connects.

    Attributes:
        store: the tenant's weight store, if any.
    """

    def __init__(
        self,
        usage: UsageMetrics,
        disk: DiskQuota,
        store: WeightStore | None = None,
        accounts: Path | None = None,
        set_ups: Sequence[Callable[[str], None]] = (),
    ) -> None:
        """Prepare the assignment. The executor has no tenant yet.

        Args:
            usage: counters, and the tenant's quota.
            disk: the tenant's disk quota.
            store: parent store of all tenants.
            accounts: folder with the used device time of tenants; None: the time is not stored.
            set_ups: functions that set up weight folders or custom ops of a tenant, given its name. They may raise OSError.
        """
        self._set_ups = set_ups
        self.store = store
        self._usage = usage
        self._disk = disk
        self._accounts = accounts
        self._shared = store
        self._tenant: str | None = None
        self._lock = threading.Lock()
        self._ordered_tenant = ""  # of the parent's order to assign this executor
        self._has_order = threading.Event()

    def assign_tenant(self, tenant: str) -> None:
        """Assign this executor to a tenant, because its parent ordered it."""
        self._ordered_tenant = tenant
        self._has_order.set()

    def refusal_to_recover(self, badge: Badge) -> str:
        """Return the reason why this executor cannot recover a session of this badge, or "" if it can.

        Recovery needs no ticket. So the parent must have assigned the executor to the tenant. Otherwise any client that finds
        the executor's port could claim the executor.
        """
        if not badge.tenant or (self._has_order.wait(_ORDER_SECONDS) and badge.tenant == self._ordered_tenant):
            return ""
        _log.warning("refused to recover a session of another tenant", tenant=badge.tenant)
        return "this executor works for another tenant: connect to the gateway again"

    def assign(self, badge: Badge) -> None:
        """Assign the executor to the tenant of a badge, unless it has a tenant. Apply the badge's quota."""
        with self._lock:
            if self._tenant is None:
                self._tenant = badge.tenant
                self.store = self._store_of(badge)
                self._open_account(badge.tenant)
                self._set_up(badge.tenant)
            if badge.tenant != self._tenant:
                _log.error("a gateway sent a client to another tenant's executor", tenant=badge.tenant)
                return  # `refusal` returns the reason
            self._usage.quota = badge.quota
            self._disk.limit = badge.quota.disk
            if self.store is not None:
                self._disk.evict_weights = self.store.shrink_to
            if self.store is not None and badge.quota.disk and self._shared is not None:
                self.store.limit = min(badge.quota.disk, self._shared.limit)

    def refusal(self, badge: Badge) -> str:
        """Return the reason why this executor cannot serve a client with this badge, or "" if it can."""
        with self._lock:
            if self._tenant not in {None, badge.tenant}:
                return "this executor works for another tenant: connect to the gateway again"
        return ""

    def _open_account(self, tenant: str) -> None:
        if self._accounts is None:
            return
        try:
            self._usage.account = UsageQuota.of(tenant, self._accounts)
        except OSError as error:
            _log.warning(
                "cannot read the tenant's used device time: it is counted from 0", tenant=tenant, error=str(error)
            )

    def _set_up(self, tenant: str) -> None:
        for set_up in self._set_ups:
            try:
                set_up(tenant)
            except OSError as error:
                _log.warning("cannot use a folder of the tenant", tenant=tenant, error=str(error))

    def _store_of(self, badge: Badge) -> WeightStore | None:
        if self._shared is None or badge.tenant in _OPERATOR:
            return self._shared
        try:
            return self._shared.of_tenant(badge.tenant, badge.quota.disk)
        except OSError as error:
            _log.warning("the weight store is off: its directory cannot be used", tenant=badge.tenant, error=str(error))
            return None
