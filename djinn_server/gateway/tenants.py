"""Executor pools by tenant. Tenants do not share processes, so that a crash affects only one tenant."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs
import msgspec

from djinn_core.errors import DjinnError
from djinn_core.logs import get_logger
from djinn_core.wire.messages import ExecutorStatus
from djinn_server.events import ServerEvents
from djinn_server.gateway.pool import BUSY, Pool, SupervisedExecutor
from djinn_server.hookspecs.authenticators import Denial
from djinn_server.hookspecs.executors import ExecutorEngine, LaunchRequest
from djinn_server.launch.engines import LocalEngine, StartedExecutor
from djinn_server.launch.executor_config import ExecutorConfig
from djinn_server.launch.system_users import SystemUser
from djinn_server.launch.tickets import TICKET_SECONDS

MAX_TENANTS: Final = 16  # tenants with executors at the same time
STARTS: Final = 2  # tenants whose executors start at the same time; more would slow down all of them
RETURN_SECONDS: Final = 60.0  # in which clients of a dead executor reconnect to its successor
IDLE_SECONDS: Final = 600.0  # after which the executors of an idle tenant end
_log = get_logger("djinn.server")


class Tenants:
    """The executors of a gateway: a pool for each connected tenant, and a reserve pool for the next tenant.

    The reserve pool exists only if more tenants may connect. The next new tenant gets it, until that tenant is idle.
    """

    def __init__(
        self,
        configs: Sequence[ExecutorConfig],
        start_timeout: float,
        expected: Callable[[], int] = lambda: 1,
        max_tenants: int = MAX_TENANTS,
        events: ServerEvents = ServerEvents(),  # noqa: B008 - has no observers
        engine: ExecutorEngine = LocalEngine(),  # noqa: B008 - has no state
        requests: Callable[[], Sequence[LaunchRequest]] = tuple,
        users: Mapping[str, SystemUser] | None = None,
    ) -> None:
        """Start the first pool, and return without waiting for it.

        Args:
            configs: configurations of the executors of a pool.
            start_timeout: seconds in which an executor must start.
            expected: returns the number of tenants that may connect.
            max_tenants: maximum number of tenants with executors.
            events: notifies observers.
            engine: as in `Pool`.
            requests: returns the launch requests of a new pool.
            users: system users by tenant. Tenants without a user are refused, and the first pool is the reserve for one of
                these tenants. None: executors run as the gateway's user.

        Raises:
            StartupError: a process cannot be started.
        """
        self._configs = tuple(configs)
        self._start_timeout = start_timeout
        self._expected = expected
        self._max_tenants = max_tenants
        self._lock = threading.Lock()
        self._starts = threading.Semaphore(STARTS)
        self._start_locks: dict[str, threading.Lock] = {}
        self._pools: dict[str, Pool] = {}
        self._last_used: dict[str, float] = {}  # time of a tenant's last session or admission
        self._last_admitted: dict[str, float] = {}
        self._starting_tenants: set[str] = set()  # tenants whose pools are not in `_pools` yet
        self._reserve: Pool | None = None
        self._closed = False
        self._events = events
        self._engine, self._requests = engine, requests
        self._users = users or {}
        self._reserved_for = next(iter(self._users), "")
        self._first_pool = Pool(self._configs_of(self._reserved_for), start_timeout, events, engine, requests())

    def wait_ready(self) -> tuple[StartedExecutor, ...]:
        """Wait until the first pool is ready.

        Raises:
            StartupError: an executor of the pool did not start.
        """
        ready = self._first_pool.wait_ready()
        self._reserve = self._first_pool
        return ready

    def start_pool(self, tenant: str, memory: int = 0) -> Pool | Denial:
        """Return the pool of a tenant, or a refusal. Start the pool if necessary.

        `memory`: the tenant's memory quota on each executor, in bytes; 0: the configured limit.
        """
        if self._users and tenant not in self._users:
            return Denial(
                f"this server has no system user for the tenant {tenant!r}: its operator must start it with --tenant-user {tenant}=USER",
                "user",
            )
        with self._lock:
            start_lock = self._start_locks.setdefault(tenant, threading.Lock())
        with start_lock:  # starts a tenant's executors once, without blocking other tenants
            while True:
                with self._lock:
                    pool = self._pools.get(tenant)
                    has_room = len(self._pools.keys() | self._starting_tenants) < self._max_tenants
                    if pool is None and has_room:
                        pool = self._take_reserve(tenant, memory)
                    if pool is not None:
                        self._last_used[tenant] = self._last_admitted[tenant] = time.monotonic()
                        return pool
                    if self._closed:
                        return Denial("the server is shutting down: connect again later", BUSY, retry=True)
                    if has_room:
                        self._starting_tenants.add(tenant)
                        break
                if not self._evict_idlest():
                    return Denial(
                        f"this server has executors for {self._max_tenants} tenants, its maximum, and none is idle: each has a session or was "
                        "admitted within the last minute. Try again later",
                        BUSY,
                        retry=True,
                    )
            try:
                return self._start(tenant, memory)
            finally:
                with self._lock:
                    self._starting_tenants.discard(tenant)

    def statuses(self, tenant: str | None = None) -> tuple[ExecutorStatus, ...]:
        """Return the `djinn status` entries of the executors of a tenant, or of all tenants (None)."""
        pools = self._pools_of(tenant)
        return tuple(
            msgspec.structs.replace(executor.status(), tenant=name)
            for name, pool in pools
            for executor in pool.executors
        )

    def executors(self) -> list[SupervisedExecutor]:
        """Return the executors of all tenants and of the reserve pool."""
        return [executor for _, pool in self._pools_of(None) for executor in pool.executors]

    def pools(self) -> list[tuple[str, Pool]]:
        """Return all pools with the names of their tenants. The name of the reserve pool is empty."""
        return self._pools_of(None)

    def others(self, tenant: str) -> list[tuple[str, Pool]]:
        """Return the pools of the other tenants, which use the same devices."""
        return [(name, pool) for name, pool in self._pools_of(None) if name not in {"", tenant}]

    def least_load(self) -> tuple[float, int]:
        """Return the load of the least loaded device by all tenants, and its number of sessions since a minute ago."""
        pools = [pool for _, pool in self._pools_of(None)]
        loads = [[pool.executors[number].meter.load() for pool in pools] for number in range(len(self._configs))]
        devices = ((sum(load.busy + load.beginning for load in d), sum(load.recent for load in d)) for d in loads)
        return min(((round(busy, 1), recent) for busy, recent in devices), default=(0.0, 0))

    def refresh_loads(self) -> None:
        """Request load reports of all executors if several tenants share devices.

        The assignment of a session requests only the reports of its own tenant.
        """
        pools = [pool for name, pool in self._pools_of(None) if name]
        if len(pools) > 1:
            for pool in pools:
                for executor in pool.executors:
                    executor.refresh_load()

    @property
    def ready(self) -> bool:
        """True if each pool has a ready executor that is not full."""
        return not self._closed and all(isinstance(pool.find(""), tuple) for _, pool in self._pools_of(None))

    def release_idle(self) -> None:
        """End the executors of tenants without a session for `IDLE_SECONDS`, if more than one tenant may connect."""
        if self._expected() < 2:
            return
        for tenant, pool in self._pools_of(None):
            if tenant and not _is_idle(pool):
                self._last_used[tenant] = time.monotonic()
        with self._lock:
            limit = time.monotonic() - IDLE_SECONDS
            idle = {tenant: self._pools.pop(tenant) for tenant, at in list(self._last_used.items()) if at < limit}
            for tenant in idle:
                del self._last_used[tenant], self._last_admitted[tenant]
        for tenant, pool in idle.items():
            _log.info("ending the executors of a tenant: it has had no session for long", tenant=tenant)
            pool.close(0.0)

    def _evict_idlest(self) -> bool:
        """End the executors of the tenant that is idle longest, but was not just admitted. Return False without one."""
        with self._lock:
            pools = [
                (tenant, self._pools[tenant]) for tenant in sorted(self._last_used, key=self._last_used.__getitem__)
            ]
        for tenant, pool in pools:
            if not _is_idle(pool):
                continue
            with self._lock:
                # An admitted client may still use its ticket.
                is_new = time.monotonic() - self._last_admitted.get(tenant, 0.0) < TICKET_SECONDS
                if self._pools.get(tenant) is not pool or is_new:
                    continue
                del self._pools[tenant], self._last_used[tenant], self._last_admitted[tenant]
            _log.info("ending the executors of an idle tenant to admit another tenant", tenant=tenant)
            pool.close(0.0)
            return True
        return False

    def close(self, drain_seconds: float) -> None:
        """Let sessions end for at most `drain_seconds`, then end all processes."""
        with self._lock:
            self._closed = True
            pools = [*self._pools.values(), self._reserve or self._first_pool]
            self._pools, self._last_used, self._last_admitted, self._reserve = {}, {}, {}, None
        closing = [threading.Thread(target=pool.close, args=(drain_seconds,)) for pool in dict.fromkeys(pools)]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _pools_of(self, tenant: str | None) -> list[tuple[str, Pool]]:
        with self._lock:
            pools = list(self._pools.items())
            if self._reserve is not None:
                pools.append(("", self._reserve))
        return [(name, pool) for name, pool in pools if tenant is None or name == tenant]

    def _take_reserve(self, tenant: str, memory: int) -> Pool | None:
        """Assign the reserve pool to a tenant and return it. Return None if none is for it, or `memory` is not 0.

        Start another reserve pool if more tenants may connect. `memory`: as in `start_pool`.
        """
        if self._reserve is None or self._reserved_for not in {"", tenant} or (memory and not self._users):
            return None
        pool, self._reserve = self._reserve, None
        if memory:  # only this tenant can use the pool, which lacks the tenant's memory limit
            pool.close(0.0)
            return None
        self._pools[tenant] = pool
        if not self._users and len(self._pools) < min(self._expected(), self._max_tenants):
            threading.Thread(target=self._refill, name="djinn-reserve", daemon=True).start()
        return pool

    def _refill(self) -> None:
        pool = self._start_ready_pool("")
        if isinstance(pool, Denial):
            return
        with self._lock:
            if self._reserve is None and not self._closed:
                self._reserve = pool
                return
        pool.close(0.0)

    def _start(self, tenant: str, memory: int) -> Pool | Denial:
        pool = self._start_ready_pool(tenant, memory)
        if isinstance(pool, Denial):
            return pool
        with self._lock:
            if not self._closed:
                self._pools[tenant] = pool
                self._last_used[tenant] = self._last_admitted[tenant] = time.monotonic()
                return pool
        pool.close(0.0)
        return Denial("the server is shutting down: connect again later", BUSY, retry=True)

    def _start_ready_pool(self, tenant: str, memory: int = 0) -> Pool | Denial:
        configs = self._configs_of(tenant)
        configs = tuple(_with_memory_limit(config, memory) for config in configs) if memory else configs
        try:
            with self._starts:
                pool = Pool(configs, self._start_timeout, self._events, self._engine, self._requests())
                pool.wait_ready()
        except DjinnError as error:
            _log.error("cannot start executors for a tenant", tenant=tenant or "the next one", error=str(error))
            return Denial("no executor could be started for you: try again later", BUSY, retry=True)
        _log.info("executors for a tenant were started", tenant=tenant or "the next one")
        return pool

    def _configs_of(self, tenant: str) -> tuple[ExecutorConfig, ...]:
        user = self._users.get(tenant)
        return self._configs if user is None else tuple(config.as_user(user) for config in self._configs)


def _is_idle(pool: Pool) -> bool:
    """Return True if all executors of a pool answer, have no session, and were not restarted recently."""
    return all(executor.is_idle(RETURN_SECONDS) for executor in pool.executors)


def _with_memory_limit(config: ExecutorConfig, memory: int) -> ExecutorConfig:
    limit = min(memory, config.memory.limit or memory)
    return attrs.evolve(config, memory=attrs.evolve(config.memory, limit=limit))
