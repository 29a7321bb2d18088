"""The engine `ray`: connects to the cluster, and creates an actor for each executor."""

from __future__ import annotations

import atexit
import signal
import threading
from types import ModuleType
from weakref import WeakValueDictionary

import djinn
from djinn.errors import StartupError
from djinn.hooks import ExecutorEngine, ExecutorOptions, LaunchRequest
from djinn_ray import resources
from djinn_ray.actor import RayHandle
from djinn_ray.groups import Group, Settings

__all__ = ["RayEngine", "Settings"]


class RayEngine(ExecutorEngine):
    """Starts executors on the nodes of a Ray cluster: `djinn.configure(engine="ray", engine_address="ray://head:10001")`."""

    name = "ray"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._groups: WeakValueDictionary[str, Group] = WeakValueDictionary()  # for as long as executors use them

    def launch(self, options: ExecutorOptions, request: LaunchRequest) -> RayHandle:
        """Start an executor and return its handle at once.

        Raises:
            StartupError: Ray is not installed, or the cluster does not answer.
        """
        with self._lock:
            ray = _connected(request.address)
            group = self._groups.get(request.group)
            if group is None or not group.users:
                group = self._groups[request.group] = Group(ray, self._settings, request)
        with group.asking("the Ray cluster does not report its nodes"):
            head = resources.head_address(ray.nodes())
        threads = 0 if options.threads else resources.threads_of(request.resources)
        journals, prepared_seconds = self._settings.journals, self._settings.prepared_seconds
        group.take()
        try:
            return RayHandle(
                (
                    options.encode(),
                    request.place,
                    head,
                    journals,
                    request.count,
                    threads,
                    group.without,
                    prepared_seconds,
                ),
                group,
                request.number,
                request.notify,
            )
        except BaseException:
            group.release()
            raise


def _connected(address: str) -> ModuleType:
    """Connect to the cluster at `address` if the program is not connected to one. Return the module `ray`.

    Raises:
        StartupError: Ray is not installed, or no cluster answers.
    """
    try:
        import ray
    except ImportError as error:
        raise StartupError(
            f"the engine ray needs the package ray, which cannot be imported ({error}): run `pip install 'ray[client]>=2.40'`"
        ) from error
    if not ray.is_initialized():
        try:
            before = signal.getsignal(signal.SIGTERM)
            ray.init(address=address or "auto", log_to_driver=False, logging_level="WARNING")
        except Exception as error:
            raise StartupError(
                f"no Ray cluster answers at {address or 'the default address of this machine'} "
                f"({type(error).__name__}: {error}): start one with `ray start --head`, or name its address with "
                "djinn.configure(engine_address='ray://head:10001')"
            ) from error
        # Ray's SIGTERM handler raises SystemExit, even in a gateway that ends its sessions on SIGTERM.
        if before not in {signal.SIG_DFL, None} and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
        # Must run before Ray leaves the cluster, which ends the executors. Handlers run in reverse order, and Ray's is
        # registered by now.
        atexit.register(djinn.shut_down)
    ray_module: ModuleType = ray
    return ray_module
