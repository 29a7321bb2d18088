"""A server observer for Djinn: counts the seconds for which each tenant had a device."""

from __future__ import annotations

from collections import Counter

from djinn.hooks import ServerEvent, ServerObserver, hookimpl

djinn_api_version = "2.0"


class ExampleObserver:
    """Adds up durations of submissions by tenant, in each executor process."""

    name = "example"

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def observe(self, event: ServerEvent) -> None:
        """Called on a thread of its own, one event after the other."""
        if event.name == "completed":
            self.seconds[event.fields.get("tenant", "")] += event.fields.get("duration", 0.0)


@hookimpl
def djinn_register_server_observers() -> list[ServerObserver]:
    """The server observers that this plugin offers."""
    return [ExampleObserver()]
