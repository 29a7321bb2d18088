"""Handle of an executor whose holder is a Ray actor.

The actor's class is `ExecutorHolder` of djinn-launchers, so nodes need neither this package nor client packages.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from djinn.errors import StartupError
from djinn.hooks import ExecutorHandle, ExecutorHolder, get_logger
from djinn_core.registry.version import djinn_version
from djinn_ray import resources
from djinn_ray.draining import draining_nodes
from djinn_ray.groups import Group

_LOOK_SECONDS: Final = 5.0  # seconds between progress messages while an executor waits for its place
_RETRY_SECONDS: Final = 0.5  # seconds between calls of an unreachable actor
_LOST: Final = -9
_log = get_logger("djinn.launch.ray")


class RayHandle(ExecutorHandle):
    """Handle of an executor whose holder is a Ray actor in a bundle of a placement group."""

    def __init__(
        self,
        arguments: tuple[Any, ...],
        group: Group,
        number: int,
        notify: Callable[[str], None],
        attempt: int = 0,
    ) -> None:
        """Create the actor without waiting.

        Args:
            arguments: arguments of the holder.
            group: placement group of the actor.
            number: number of the executor in the group.
            notify: function that shows a progress message to the user.
            attempt: number of earlier actors of this executor.

        Raises:
            StartupError: the cluster does not answer.
        """
        self._arguments, self._group, self._number, self._notify = arguments, group, number, notify
        self._attempt = attempt
        self._lock = threading.Lock()
        self._over: tuple[int, str] | None = None
        self._has_ended = self._has_place = False
        self._node = ""
        with group.asking("Ray cannot create the actor of an executor"):
            self._actor = group.make_actor(ExecutorHolder, arguments, number, attempt)
            self._placed = self._actor.version.remote()
            self._gone = self._actor.wait.remote()

    def wait_placed(self) -> None:
        """Wait until Ray has started the actor, at most for the setting `pending_seconds`.

        Raises:
            StartupError: the cluster has too few resources or does not answer, the actor cannot be created, or a node has
                another version of Djinn.
        """
        began, last_notice = time.monotonic(), 0.0
        ray, settings = self._group.ray, self._group.settings
        while not ray.wait([self._placed], timeout=0.5 if last_notice == 0.0 else 1.0)[0]:
            seconds = time.monotonic() - began
            with self._group.asking("the Ray cluster does not report its resources"):
                nodes = ray.nodes()
                free = ray.available_resources()
            reason = self._group.lacking(nodes)
            if reason and seconds >= settings.growth_seconds:
                raise StartupError(
                    f"{reason}. Reduce the setting `resources`, or set plugins.ray.growth_seconds if the cluster can grow"
                )
            if seconds >= settings.pending_seconds:
                raise StartupError(
                    f"the Ray cluster did not start executor {self._number} in {seconds:.0f} s: it needs "
                    f"{resources.shown(self._group.bundle(self._number))}, and all nodes together have "
                    f"{resources.shown(free)} free. See the use of resources with `ray status`, or raise plugins.ray.pending_seconds to wait longer"
                )
            if seconds - last_notice >= _LOOK_SECONDS or not last_notice:
                last_notice = max(seconds, 0.001)
                state = reason or f"its nodes have {resources.shown(free)} free"
                self._notify(f"waiting for the Ray cluster to start executor {self._number} ({seconds:.0f} s): {state}")
        self._has_place = True
        node_version = self._get(self._placed, 0.0)
        if node_version != djinn_version():
            raise StartupError(
                f"a node of the Ray cluster has Djinn {node_version}, and this program has Djinn {djinn_version()}: "
                "install the same version on all nodes, or name it in the setting `runtime_env`"
            )

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Call a method of the holder, and return its result. If Ray cannot reach the actor, retry until `timeout` seconds.

        Raises:
            StartupError: the call fails.
        """
        if not self._has_place and not self._group.ray.wait([self._placed], timeout=0.0)[0]:
            raise StartupError(f"the Ray cluster has not started executor {self._number} yet")
        deadline = time.monotonic() + timeout
        exceptions = self._group.ray.exceptions
        while True:
            try:
                with self._group.asking("Ray cannot call the actor of an executor"):
                    reference = getattr(self._actor, method).remote(*arguments)
                return self._get(reference, max(0.0, deadline - time.monotonic()))
            except exceptions.ActorUnavailableError as error:
                if time.monotonic() + _RETRY_SECONDS > deadline:
                    raise StartupError(
                        f"Ray cannot reach the actor of executor {self._number}: {_line(error)}"
                    ) from error
                time.sleep(_RETRY_SECONDS)

    def _get(self, reference: Any, timeout: float) -> Any:
        """Return the result of a call, given its Ray reference.

        Raises:
            ActorUnavailableError: Ray's error for a call that may be retried.
            StartupError: any other failure.
        """
        exceptions = self._group.ray.exceptions
        try:
            return self._group.ray.get(reference, timeout=timeout)
        except exceptions.ActorUnavailableError:
            raise
        except exceptions.GetTimeoutError:
            raise StartupError(f"the actor of executor {self._number} did not answer in {timeout:.0f} s") from None
        except exceptions.RayTaskError as error:
            raise StartupError(
                _startup_message(error.cause if isinstance(error.cause, Exception) else error)
            ) from error
        except exceptions.RayActorError as error:
            raise StartupError(_reason(error)) from error
        except Exception as error:  # Ray raises various errors after the cluster was left
            raise StartupError(f"the Ray cluster does not answer: {_line(error)}. See `ray status`") from error

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method of the holder without waiting. Do nothing if the holder has ended."""
        with contextlib.suppress(StartupError), self._group.asking("Ray cannot call the actor of an executor"):
            getattr(self._actor, method).remote(*arguments)

    def wait(self) -> tuple[int, str]:
        """Wait until the executor or its holder has ended. Return exit status and description, as `ExecutorHandle.wait`."""
        while (over := self._exit_reason(60.0)) is None:
            pass
        return over

    @property
    def ended(self) -> bool:
        """Return True if the executor or its holder has ended."""
        return self._exit_reason(0.0) is not None

    def _exit_reason(self, timeout: float) -> tuple[int, str] | None:
        """Return exit status and description of the executor's end, or None if it does not end in `timeout` seconds."""
        with self._lock:
            reference = self._gone
            if self._over is not None:
                return self._over
        ray = self._group.ray
        try:
            if not ray.wait([reference], timeout=timeout)[0]:
                return None
            status, how = ray.get(reference)
            over = (int(status), str(how))
        except ray.exceptions.ActorUnavailableError:  # temporarily unreachable, not dead
            time.sleep(min(timeout, _RETRY_SECONDS))
            with self._lock, contextlib.suppress(Exception):
                self._gone = self._actor.wait.remote()
            return None
        except Exception as error:
            over = (_LOST, self._group.loss(_line(error)))
        with self._lock:
            if self._over is None:
                self._over = over
            return self._over

    def notice(self) -> str:
        """Return a message if Ray drains the node of the executor, otherwise an empty string.

        Programs that reach the cluster over `ray://` always get an empty string.
        """
        if not self._has_place:
            return ""
        try:
            draining, self._node = draining_nodes(self._actor, self._node)
        except Exception as error:  # a Ray version without this function, or the cluster was left
            _log.debug("Ray does not report which nodes it drains", error=_line(error))
            return ""
        return f"Ray drains its node {self._node[:8]}" if self._node in draining else ""

    def end(self) -> None:
        """End the holder, and return its resources to the cluster."""
        if not self._has_ended:
            self._has_ended = True
            self._kill()
            self._group.release()

    def _kill(self) -> None:
        with self._lock:
            self._over = self._over or (0, "was ended")
        with contextlib.suppress(
            Exception
        ):  # Ray raises various errors for ended actors, and after the cluster was left
            self._group.ray.kill(self._actor)

    def restart(self) -> RayHandle:
        """End the actor, and start another actor in the same bundle. If the node was lost, Ray moves the bundle."""
        self._kill()
        if self._has_ended:  # `end` has returned the resources
            self._group.take()
        self._has_ended = False
        handle = RayHandle(self._arguments, self._group, self._number, self._notify, self._attempt + 1)
        self._has_ended = True
        return handle


def _reason(error: BaseException) -> str:
    """Return an error message for an actor that could not be created or has died."""
    text = str(error)
    if "failed to import" in text or "ModuleNotFoundError" in text:
        last = [line for line in text.splitlines() if "Error" in line]
        return (
            f"a node of the Ray cluster lacks a package ({(last or [text])[-1].strip()}): install Djinn, PyTorch and the plugins on all nodes, "
            "use an image with these packages, or name them in the setting `runtime_env`, as {'pip': [...]}"
        )
    cause = getattr(error, "cause", None) or getattr(error, "__cause__", None)
    if isinstance(cause, Exception):
        return _startup_message(cause)
    return f"the Ray cluster lost the actor of an executor: {_last_line(text)}"


def _startup_message(error: Exception) -> str:
    return (
        str(error)
        if isinstance(error, StartupError)
        else f"an executor did not start on a node of the Ray cluster: {_last_line(str(error))}"
    )


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _last_line(text: str) -> str:
    return ([line.strip() for line in text.splitlines() if line.strip()] or [""])[-1]
