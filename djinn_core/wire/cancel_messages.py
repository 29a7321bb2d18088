"""Cancellation messages: submissions that the client does not need any more, and how far another executor ran one."""

from typing import Annotated

import msgspec

from djinn_core.wire import limits
from djinn_core.wire.message_base import Count, Message


class CancelSubmissions(Message, frozen=True):
    """Cancel these submissions: a running one stops between two ops, the others do not begin.

    The executor replies to each of them anyway. Using an unfinished result raises.
    """

    submissions: Annotated[tuple[Count, ...], msgspec.Meta(max_length=limits.STOPS)]


class RepeatOutcome(Message, frozen=True):
    """Run submission `submission`, which comes next, as another executor did: see `Completed.stopped_at` and `Completed.shortages`."""

    submission: Count
    stopped_at: Count | None = None
    shortages: Annotated[tuple[Count, ...], msgspec.Meta(max_length=limits.STOPS)] = ()
