"""An observer for Djinn: adds up for how long executors ran programs, in clients and in executors."""

from __future__ import annotations

from collections import Counter
from threading import Lock

from djinn.hooks import Event, Observer, hookimpl

djinn_api_version = "2.0"


class ExampleObserver(Observer):
    """Adds up the seconds in which programs ran, by tenant; those of a client are its own."""

    name = "example"
    events = frozenset({"completed"})
    processes = frozenset({"client", "executor"})

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._lock = Lock()

    def observe(self, event: Event) -> None:
        """Add what a program took: `execute` in the events of clients, `duration` in those of executors."""
        seconds = event.fields.get("execute", event.fields.get("duration", 0.0))
        with self._lock:  # several threads of a client call it
            self.seconds[event.fields.get("tenant", "")] += seconds


@hookimpl
def djinn_register_observers() -> list[Observer]:
    """The observers that this plugin offers."""
    return [ExampleObserver()]
