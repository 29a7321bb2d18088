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
        bound: the template with its bindings; None if the submission only fetches or frees values.
        work: what the submission asks for.
        submit: the client's message.
        slots: numbers that the submission passes to its template.
        started: time (`time.perf_counter`, as all times) at which the message was received.
        decoded: time at which the message was decoded.
        waited: time at which all operands were available.
        pending: the run, in the form in which another session can execute it; None if no other session may.
        begun: time at which the session first had the device; 0.0 before that.
        executed: time at which the last op had run, or was issued to an accelerator.
        freed: handles that were freed before the submission ran.
        outcome: failures and numbers of the run. It is set when the run ends.
        responses: fetched values of the reply. They are set when the reply begins.
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
