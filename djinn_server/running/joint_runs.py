"""Submissions that strategies with `joins_sessions` can run together with submissions of other sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from djinn_core.wire.numeric_messages import NumericSettings
from djinn_server.running.fair_share import Share
from djinn_server.running.input_aliases import InputAliases
from djinn_server.running.random_state import SessionRandomness
from djinn_server.running.run_request import RunRequest
from djinn_server.running.values import ValueTable
from djinn_server.weights.shared_weights import SessionShares


@attrs.frozen(eq=False)
class JoinableSubmission:
    """A submission, with the parts of its session that a joint run needs.

    Attributes:
        work: the submission.
        slots: numbers that it passes to its template.
        aliases: aliases of the template's inputs.
        values: the session's values.
        shares: the session's shared weights.
        randomness: the session's random state.
        settings: the session's numeric settings.
        share: the session's share of the device.
    """

    work: RunRequest
    slots: Sequence[Any]
    aliases: InputAliases
    values: ValueTable
    shares: SessionShares
    randomness: SessionRandomness
    settings: NumericSettings
    share: Share
