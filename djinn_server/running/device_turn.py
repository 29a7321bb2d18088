"""The turn of a submission on the device."""

from __future__ import annotations

import attrs

from djinn_server.batching.batch import PendingRun
from djinn_server.running.bound_templates import BoundTemplate
from djinn_server.running.responses import Responses
from djinn_server.running.run import RunOutcome
from djinn_server.running.run_request import RunRequest


@attrs.define(eq=False)
class DeviceTurn:
    """Work of a submission during its session's turn, with its results.

    Attributes:
        begun: time of its first turn; 0.0 before that. executed: time at which its last op had run or was issued.
        freed: handles that were freed before it ran.
    """

    known: BoundTemplate | None
    work: RunRequest
    pending: PendingRun | None
    begun: float = 0.0
    executed: float = 0.0
    freed: set[int] = attrs.field(factory=set)
    outcome: RunOutcome = attrs.field(init=False)
    responses: Responses = attrs.field(init=False)
