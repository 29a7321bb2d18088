"""Interception for Djinn that records nothing."""

from __future__ import annotations

from djinn.hooks import Interception, Submission, hookimpl

djinn_api_version = "2.0"


class ExampleInterception(Interception):
    """Begin to record in `begin`. Use it with the setting `interception`."""

    name = "example"

    def take(self, thread: int | None = None) -> list[Submission]:
        """Return the ops that were recorded since the last call, as a program."""
        return []


@hookimpl
def djinn_register_interception() -> list[Interception]:
    """Return the interception of this plugin."""
    return [ExampleInterception()]
