"""Placement groups for the executors of a client or gateway. A group exists while one of its executors exists."""

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

# Ray sets an unset OMP_NUM_THREADS to the processors of an actor, mostly 1. The other variables are secrets.
WITHOUT: Final = ("OMP_NUM_THREADS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_REDIS_PASSWORD")

_CALLS: Final = 16  # concurrent calls of an actor: `wait` lasts until the executor's end, the others are short


@attrs.frozen
class Settings:
    """Settings of the plugin.

    Attributes:
        pending_seconds: maximum seconds that an executor waits for resources of the cluster that are in use.
        growth_seconds: maximum seconds to wait until a growing cluster has the resources. With 0, the cluster does not grow.
        strategy: Ray's placement strategy: `SPREAD` over many nodes or `PACK` on few. With `STRICT_SPREAD`, each executor
            gets a separate node. With `STRICT_PACK`, all executors are on one node.
        journals: folder that all nodes share, so that journals outlive a node. If it is empty, each node has its own.
        prepared_seconds: seconds for which a node keeps an idle process that has imported PyTorch, from which later
            executors are forked. With 0, it keeps none.
    """

    pending_seconds: float = attrs.field(default=300.0, validator=attrs.validators.gt(0))
    growth_seconds: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"
    journals: str = ""
    prepared_seconds: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))


class Group:
    """Placement group of executors that are launched together. Methods may be called from several threads.

    Attributes:
        users: number of executors in the group.
    """

    def __init__(self, ray: ModuleType, settings: Settings, request: LaunchRequest) -> None:
        """Prepare a group, which `take` creates. If the request names a group of the user, use that group.

        Raises:
            StartupError: the cluster does not answer, or it has no group of that name.
        """
        self.ray, self.settings = ray, settings
        self._name, self._count = request.group, request.count
        self._runtime_env = dict(request.runtime_env)
        self._lock = threading.Lock()
        self.users = 0
        self._placement: Any = None
        self._owns_group = not request.placement_group
        wished = {name: amount for name, amount in request.resources.items() if amount}
        if self._owns_group:
            self._bundles = [wished or {"CPU": 1.0}] * request.count
            return
        with self.asking(f"the placement group {request.placement_group!r} of the setting cannot be used"):
            requested = request.placement_group
            self._placement = ray.util.get_placement_group(requested) if isinstance(requested, str) else requested
            self._bundles = [wished or dict(bundle) for bundle in self._placement.bundle_specs]

    def bundle(self, number: int) -> Mapping[str, float]:
        """Return the resources of the executor with this number."""
        return self._bundles[number % len(self._bundles)]

    def lacking(self, nodes: list[Mapping[str, Any]]) -> str:
        """Return why the cluster can never hold the executors, or an empty string if it can.

        A placement group of the user is not checked: return an empty string for it. `nodes`: result of `ray.nodes()`.
        """
        if not self._owns_group:
            return ""
        return resources.lacking(nodes, self._bundles[0], self._count, self.settings.strategy == "STRICT_SPREAD")

    def make_actor(self, holder: type, arguments: tuple[Any, ...], number: int, attempt: int) -> Any:
        """Create the actor of an executor, named and labelled for Ray's dashboard. Return Ray's handle of the actor.

        Args:
            holder: class of the actor.
            arguments: arguments of the class.
            number: number of the executor.
            attempt: number of earlier actors of this executor.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        index = number % len(self._bundles)
        options = resources.actor_options(self.bundle(number)) | {
            "name": f"djinn-{self._name}-{number}" + (f"-{attempt}" if attempt else ""),
            "max_concurrency": _CALLS,
            "max_restarts": 0,  # the client starts a replacement, which recovers the sessions
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._placement, index),
            "_labels": {"djinn.group": self._name, "djinn.executor": str(number)},
        }
        if self._runtime_env:
            options["runtime_env"] = self._runtime_env
        return self.ray.remote(holder).options(**options).remote(*arguments)

    @property
    def without(self) -> tuple[str, ...]:
        """Return the variables that executors must not inherit from Ray, except those in the user's `runtime_env`."""
        variables = self._runtime_env.get("env_vars") or {}
        return tuple(name for name in WITHOUT if name not in variables)

    def loss(self, reason: str) -> str:
        """Return how an executor ended whose actor was lost, as the predicate of a sentence. `reason`: Ray's error."""
        if self.settings.journals:
            return f"was lost with its actor ({reason})"
        return (
            f"was lost with its actor ({reason}). If its node is also lost, its journal is lost: set plugins.ray.journals to a folder that all "
            "nodes share, or use standby=['engine'], so that sessions outlive a node"
        )

    @contextlib.contextmanager
    def asking(self, failed: str) -> Iterator[None]:
        """Convert errors of Ray inside the block to `StartupError`. `failed`: beginning of the message."""
        try:
            yield
        except StartupError:
            raise
        except Exception as error:
            raise StartupError(f"{failed}: {type(error).__name__}: {error}") from error

    def take(self) -> None:
        """Count one more executor of the group. Create the group for the first executor.

        Raises:
            StartupError: the cluster does not answer.
        """
        with self._lock:
            if not self.users and self._owns_group:
                with self.asking("Ray cannot create the placement group of the executors"):
                    name, strategy = f"djinn-{self._name}", self.settings.strategy
                    self._placement = self.ray.util.placement_group(self._bundles, strategy, name=name)
            self.users += 1

    def release(self) -> None:
        """Count one executor less. After the last executor, remove the group if the user did not create it."""
        with self._lock:
            self.users -= 1
            last = self.users == 0
        if last and self._owns_group:
            with contextlib.suppress(Exception):  # the cluster was left
                self.ray.util.remove_placement_group(self._placement)
