"""What an executor knows of the one tenant that it works for: its weights, and how much it may use."""

from __future__ import annotations

import threading
from pathlib import Path

from djinn_core.launch.orders import Metered
from djinn_core.launch.tickets import Badge
from djinn_core.logs import get_logger
from djinn_core.server.usage_metrics import METER
from djinn_core.server.usage_quota import UsageQuota
from djinn_core.server.weights.disk import DISK
from djinn_core.server.weights.store import WeightStore

_OPERATOR = frozenset({"", "default"})  # whose weights lie where they lay before there were tenants
_GIVEN_SECONDS = 2.0  # until what was ordered before somebody was sent here is read at the latest
_log = get_logger("djinn.server")


class Tenancy:
    """Belongs to whoever comes first.

    Attributes:
        store: where the tenant's weights are kept, if they are.
    """

    def __init__(self, store: WeightStore | None, accounts: Path | None = None) -> None:
        """`accounts`: where a tenant's next executor finds what this one has used of its time; None: nowhere."""
        self.store = store
        self._accounts = accounts
        self._shared = store
        self._tenant: str | None = None
        self._lock = threading.Lock()
        self._given = ""  # who whoever started this process has given it to
        self._is_given = threading.Event()

    def belong(self, tenant: str) -> None:
        """Whoever started this process gives it to a tenant."""
        self._given = tenant
        self._is_given.set()

    def refusal_to_recover(self, badge: Badge) -> str:
        """Why a session that somebody with this badge had elsewhere cannot go on here; empty: it can.

        Nobody needs a ticket for that: an executor that waits for its first tenant would belong to whoever finds its port.
        """
        if not badge.tenant or (self._is_given.wait(_GIVEN_SECONDS) and badge.tenant == self._given):
            return ""
        _log.warning("a session was not recovered: this executor is not its tenant's", tenant=badge.tenant)
        return "this executor works for somebody else: connect to the gateway again"

    def refusal(self, badge: Badge, sessions: int) -> str:
        """Why whoever has this badge cannot begin a session beside so many; empty: they can."""
        with self._lock:
            if self._tenant is None:
                self._tenant = badge.tenant
                self.store = self._store_of(badge)
                self._open_account(badge.tenant)
            if badge.tenant != self._tenant:
                _log.error("a gateway sent somebody to another tenant's executor", tenant=badge.tenant)
                return "this executor works for somebody else: connect to the gateway again"
            METER.quota = badge.quota
            DISK.limit = badge.quota.disk
            if self.store is not None:
                DISK.make_way = self.store.make_way
            if self.store is not None and badge.quota.disk and self._shared is not None:
                self.store.limit = min(badge.quota.disk, self._shared.limit)
            return METER.may_begin(sessions)

    def metered(self) -> Metered:
        """What was done here."""
        stored = (
            {} if self.store is None else {"store_bytes": self.store.nbytes(), "store_limit_bytes": self.store.limit}
        )
        return METER.report(stored | {"disk_bytes": DISK.taken})

    def _open_account(self, tenant: str) -> None:
        if self._accounts is None:
            return
        try:
            METER.account = UsageQuota.of(tenant, self._accounts)
        except OSError as error:
            _log.warning("time on the device is counted anew", tenant=tenant, error=str(error))

    def _store_of(self, badge: Badge) -> WeightStore | None:
        if self._shared is None or badge.tenant in _OPERATOR:
            return self._shared
        try:
            return self._shared.of_tenant(badge.tenant, badge.quota.disk)
        except OSError as error:
            _log.warning("weights are not kept: their directory cannot be used", tenant=badge.tenant, error=str(error))
            return None
