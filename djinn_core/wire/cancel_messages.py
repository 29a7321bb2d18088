"""Cancellation messages: submissions that the client no longer needs, and how far another executor ran a submission."""

from typing import Annotated

import msgspec

from djinn_core.wire import limits
from djinn_core.wire.message_base import Count, Message


class CancelSubmissions(Message, frozen=True):
    """Client to executor: cancel these submissions.

    A running submission stops between two ops, the others do not begin.

    The executor still replies to each of them. Using an unfinished result raises.
    """

    submissions: Annotated[tuple[Count, ...], msgspec.Meta(max_length=limits.STOPS)]


class RepeatOutcome(Message, frozen=True):
    """Run the next submission, number `submission`, to the outcome that it had on another executor.

    See `Completed.stopped_at` and `Completed.shortages`.
    """

    submission: Count
    stopped_at: Count | None = None
    shortages: Annotated[tuple[Count, ...], msgspec.Meta(max_length=limits.STOPS)] = ()
