"""The turn of a submission on the device."""

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
    """Work of a submission during its session's turn, with its results.

    Attributes:
        slots: its numbers. started, decoded, waited: times at which its message was received, was decoded, and had all operands.
        begun: time of its first turn; 0.0 before that. executed: time at which its last op had run or was issued.
        freed: handles that were freed before it ran.
    """

    known: BoundTemplate | None
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
