"""Messages between an executor process and its parent: JSON lines over two pipes.

Orders go down the executor's standard input, reports come back on a pipe of their own. Secrets travel this way, never in
arguments or the environment, which other users of the machine can read. The end of the orders means that the parent is
gone.
"""

from __future__ import annotations

from types import NoneType
from typing import Final

import attrs
import msgspec

from djinn_core.config import PluginSetting
from djinn_core.errors import StartupError
from djinn_core.launch.listen_addresses import Places
from djinn_core.wire.message import Count, Name
from djinn_core.wire.messages import DeviceInfo, SessionStatus


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First order: the executor's configuration.

    Attributes:
        directory: private directory for the local socket; the executor removes it when it ends.
        places: where it also listens for the network; None: nowhere.
        key: what the tickets are signed with.
        threads: torch threads, or None for torch's default.
        plugins, disable: the plugins to load, as in the settings; None means everything that is installed.
        plugin_settings: as in the settings, `sendable`.
        log_level, debug: what to log to the standard error output.
        store, store_bytes: directory for weights that need not travel again, and how many bytes it may hold; empty: none.
        warm: safetensors files whose tensors need not travel at all.
        memory: bytes that its sessions may hold; 0: as much as the device has.
        memory_policy: name of the policy that orders evictions then; empty: the built-in one.
        compilers: names of those that compile hot templates, in the order in which they are asked.
        tls_certificate, tls_key, tls_authority: PEM files; it listens for the network under TLS where there are some, and asks
            clients for a certificate of that authority.
        lease_seconds: how long a session waits for a client whose connection broke; 0: it ends with its connection.
        journals, journal_bytes: directory for what sessions take, so that the next executor can go on with them when this one
            dies, and how many bytes each may have; empty: nowhere.
        snapshot_seconds: how often a journal begins anew with the session's state, at most.
        most_sessions: how many sessions there may be at a time.
        queue_seconds: how long a submission may have waited for its turn when one more session begins.
        accounts: directory for what its tenant has used of its time; empty: the next executor counts anew.
    """

    directory: str
    key: bytes
    places: Places | None = None
    threads: int | None = None
    plugins: tuple[str, ...] | None = None
    disable: tuple[str, ...] = ()
    plugin_settings: tuple[PluginSetting, ...] = ()
    log_level: str = "warning"
    debug: str = ""
    store: str = ""
    store_bytes: Count = 0
    warm: tuple[str, ...] = ()
    compilers: tuple[str, ...] = ()
    memory: Count = 0
    memory_policy: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_authority: str = ""
    lease_seconds: float = 0.0
    journals: str = ""
    journal_bytes: Count = 0
    snapshot_seconds: float = 20.0
    most_sessions: Count = 256
    queue_seconds: float = 30.0
    accounts: str = ""

    def __repr__(self) -> str:
        """Without the key."""
        return f"Start(directory={self.directory!r}, places={self.places!r}, threads={self.threads})"


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


class Metered(msgspec.Struct, frozen=True):
    """Metrics of an executor: totals (`counters`), present values (`gauges`), messages by type, and histograms."""

    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    messages: dict[str, int] = {}
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

_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def sendable(given: PluginSetting) -> PluginSetting:
    """The same with a value that JSON can hold: paths and other objects as text, which is read as in a variable."""
    value = given.value
    plain = isinstance(value, (bool, int, float, str, NoneType)) or (
        isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value)
    )
    return given if plain else attrs.evolve(given, value=str(value))


def to_line(message: Order | Answer) -> bytes:
    """The message as one line."""
    return msgspec.json.encode(message) + b"\n"


def read_order(line: bytes) -> Order:
    """The order on a line.

    Raises:
        StartupError: it is none; parent and executor run different versions of Djinn.
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
        StartupError: it is none; parent and executor run different versions of Djinn.
    """
    try:
        return _answers.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StartupError(
            f"cannot read what an executor process reported ({error}): both must run the same Djinn"
        ) from error
