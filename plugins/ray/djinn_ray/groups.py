"""Placement groups: where the executors of a client or a gateway go, as long as one of them is there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final, Literal

import attrs

from djinn.errors import StartupError
from djinn.hooks import LaunchRequest
from djinn_ray import resources

# Ray sets the first to the processors of an actor where it is unset, mostly 1; the others are secrets.
WITHOUT: Final = ("OMP_NUM_THREADS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_REDIS_PASSWORD")

_CALLS: Final = 16  # of an actor at a time: one waits for the executor's end, the others are short


@attrs.frozen
class Settings:
    """Settings of the plugin.

    Attributes:
        pending_seconds: how long an executor may wait for its place on a cluster that could hold it.
        growth_seconds: how long a cluster may take to grow until it could; 0: it does not grow.
        strategy: how executors are placed: on many nodes or on few, `STRICT_SPREAD` each on a node of its own.
        journals: folder that all nodes share, in which journals outlive a node; empty: each node has its own.
        prepared_seconds: how long a node keeps a process that has imported PyTorch, from which its next executors are forked; 0: none.
    """

    pending_seconds: float = attrs.field(default=300.0, validator=attrs.validators.gt(0))
    growth_seconds: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"
    journals: str = ""
    prepared_seconds: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))


class Group:
    """The placement group of the executors that are launched together. Methods may be called from several threads.

    Attributes:
        users: how many executors use it.
    """

    def __init__(self, ray: ModuleType, settings: Settings, request: LaunchRequest) -> None:
        """Without making it; or the user's, where there is one.

        Raises:
            StartupError: the cluster cannot be asked, or it has no group of that name.
        """
        self.ray, self.settings = ray, settings
        self._name, self._count = request.group, request.count
        self._runtime_env = dict(request.runtime_env)
        self._lock = threading.Lock()
        self.users = 0
        self._placement: Any = None
        self._own = not request.placement_group
        wished = {name: amount for name, amount in request.resources.items() if amount}
        if self._own:
            self._bundles = [wished or {"CPU": 1.0}] * request.count
            return
        with self.asking("there is no such placement group"):
            given = request.placement_group
            self._placement = ray.util.get_placement_group(given) if isinstance(given, str) else given
            self._bundles = [wished or dict(bundle) for bundle in self._placement.bundle_specs]

    def bundle(self, number: int) -> Mapping[str, float]:
        """Resources of an executor."""
        return self._bundles[number % len(self._bundles)]

    def lacking(self, nodes: list[Mapping[str, Any]]) -> str:
        """Reason why the cluster could never hold the executors; empty if it could, or the user has made the group."""
        if not self._own:
            return ""
        return resources.lacking(nodes, self._bundles[0], self._count, self.settings.strategy == "STRICT_SPREAD")

    def make_actor(self, holder: type, arguments: tuple[Any, ...], number: int, attempt: int) -> Any:
        """A handle of a new actor, named and labelled for the dashboard of Ray."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        index = number % len(self._bundles)
        options = resources.actor_options(self.bundle(number)) | {
            "name": f"djinn-{self._name}-{number}" + (f"-{attempt}" if attempt else ""),
            "max_concurrency": _CALLS,
            "max_restarts": 0,  # the client starts the next one, which recovers the sessions
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._placement, index),
            "_labels": {"djinn.group": self._name, "djinn.executor": str(number)},
        }
        if self._runtime_env:
            options["runtime_env"] = self._runtime_env
        return self.ray.remote(holder).options(**options).remote(*arguments)

    @property
    def without(self) -> tuple[str, ...]:
        """Names of environment variables that executors do not get; those that the user set there stay."""
        given = self._runtime_env.get("env_vars") or {}
        return tuple(name for name in WITHOUT if name not in given)

    def loss(self, reason: str) -> str:
        """Predicate of a sentence about how an executor ended that was lost with its actor."""
        if self.settings.journals:
            return f"was lost with its actor ({reason})"
        return (
            f"was lost with its actor ({reason}); if its node is lost too, so is its journal: sessions outlive a node with the setting "
            "plugins.ray.journals, a folder that all nodes share, or with standby=['engine'], for which the program logs what it sends"
        )

    @contextlib.contextmanager
    def asking(self, failed: str) -> Iterator[None]:
        """Turn what Ray raises, where it was left or cannot be reached, into `StartupError`."""
        try:
            yield
        except StartupError:
            raise
        except Exception as error:
            raise StartupError(f"{failed}: {type(error).__name__}: {error}") from error

    def take(self) -> None:
        """Note an executor that uses the group, which is made for the first.

        Raises:
            StartupError: the cluster cannot be asked.
        """
        with self._lock:
            if not self.users and self._own:
                with self.asking("there is no placement group for executors"):
                    name, strategy = f"djinn-{self._name}", self.settings.strategy
                    self._placement = self.ray.util.placement_group(self._bundles, strategy, name=name)
            self.users += 1

    def release(self) -> None:
        """Note that an executor does not use it any more; the last one has it removed, unless it is the user's."""
        with self._lock:
            self.users -= 1
            last = self.users == 0
        if last and self._own:
            with contextlib.suppress(Exception):  # the cluster was left
                self.ray.util.remove_placement_group(self._placement)
