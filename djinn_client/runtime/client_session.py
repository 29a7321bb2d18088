"""Interface of an open session, with one executor or with several that work as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from djinn_client.interception.runtime_interface import Runtime
from djinn_client.runtime.planning.planner import Planner

if TYPE_CHECKING:
    from djinn_client.runtime.pool.membership import Membership
    from djinn_core.ir.costs import NetworkTopology
    from djinn_core.ir.profile import WorkloadProfile


class ClientSession(Runtime, Protocol):
    """An open session."""

    @property
    def server(self) -> str:
        """Address that was reached; of several executors, all of them."""

    @property
    def lost(self) -> str:
        """Reason why the session is lost, or that it was closed; empty while it is open."""

    @property
    def successor(self) -> ClientSession | None:
        """As `Runtime.successor`."""

    @property
    def membership(self) -> Membership | None:
        """The executors, where there are several."""

    @property
    def topology(self) -> NetworkTopology | None:
        """The executors' devices and the links between them as they are now; None if there is only one."""

    @property
    def last_profile(self) -> WorkloadProfile | None:
        """Profile of the whole program that was sent last; None if none was sent."""

    def home(self, storage: int) -> int | None:
        """Number of the executor that has the memory of a storage, from 0; None if none has it yet."""

    def plan_by(self, planner: Planner) -> None:
        """Replan from now on, with another planner. The caller holds the recorders' lock."""

    def cancel(self, thread: int | None = None) -> None:
        """Stop the unanswered submissions of a thread, or of all threads; waits for them end."""

    @property
    def changes_files(self) -> bool:
        """True while a request to write or remove weights is unanswered."""

    def close(self, *, finish: bool = False) -> None:
        """End the session; its executors free its values. `finish`: the executors first complete all earlier requests."""
