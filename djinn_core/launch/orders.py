"""Messages between an executor process and its parent: JSON lines over two pipes.

Orders go down the executor's standard input, reports come back on a pipe of their own. Secrets travel this way, never in
arguments or the environment, which other users of the machine can read. The end of the orders means that the parent is
gone.
"""

from __future__ import annotations

from typing import Final

import msgspec

from djinn_core.errors import StartupError
from djinn_core.launch.executor_config import ExecutorConfig
from djinn_core.wire.message_base import Count, Name
from djinn_core.wire.messages import DeviceInfo, SessionStatus


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First order: the executor's configuration.

    Attributes:
        directory: private directory for the local socket; the executor removes it when it ends.
        key: what the tickets are signed with.
        config: what to be; its settings of plugins are `sendable`.
    """

    directory: str
    key: bytes
    config: ExecutorConfig

    def __repr__(self) -> str:
        """Without secrets: the key, and settings of plugins."""
        return f"Start(directory={self.directory!r}, device={self.config.device!r})"


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Ask for a `Sessions` report with the same number."""

    number: Count


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no new sessions, wait at most `seconds` for those that run, then end."""

    seconds: float


class Evict(msgspec.Struct, frozen=True, tag="evict"):
    """End the sessions that were opened with one of these tokens (their ids), which are no longer valid."""

    tokens: tuple[str, ...]


class End(msgspec.Struct, frozen=True, tag="end"):
    """End a session: stop its computation and tell its client the reason."""

    session: Name
    reason: str


class Belong(msgspec.Struct, frozen=True, tag="belong"):
    """Assign the executor to a tenant. It recovers no other tenant's sessions, even for a client that has their secrets."""

    tenant: str


Order = Start | Report | Drain | Evict | End | Belong


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The executor listens at `urls`; the first is for this machine only."""

    urls: tuple[str, ...]
    process: int
    device: DeviceInfo
    torch: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The executor could not start."""

    reason: str


class Distribution(msgspec.Struct, frozen=True):
    """Histogram: counts of durations by upper bound in seconds (`bounds`, and one bucket above the last), and their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class LabelledValue(msgspec.Struct, frozen=True):
    """One value of a metric with labels of its own: their values, in the order in which the metric names them."""

    labels: tuple[str, ...]
    value: float


class Metered(msgspec.Struct, frozen=True):
    """Metrics of an executor: totals (`counters`), present values (`gauges`), both `labelled` as well, and histograms."""

    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    labelled: dict[str, tuple[LabelledValue, ...]] = {}
    distributions: dict[str, Distribution] = {}


class Sessions(msgspec.Struct, frozen=True, tag="sessions"):
    """Answer to `Report`: the sessions that run. `tokens` are the ids of the tokens with which they were opened."""

    number: Count
    device: DeviceInfo
    sessions: tuple[SessionStatus, ...]
    metered: Metered = Metered()
    tokens: tuple[str, ...] = ()


FULL_SECONDS: Final = 5.0  # for which it holds that there is no room, unless a session ends


class Full(msgspec.Struct, frozen=True, tag="full"):
    """Unsolicited report: a client was refused for lack of room, for `reason`; an empty `reason`: there is room again."""

    reason: str


Answer = Ready | Failed | Sessions | Full

# Paths are what JSON does not have a form for.
_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order, dec_hook=lambda kind, text: kind(text))
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def to_line(message: Order | Answer) -> bytes:
    """The message as one line."""
    return msgspec.json.encode(message, enc_hook=str) + b"\n"


def read_order(line: bytes) -> Order:
    """The order on a line.

    Raises:
        StartupError: it is not valid; parent and executor run different versions of Djinn.
    """
    try:
        return _orders.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StartupError(
            f"an executor cannot read what its parent process ordered ({error}): both must run the same Djinn"
        ) from error


def read_answer(line: bytes) -> Answer:
    """The answer on a line.

    Raises:
        StartupError: it is not valid; parent and executor run different versions of Djinn.
    """
    try:
        return _answers.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StartupError(
            f"cannot read what an executor process reported ({error}): both must run the same Djinn"
        ) from error
