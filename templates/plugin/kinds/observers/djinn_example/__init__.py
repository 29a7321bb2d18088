"""An observer for Djinn: counts events and adds up how long they took."""

from __future__ import annotations

from collections import Counter
from threading import Lock

from djinn.hooks import Event, Observer, hookimpl

djinn_api_version = "2.0"


class ExampleObserver:
    """Counts events by name, and their durations in seconds."""

    name = "example"

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self._lock = Lock()

    def observe(self, event: Event) -> None:
        """Called on the thread that caused the event, so it must be quick."""
        with self._lock:
            self.counts[event.name] += 1
            self.seconds[event.name] += event.fields.get("duration", 0.0)


@hookimpl
def djinn_register_observers() -> list[Observer]:
    """The observers that this plugin offers."""
    return [ExampleObserver()]
