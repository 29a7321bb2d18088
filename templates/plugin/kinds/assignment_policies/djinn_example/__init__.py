"""An assignment policy for Djinn: begin a session on the executor with the most free memory."""

from __future__ import annotations

from djinn.hooks import AssignmentPolicy, AssignmentRefusal, AssignmentRequest, hookimpl

djinn_api_version = "2.0"


class ExamplePolicy(AssignmentPolicy):
    """Used if `djinn serve --assignment example` names it."""

    name = "example"

    def assign(self, request: AssignmentRequest) -> int | AssignmentRefusal:
        """Return the number of the executor for a new session."""
        return max(request.executors, key=lambda load: load.memory_free or 0).number


@hookimpl
def djinn_register_assignment_policies() -> list[AssignmentPolicy]:
    """Return the assignment policies of this plugin."""
    return [ExamplePolicy()]
