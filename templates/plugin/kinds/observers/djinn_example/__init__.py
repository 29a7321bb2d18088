"""An observer for Djinn: add up the seconds in which executors ran programs, in clients and executors."""

from __future__ import annotations

from collections import Counter
from threading import Lock

from djinn.hooks import Event, Observer, hookimpl

djinn_api_version = "2.0"


class ExampleObserver(Observer):
    """Add up the seconds in which programs ran, by tenant. In a client, the tenant is empty."""

    name = "example"
    events = frozenset({"completed"})
    processes = frozenset({"client", "executor"})

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._lock = Lock()

    def observe(self, event: Event) -> None:
        """Add the seconds of a program: `execute` in events of clients, `duration` in events of executors."""
        seconds = event.fields.get("execute", event.fields.get("duration", 0.0))
        with self._lock:  # several threads of a client call this method
            self.seconds[event.fields.get("tenant", "")] += seconds


@hookimpl
def djinn_register_observers() -> list[Observer]:
    """Return the observers of this plugin."""
    return [ExampleObserver()]
