"""Assign an executor to its one tenant, with the tenant's weight store and quota."""

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

_OPERATOR = frozenset({"", "default"})  # whose weights lie where they lay before there were tenants
_GIVEN_SECONDS = 2.0  # until the orders that precede a client's arrival are read at the latest
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
        folders: Sequence[Callable[[str], None]] = (),
    ) -> None:
        """Prepare the assignment. The executor has no tenant yet.

        Args:
            usage: counters, and the tenant's quota.
            disk: the tenant's disk quota.
            store: parent store of all tenants.
            accounts: folder with the used device time of tenants; None: the time is not stored.
            folders: callbacks that set up a tenant's weight folder or custom ops. They may raise OSError.
        """
        self._folders = folders
        self.store = store
        self._usage = usage
        self._disk = disk
        self._accounts = accounts
        self._shared = store
        self._tenant: str | None = None
        self._lock = threading.Lock()
        self._given = ""  # the tenant that the parent process has assigned it to
        self._is_given = threading.Event()

    def assign_tenant(self, tenant: str) -> None:
        """Assign this executor to a tenant, because its parent ordered it."""
        self._given = tenant
        self._is_given.set()

    def refusal_to_recover(self, badge: Badge) -> str:
        """Return the reason why this executor cannot recover a session of this badge; empty if it can.

        Recovery needs no ticket. So the executor must already be assigned to the tenant. Otherwise any client that finds
        its port could claim it.
        """
        if not badge.tenant or (self._is_given.wait(_GIVEN_SECONDS) and badge.tenant == self._given):
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
                self._give_folders(badge.tenant)
            if badge.tenant != self._tenant:
                _log.error("a gateway sent a client to another tenant's executor", tenant=badge.tenant)
                return  # `refusal` says so
            self._usage.quota = badge.quota
            self._disk.limit = badge.quota.disk
            if self.store is not None:
                self._disk.evict_weights = self.store.shrink_to
            if self.store is not None and badge.quota.disk and self._shared is not None:
                self.store.limit = min(badge.quota.disk, self._shared.limit)

    def refusal(self, badge: Badge) -> str:
        """Return the reason why a client with this badge is at the wrong executor; empty if it is at the right one."""
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
            _log.warning("cannot read the used device time: it counts from 0", tenant=tenant, error=str(error))

    def _give_folders(self, tenant: str) -> None:
        for give in self._folders:
            try:
                give(tenant)
            except OSError as error:
                _log.warning("cannot use a folder for the tenant's weights", tenant=tenant, error=str(error))

    def _store_of(self, badge: Badge) -> WeightStore | None:
        if self._shared is None or badge.tenant in _OPERATOR:
            return self._shared
        try:
            return self._shared.of_tenant(badge.tenant, badge.quota.disk)
        except OSError as error:
            _log.warning("the weight store is off: cannot use its directory", tenant=badge.tenant, error=str(error))
            return None
