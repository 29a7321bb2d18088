"""Submissions that several sessions may run together, for run strategies with `joins_sessions`."""

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
    """A submission and the parts of its session that a joint run needs.

    Attributes:
        work, slots, aliases: the submission, its numbers, and the aliases of its inputs.
        values, shares, randomness, settings: the session's. share: its share of the device.
    """

    work: RunRequest
    slots: Sequence[Any]
    aliases: InputAliases
    values: ValueTable
    shares: SessionShares
    randomness: SessionRandomness
    settings: NumericSettings
    share: Share
