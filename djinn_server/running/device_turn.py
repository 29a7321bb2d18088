"""State of a submission while its session has the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from djinn_core.wire.messages import Submit
from djinn_server.hookspecs.run_strategies import JointRun
from djinn_server.running.bound_templates import BoundTemplate
from djinn_server.running.responses import Responses
from djinn_server.running.run import RunOutcome
from djinn_server.running.run_request import RunRequest


@attrs.define(eq=False)
class DeviceTurn:
    """A submission that runs while its session has the device, and its results.

    Attributes:
        slots: numbers that the submission passes to its template.
        started: time at which its message was received.
        decoded: time at which its message was decoded.
        waited: time at which all operands were available.
        begun: time at which the session first had the device; 0.0 before that.
        executed: time at which the last op had run or was issued.
        freed: handles that were freed before the submission ran.
    """

    bound: BoundTemplate | None
    work: RunRequest
    submit: Submit
    slots: Sequence[Any]
    started: float
    decoded: float
    waited: float
    pending: JointRun | None = None
    begun: float = 0.0
    executed: float = 0.0
    freed: set[int] = attrs.field(factory=set)
    outcome: RunOutcome = attrs.field(init=False)
    responses: Responses = attrs.field(init=False)
