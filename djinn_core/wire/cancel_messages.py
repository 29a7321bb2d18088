"""Cancellation message: the client stops submissions that it does not need any more."""

from typing import Annotated

import msgspec

from djinn_core.wire import limits
from djinn_core.wire.message_base import Count, Message


class CancelSubmissions(Message, frozen=True):
    """Cancel these submissions: the one that runs is stopped between two ops, the others do not begin.

    Each is answered all the same. Unfinished results raise when they are used.
    """

    submissions: Annotated[tuple[Count, ...], msgspec.Meta(max_length=limits.STOPS)]
