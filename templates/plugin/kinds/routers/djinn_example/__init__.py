"""Router for Djinn that runs every program on the first executor."""

from __future__ import annotations

from djinn.hooks import Part, Router, Submission, hookimpl

djinn_api_version = "2.0"


class ExampleRouter(Router):
    """Choose executors in `route`. Use it with the setting `router`."""

    name = "example"

    def route(self, submission: Submission) -> list[Part]:
        """Return one part, which is the whole submission."""
        return [Part(self.executors.present[0], submission)]


@hookimpl
def djinn_register_routers() -> list[Router]:
    """Return the router of this plugin."""
    return [ExampleRouter()]
