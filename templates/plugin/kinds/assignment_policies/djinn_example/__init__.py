"""An assignment policy for Djinn: sessions begin where most memory is free."""

from __future__ import annotations

from djinn.hooks import AssignmentPolicy, AssignmentRefusal, AssignmentRequest, hookimpl

djinn_api_version = "2.0"


class ExamplePolicy(AssignmentPolicy):
    """Used where `djinn serve --assignment example` names it."""

    name = "example"

    def assign(self, request: AssignmentRequest) -> int | AssignmentRefusal:
        """Number of the executor that the session begins on."""
        return max(request.executors, key=lambda load: load.memory_free or 0).number


@hookimpl
def djinn_register_assignment_policies() -> list[AssignmentPolicy]:
    """The assignment policies that this plugin offers."""
    return [ExamplePolicy()]
