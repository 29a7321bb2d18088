"""Messages of the wire protocol, and their MessagePack codec.

Messages are msgspec structs, encoded as MessagePack with a type tag: decoding builds nothing but these types and checks
every field. Tensor data travels beside the message, as the body of the frame.
"""

from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar

import msgspec

from djinn_core.errors import ProtocolError
from djinn_core.ir.form import Form
from djinn_core.wire import limits
from djinn_core.wire.binding_delta import Handles, InputChanges, Slot, SlotChanges
from djinn_core.wire.cache_messages import CacheReply, CacheRequest
from djinn_core.wire.cancel_messages import CancelSubmissions, RepeatOutcome
from djinn_core.wire.message_base import (
    Address,
    Count,
    Dimensions,
    Failure,
    Identifier,
    Message,
    Name,
    PrintableFields,
    Seconds,
    Secret,
    Ticket,
    Traceparent,
    tag_of,
)
from djinn_core.wire.numeric_messages import NumericSettings
from djinn_core.wire.peer_messages import (
    AwaitTransfer,
    ConnectPeer,
    ConnectPeerReply,
    DropPeer,
    LinkMeasurement,
    LinkProbe,
    MeasureLink,
    PeerAttach,
    PeerAttached,
    PeerTicket,
    PeerTicketRequest,
    SendValues,
    TransferAck,
    TransferChunk,
    TransferHeader,
)
from djinn_core.wire.resume_messages import ControlAttach, ParallelAttach, Resume, Resumed
from djinn_core.wire.state_messages import StateChunk, StateHeader, StateRequest
from djinn_core.wire.timing_messages import ExecutionTimes, TimingsReply, TimingsRequest
from djinn_core.wire.upload_messages import (
    AbortUpload,
    BlobHit,
    BlobNeeded,
    BlobOffer,
    BlobQuery,
    BlobQueryReply,
    UploadPart,
)
from djinn_core.wire.weight_messages import (
    OpenWeights,
    OpenWeightsReply,
    PublishedReply,
    PublishedRequest,
    ReadProgressReply,
    ReadProgressRequest,
    ReadWeights,
    RemoveWeights,
    RemoveWeightsReply,
    SaveWeights,
    SaveWeightsReply,
    SmallFilesReply,
    SmallFilesRequest,
)

PROTOCOL_VERSION = 3
Traits = Annotated[tuple[Name, ...], msgspec.Meta(max_length=4096)]
PRESSURE = ("none", "warning", "critical")  # how short memory is; critical: values were evicted


# --- getting in: client and gateway, then client and executor ------------------------------------------------


class DeviceInfo(msgspec.Struct, frozen=True):
    """A physical device and its software. Sizes are in bytes.

    `memory_free` is None if it is not known. `threads` are those that an op may use on a CPU, `torch` is the version of
    PyTorch; 0 and empty if they are unknown.
    `spill` is the size of the spill space, `pressure` an index into `PRESSURE`. `flops` and `bandwidth` (bytes) are peak rates
    per second; 0 if they are unknown. `dtypes` are those that it computes with (empty: all), `unsupported` ops that it does not run.
    `utilization` (0 to 1) and `temperature` (degrees Celsius) are None if they are not known.
    """

    id: Name
    kind: Name
    name: Name = ""
    memory: Count = 0
    memory_free: Count | None = None
    threads: Count = 0
    torch: Name = ""
    spill: Count = 0
    flops: float = 0.0
    bandwidth: float = 0.0
    pressure: Count = 0
    dtypes: Traits = ()
    unsupported: Traits = ()
    utilization: float | None = None
    temperature: float | None = None


class Hello(Message, frozen=True):
    """First message to a gateway: who asks. An empty `device` asks for the gateway's default.

    `client` is what people see of it in `djinn status`; nothing is decided by it. `hint` is what the program says of its work, for the
    choice of an executor. `secondary`: the session is one of several of this client, which computes on another one first, or it goes on:
    it does not count as load that is to come.
    """

    protocol: int
    token: Secret
    version: Name
    torch: Name
    device: Name = ""
    client: Name = ""
    hint: Name = ""
    secondary: bool = False


class Welcome(Message, frozen=True):
    """The gateway's reply: a one-time `ticket` for an executor, and where it listens.

    `urls` are tried in order of the client's preference; where none can be reached, the client sends `Attach` on the
    gateway's own connection and the gateway passes frames on. `gateway` is where the gateway listens: a client that connected
    to another port came through a tunnel or a proxy, and may not reach `urls`. `devices` are the ids of
    all devices that the server offers, and `number` says which of them the ticket is for: to a server that offers
    several, `Hello` may name a device by its number. `fingerprint` is that of a certificate that only this executor shows, on a
    machine that may be another than the gateway's; empty: it shows the gateway's, on the gateway's machine.
    """

    ticket: Ticket
    urls: tuple[Address, ...]
    version: Name
    torch: Name
    device: DeviceInfo
    gateway: tuple[Address, ...] = ()
    devices: tuple[Name, ...] = ()
    number: Count = 0
    fingerprint: Name = ""


class Refused(PrintableFields, Message, frozen=True):
    """Request rejected, with the reason. The connection is closed afterwards.

    `retry`: the request may be repeated, after `retry_after` seconds. `crashes_executors`: the session crashes every executor that resumes it.
    """

    texts = ("reason",)

    reason: str
    retry: bool = False
    crashes_executors: bool = False
    retry_after: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0


class Attach(Message, frozen=True):
    """First message to an executor. `operators` is the digest of the client's allow-list."""

    ticket: Ticket
    operators: Name


class CustomOperator(msgspec.Struct, frozen=True, array_like=True):
    """A custom op that the session may run, with its schema on the executor."""

    name: Name
    schema: Annotated[str, msgspec.Meta(max_length=limits.SCHEMA)]


class Attached(Message, frozen=True):
    """The executor's reply. `operators` is its allow-list where the digests differ, otherwise None.

    `caches_weights`: it stores weights, so that the client may offer them by digest. `compressions`: compressed encodings of uploads that it
    reads. `instance` identifies the executor process on all machines. If `lease` is more than 0, frames are numbered from now on,
    and a client that shows `secret` may reconnect within `lease` seconds; if it is `recoverable`, also after the executor has died, to
    its replacement. `weight_sources`: schemes of the addresses that it reads weights from.
    `elastic`: it takes `DropPeer`. `custom_operators`: ops outside of `aten` that this session may run.
    """

    session: Name
    process: int
    device: DeviceInfo
    torch: Name
    operators: tuple[Name, ...] | None = None
    caches_weights: bool = False
    compressions: tuple[Name, ...] = ()
    instance: Name = ""
    lease: float = 0.0
    secret: Ticket = ""
    recoverable: bool = False
    weight_sources: tuple[Name, ...] = ()
    elastic: bool = False
    custom_operators: Annotated[tuple[CustomOperator, ...], msgspec.Meta(max_length=limits.CUSTOM_OPERATORS)] = ()


# --- work -----------------------------------------------------------------------------------------------------


class Template(msgspec.Struct, frozen=True):
    """Template: the part of a program that stays the same from one run to the next.

    Values are numbered in order of first appearance. `references` lists for each instruction its operands, then its new
    values. `inputs` are the numbers bound to existing values, `outputs` those that survive; every other value is dropped
    after its last use, as are the inputs in `consumed`.
    """

    forms: tuple[Form, ...]
    code: tuple[int, ...]
    references: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    consumed: tuple[int, ...] = ()


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """Predicted layout of a result of an instruction; the executor copies the result into this layout if it differs."""

    instruction: Count
    result: Count
    shape: Dimensions
    stride: Dimensions
    dtype: Identifier


class Workload(msgspec.Struct, frozen=True, array_like=True):
    """What a template belongs to, for figures of serving; nothing is decided by it.

    `model` is the class of the outermost module that issued its ops. `queries` is the largest number of queries of its attention, 0
    without attention: 1 is a decode step, more may be a prefill.
    """

    model: Name = ""
    queries: Count = 0


class InitialBindings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Bindings of a template's first run, which later runs change: all slots, and handles for all inputs.

    `written` are the values that the program writes to: if it is rejected, they become poison. `workload` is what the template belongs to.
    """

    slots: tuple[Slot, ...]
    inputs: Handles
    written: Handles = ()
    workload: Workload | None = msgspec.field(default=None, name="w")


class Submit(Message, frozen=True):
    """Run a template once. What a loop sends comes first, because defaults at the end are not written.

    Attributes:
        sequence: number of the submission in its session, from 1, without gaps; each is applied exactly once.
        fetch: handles whose tensors come back.
        free: handles to forget: afterwards, and before it runs those that it does not use.
        digest: BLAKE2b-128 of the encoded template.
        outputs: handles for the template's outputs.
        slot_changes, input_changes: the slots and the inputs that differ from those of the template's last run.
        first: all slots and inputs, in place of `slot_changes` and `input_changes`.
        template: the template itself, where the executor may not have it.
        describe: handles whose metadata comes back.
        claims: predicted layouts that the executor has not yet confirmed.
        synchronize: answer only when the device has finished.
        refused: the client cannot send what is to run, and why: its results, and what it writes (`first`), are poison.
        trace: the client's span, of which the executor's is a child, where an observer traces.
    """

    sequence: Count
    fetch: Handles = ()
    free: Handles = ()
    digest: bytes = b""
    outputs: Handles = ()
    slot_changes: SlotChanges = ()
    input_changes: InputChanges = ()
    first: InitialBindings | None = None
    template: Template | None = None
    describe: Handles = ()
    claims: tuple[Claim, ...] = ()
    synchronize: bool = False
    refused: str = ""
    trace: Traceparent = ""


class TensorHeader(msgspec.Struct, frozen=True, tag="t"):
    """A tensor whose bytes are the next buffer of the body. Shape and stride in elements, offset 0."""

    dtype: Identifier
    shape: Dimensions
    stride: Dimensions


class ValueDescription(msgspec.Struct, frozen=True, tag="d"):
    """Metadata of a value that the client could not predict. `scalar` names the Python type where it is not a tensor."""

    dtype: Identifier
    shape: Dimensions
    stride: Dimensions
    offset: Count
    scalar: Name = ""


class LayoutMismatch(msgspec.Struct, frozen=True, array_like=True):
    """A result that the kernel laid out otherwise than predicted, and how: strides in elements."""

    instruction: Count
    result: Count
    stride: Dimensions


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Breakdown of the server's time, in seconds.

    Attributes:
        queue: waiting for a turn on the device. decode: reading the submission.
        execute: device time of the session that became known since its previous reply. On a CPU that is this submission's. On an
            accelerator, events measure it: a submission that waits for the device has its own, another one has earlier ones'.
        encode: getting the results ready to be sent, which waits for the device if it has them.
        pressure: how short the device's memory is, as a place in `PRESSURE`.
    """

    queue: Seconds = 0.0
    decode: Seconds = 0.0
    execute: Seconds = 0.0
    encode: Seconds = 0.0
    pressure: Count = 0


class Room(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that a session may hold on the device now: what is free there, and what it holds. `short`: an op got no memory."""

    nbytes: Count
    short: bool = False


class Completed(Message, frozen=True):
    """The reply to a submission.

    `results` answer `fetch`, `described` answers `describe`, `failures` are the instructions of this submission that
    failed themselves, `layout_mismatches` the results whose layout was not the claimed one, `links` recent measurements of links,
    `room` the memory that the session can have, where that has changed notably, `times` when it ran, where the client asked for that.
    Another executor that is to reach the same values needs `stopped_at`, the op before which a submission was stopped, and `shortages`,
    the ops that ran out of memory.
    """

    sequence: Count
    results: tuple[TensorHeader | Failure, ...] = ()
    described: tuple[ValueDescription | Failure, ...] = ()
    failures: tuple[Failure, ...] = ()
    layout_mismatches: tuple[LayoutMismatch, ...] = ()
    timing: Timing = Timing()
    links: tuple[LinkMeasurement, ...] = ()
    room: Room | None = None
    times: ExecutionTimes | None = None
    stopped_at: Count | None = None
    shortages: Annotated[tuple[Count, ...], msgspec.Meta(max_length=limits.STOPS)] = ()


class ValueHints(Message, frozen=True):
    """Kinds of a template's values: hints for an executor that has to evict some. No result depends on them.

    `phase` is the program's. `inputs` and `outputs` have a letter a value: `w` weight, `k` KV cache, `g` gradient, `o` state of
    an optimizer, `i` input, `a` activation. Sent before the template's first run. `decisions`: what the plan decided and why, a line
    each, for `djinn status` and dashboards.
    """

    digest: bytes
    phase: Name
    inputs: bytes
    outputs: bytes
    decisions: Annotated[tuple[Name, ...], msgspec.Meta(max_length=limits.DECISIONS)] = ()


class TemplateRequest(Message, frozen=True):
    """The executor has no template of that digest; it waits for `TemplateReply`."""

    sequence: Count
    digest: bytes


class TemplateReply(Message, frozen=True):
    """The template that `TemplateRequest` asked for, and all slots and inputs of the submission that waits for it."""

    template: Template
    first: InitialBindings


class ProtocolClose(PrintableFields, Message, frozen=True):
    """Protocol error of the other end. The connection is closed afterwards.

    `stopped`: no protocol error; the server is shutting down.
    """

    texts = ("reason",)

    reason: str
    stopped: bool = False


class StatsRequest(Message, frozen=True):
    """Ask an executor for its memory figures; `reset_peak` has it count the peak again afterwards."""

    reset_peak: bool = False


class StatsReply(Message, frozen=True):
    """Reply to `StatsRequest`: bytes and counts by name."""

    values: dict[str, int]


class Goodbye(Message, frozen=True):
    """End the session and free its values.

    The executor cancels the running submission. `finish`: the executor first handles all earlier messages, because one of them
    writes or removes files.
    """

    finish: bool = False


# --- watching ---------------------------------------------------------------------------------------------------


class StatusRequest(Message, frozen=True):
    """Ask a gateway what it is doing."""

    protocol: int
    token: Secret


class Latency(msgspec.Struct, frozen=True):
    """Percentiles of the latest durations, in seconds; 0 without any."""

    p50: Seconds = 0.0
    p99: Seconds = 0.0


class ServingFigures(msgspec.Struct, frozen=True):
    """Requests of a session or of a model, as `djinn_server.request_times` defines them.

    `requests` and `tokens` are counts. `answer`, `first_token` and `token` are durations of answers outside of generations, of the first
    token of a generation, and of each later one.
    """

    model: Name = ""
    requests: Count = 0
    tokens: Count = 0
    answer: Latency = Latency()
    first_token: Latency = Latency()
    token: Latency = Latency()


class SessionStatus(msgspec.Struct, frozen=True):
    """One session: memory in bytes, age in seconds.

    `phase` is that of its last program, `steps` counts decode or training steps, `seconds` is its time on the device, `kinds` has bytes by
    kind of value, `decisions` what its latest plans decided. `latency` (seconds there and back) and `bandwidth` (bytes a second to the
    client, the most that was seen) are those of its connection; 0 where they are unknown. `host` and `disk` are bytes of an idle one
    in the host's memory and on disk, `shared` those of its memory that other sessions have as well. `serving` are its requests.
    """

    session: Name
    client: Name
    values: Count
    memory: Count
    submissions: Count
    age: float
    phase: Name = ""
    steps: Count = 0
    seconds: Seconds = 0.0
    kinds: dict[Name, Count] = {}
    decisions: tuple[Name, ...] = ()
    latency: Seconds = 0.0
    bandwidth: Seconds = 0.0
    host: Count = 0
    disk: Count = 0
    shared: Count = 0
    serving: ServingFigures = ServingFigures()


class ExecutorStatus(msgspec.Struct, frozen=True):
    """One executor process. `load`: share of the last seconds in which it ran programs, and one for each session that is to begin.

    `figures` are metrics of it under their names in `/metrics`, without what all have in common; `tenant` is whose sessions it runs, empty
    for an executor in reserve. `models` are the requests by model, `queue` the number of submissions by the longest time in seconds
    that they waited for the device, as text. `log` are its latest log lines, for the operator.
    """

    device: DeviceInfo
    process: int
    state: Name
    sessions: tuple[SessionStatus, ...] = ()
    load: Seconds = 0.0
    tenant: Name = ""
    restarts: Count = 0
    figures: dict[Name, float] = {}
    models: tuple[ServingFigures, ...] = ()
    queue: dict[Name, Count] = {}
    log: tuple[Name, ...] = ()


class EventStatus(msgspec.Struct, frozen=True):
    """Something that the gateway noticed: when (seconds since 1970), what, about which tenant (empty: none that is known), facts in words."""

    seconds: Seconds
    name: Name
    tenant: Name = ""
    text: Name = ""


class Status(Message, frozen=True):
    """Reply to `StatusRequest`.

    `load` is that of the least loaded device, by all tenants, in devices, and `recent` the number of sessions that began there within a
    minute: by these a client of several servers chooses. `assignment` is the policy that assigns sessions to executors. `events` are the
    latest that concern the one who asks, the newest last. `instance` identifies the gateway process on all machines.
    """

    version: Name
    process: int
    uptime: float
    executors: tuple[ExecutorStatus, ...]
    load: Seconds = 0.0
    recent: Count = 0
    assignment: Name = ""
    events: tuple[EventStatus, ...] = ()
    instance: Name = ""


def status_facts(status: Status) -> dict[str, Any]:
    """A status as builtin values, as `djinn status --json` shows it and as dashboards take it; `memory_by_owner`: bytes by client."""
    found: dict[str, Any] = msgspec.to_builtins(status.executors)
    owners: dict[str, int] = {}
    for session in (session for executor in status.executors for session in executor.sessions):
        owners[session.client] = owners.get(session.client, 0) + session.memory
    return {
        "version": status.version,
        "process": status.process,
        "uptime": status.uptime,
        "executors": found,
        "memory_by_owner": owners,
        "events": msgspec.to_builtins(status.events),
    }


class Kill(Message, frozen=True):
    """Ask a gateway to end a session, given by an unambiguous prefix of its name."""

    protocol: int
    token: Secret
    session: Name


class Killed(Message, frozen=True):
    """Reply to `Kill`: the whole name of the session that ends, and what its client is called."""

    session: Name
    client: Name


AnyMessage = (
    Hello
    | Welcome
    | Refused
    | Attach
    | Attached
    | Resume
    | Resumed
    | ControlAttach
    | ParallelAttach
    | UploadPart
    | BlobOffer
    | BlobQuery
    | BlobQueryReply
    | BlobNeeded
    | BlobHit
    | AbortUpload
    | Submit
    | Completed
    | ValueHints
    | TemplateRequest
    | TemplateReply
    | ProtocolClose
    | StatsRequest
    | StatsReply
    | TimingsRequest
    | TimingsReply
    | OpenWeights
    | OpenWeightsReply
    | ReadProgressRequest
    | ReadProgressReply
    | ReadWeights
    | PublishedReply
    | PublishedRequest
    | RemoveWeights
    | RemoveWeightsReply
    | SaveWeights
    | SaveWeightsReply
    | SmallFilesRequest
    | SmallFilesReply
    | CacheRequest
    | CacheReply
    | NumericSettings
    | Goodbye
    | StateRequest
    | StateHeader
    | StateChunk
    | CancelSubmissions
    | RepeatOutcome
    | PeerTicketRequest
    | PeerTicket
    | ConnectPeer
    | ConnectPeerReply
    | DropPeer
    | PeerAttach
    | PeerAttached
    | LinkProbe
    | MeasureLink
    | TransferAck
    | SendValues
    | AwaitTransfer
    | TransferHeader
    | TransferChunk
    | StatusRequest
    | Status
    | Kill
    | Killed
)

_encoder = msgspec.msgpack.Encoder()
# Made at the import: msgspec crashes where two threads have it inspect a class for the first time together.
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
M = TypeVar("M", bound=Message)


encode: Final[Callable[[Message], bytes]] = _encoder.encode  # the message as MessagePack


def decode(head: bytes | memoryview) -> AnyMessage:
    """The message in `head`.

    Raises:
        ProtocolError: it is not a message, or a field has a wrong type or is out of range.
    """
    try:
        return _decoder.decode(head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ProtocolError(f"cannot read a message of {len(head)} bytes: {error}") from error


def is_of_kind(head: bytes, kind: type[Message]) -> bool:
    """True if `head` begins with the tag of the message class. The rest is not decoded, and may be malformed."""
    return head.startswith(msgspec.msgpack.encode(tag_of(kind)), 1)  # after the byte that says how many fields follow


def expect(head: bytes | memoryview, kind: type[M]) -> M:
    """The message in `head`, which must be of type `kind`.

    Raises:
        ProtocolError: it is not.
    """
    message = decode(head)
    if not isinstance(message, kind):
        detail = f": {message.reason}" if isinstance(message, Refused | ProtocolClose) else ""
        raise ProtocolError(f"expected {kind.__name__}, got {type(message).__name__}{detail}")
    return message
