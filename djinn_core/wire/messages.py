"""Messages of the wire protocol, and their MessagePack codec.

Messages are msgspec structs, encoded as MessagePack with a type tag: decoding creates only these types and checks every
field. Tensor data is the body of the frame.
"""

import functools
import operator
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar

import msgspec

from djinn_core.errors import ProtocolError
from djinn_core.ir.form import Form
from djinn_core.wire import (
    cache_messages,
    cancel_messages,
    limits,
    numeric_messages,
    peer_messages,
    resume_messages,
    state_messages,
    timing_messages,
    upload_messages,
    weight_messages,
)
from djinn_core.wire.binding_delta import Handles, InputChanges, Slot, SlotChanges
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
from djinn_core.wire.peer_messages import LinkMeasurement
from djinn_core.wire.timing_messages import ExecutionTimes

PROTOCOL_VERSION = 3
Traits = Annotated[tuple[Name, ...], msgspec.Meta(max_length=4096)]
PRESSURE = ("none", "warning", "critical")  # memory pressure levels; critical: values were evicted


# --- connecting: client and gateway, then client and executor -----------------------------------------------


class DeviceInfo(msgspec.Struct, frozen=True):
    """A physical device and its software. Sizes are in bytes.

    Attributes:
        memory_free: free bytes; None if unknown.
        threads: threads that an op may use on a CPU; 0 if unknown.
        torch: version of PyTorch; empty if unknown.
        spill: size of the spill space.
        pressure: memory pressure, as an index into `PRESSURE`.
        flops: peak floating-point operations per second; 0 if unknown.
        bandwidth: peak memory bandwidth in bytes per second; 0 if unknown.
        dtypes: supported dtypes; empty if all are supported.
        unsupported: unsupported ops.
        utilization: from 0 to 1; None if unknown.
        temperature: degrees Celsius; None if unknown.
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
    """First message to a gateway: identifies the client.

    Attributes:
        device: the requested device; empty for the gateway's default.
        client: the client's name in `djinn status`; it affects no decision.
        hint: describes the work, for the choice of an executor.
        secondary: True if the session does not count as future load, because the client has a primary session
            elsewhere, or resumes this session.
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
    """The gateway's reply to `Hello`: a one-time `ticket` for an executor, and the addresses of the executor.

    The client tries `urls` in its own order. If it reaches none, it sends `Attach` on the gateway's connection, and
    the gateway relays frames.

    Attributes:
        gateway: addresses at which the gateway listens. A client that connected to another port came through a tunnel
            or a proxy, and may not reach `urls`.
        devices: ids of all devices of the server.
        number: number of the ticket's device. `Hello` may name a device by number.
        fingerprint: fingerprint of the executor's own certificate; the executor may be on another machine. Empty if the
            executor uses the gateway's certificate, on the gateway's machine.
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
    """The server rejects a request, and says why. It closes the connection afterwards.

    Attributes:
        retry: True if the request may be repeated, after `retry_after` seconds.
        crashes_executors: True if the session crashes every executor that resumes it.
    """

    texts = ("reason",)

    reason: str
    retry: bool = False
    crashes_executors: bool = False
    retry_after: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0


class Attach(Message, frozen=True):
    """First message to an executor.

    Attributes:
        operators: digest of the client's allow-list.
    """

    ticket: Ticket
    operators: Name


class CustomOperator(msgspec.Struct, frozen=True, array_like=True):
    """A custom op that the session may run, with its schema on the executor."""

    name: Name
    schema: Annotated[str, msgspec.Meta(max_length=limits.SCHEMA)]


class Attached(Message, frozen=True):
    """The executor's reply to `Attach`.

    If `lease` is above 0, frames are numbered from now on.

    Attributes:
        operators: the executor's allow-list if the digests differ, otherwise None.
        caches_weights: True if it stores weights, so that the client may send their digests first.
        compressions: supported encodings of compressed uploads.
        instance: id of the executor process, unique on all machines.
        lease: seconds within which a client that presents `secret` may reconnect.
        recoverable: True if the client may also reconnect to a replacement of a dead executor.
        weight_sources: address schemes for weights.
        elastic: True if it accepts `DropPeer`.
        custom_operators: ops outside of `aten` that this session may run.
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
    """The constant part of a repeated program.

    Values are numbered in order of first appearance. Values are dropped after their last use, except inputs that are
    not in `consumed`, and `outputs`.

    Attributes:
        references: for each instruction its operands, then its new values.
        inputs: numbers of existing values.
        outputs: numbers of values that survive.
    """

    forms: tuple[Form, ...]
    code: tuple[int, ...]
    references: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    consumed: tuple[int, ...] = ()


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """Predicted layout of a result of an instruction. The executor copies the result into this layout if it differs."""

    instruction: Count
    result: Count
    shape: Dimensions
    stride: Dimensions
    dtype: Identifier


class Workload(msgspec.Struct, frozen=True, array_like=True):
    """The workload of a template, for serving metrics. It affects no decision.

    Attributes:
        model: class of the outermost module that issued its ops.
        queries: largest number of queries of its attention; 0 without attention. 1 is a decode step, more may be a
            prefill.
    """

    model: Name = ""
    queries: Count = 0


class InitialBindings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Bindings of a template's first run: all slots, and handles for all inputs. Later runs send changes.

    Attributes:
        written: values that the program writes. If the program is rejected, they become poison.
        workload: workload of the template.
    """

    slots: tuple[Slot, ...]
    inputs: Handles
    written: Handles = ()
    workload: Workload | None = msgspec.field(default=None, name="w")


class Submit(Message, frozen=True):
    """Run a template once. Fields that loops use come first, because trailing defaults are not encoded.

    Attributes:
        sequence: number of the submission in its session, from 1, without gaps; each is applied exactly once.
        fetch: handles of tensors to return.
        free: handles to free after the run. Values that the run does not use are freed before it.
        digest: BLAKE2b-128 of the encoded template.
        outputs: handles for the template's outputs.
        slot_changes: slots that differ from the template's last run.
        input_changes: inputs that differ from the template's last run.
        first: all slots and inputs, in place of `slot_changes` and `input_changes`.
        template: the template itself, if the executor may lack it.
        describe: handles of values whose metadata to return.
        claims: predicted layouts that the executor has not yet confirmed.
        synchronize: reply only when the device has finished.
        refused: reason why the client cannot send the program. Its results and `first.written` become poison.
        trace: the client's span, the parent of the executor's span. Empty without tracing.
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
    """A tensor whose bytes are the next buffer of the body. Shape and stride are in elements. The offset is 0."""

    dtype: Identifier
    shape: Dimensions
    stride: Dimensions


class ValueDescription(msgspec.Struct, frozen=True, tag="d"):
    """Metadata of a value that the client could not predict.

    Attributes:
        scalar: name of the Python type if the value is not a tensor.
    """

    dtype: Identifier
    shape: Dimensions
    stride: Dimensions
    offset: Count
    scalar: Name = ""


class LayoutMismatch(msgspec.Struct, frozen=True, array_like=True):
    """A result whose layout differs from the prediction, with the actual strides in elements."""

    instruction: Count
    result: Count
    stride: Dimensions


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Breakdown of the server's time, in seconds.

    Attributes:
        queue: waiting for a turn on the device.
        decode: reading the submission.
        execute: device time of the session that was measured since its previous reply. On a CPU, it is the time of this
            submission. On an accelerator, events measure it. If this submission waits for the device, its time is
            included; otherwise a later reply reports it.
        encode: preparing the results, which includes a wait for the device.
        pressure: memory pressure of the device, as an index into `PRESSURE`.
    """

    queue: Seconds = 0.0
    decode: Seconds = 0.0
    execute: Seconds = 0.0
    encode: Seconds = 0.0
    pressure: Count = 0


class Room(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that a session may hold on the device now: free bytes plus its own.

    Attributes:
        short: True if an allocation failed.
    """

    nbytes: Count
    short: bool = False


class Completed(Message, frozen=True):
    """The executor's reply to a submission.

    Another executor needs `stopped_at` and `shortages` to compute the same values.

    Attributes:
        results: tensors that `fetch` requested.
        described: metadata that `describe` requested.
        failures: failed instructions of this submission.
        layout_mismatches: results with unexpected layouts.
        links: recent link measurements.
        room: memory that the session can use, if that has changed notably.
        times: execution times, if the client requested them.
        stopped_at: the op before which the submission was stopped; None if it was not stopped.
        shortages: the ops that ran out of memory.
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
    """Kinds of a template's values: hints for evictions on the executor. No result depends on them.

    Sent before the template's first run.

    Attributes:
        phase: phase of the program.
        inputs: a letter for each input: `w` weight, `k` KV cache, `g` gradient, `o` state of an optimizer, `i` input,
            `a` activation.
        outputs: a letter for each output, as for `inputs`.
        decisions: decisions of the plan with reasons, one per line, for `djinn status` and dashboards.
    """

    digest: bytes
    phase: Name
    inputs: bytes
    outputs: bytes
    decisions: Annotated[tuple[Name, ...], msgspec.Meta(max_length=limits.DECISIONS)] = ()


class TemplateRequest(Message, frozen=True):
    """The executor lacks the template with this digest, and waits for `TemplateReply`."""

    sequence: Count
    digest: bytes


class TemplateReply(Message, frozen=True):
    """The requested template, and all slots and inputs of the waiting submission."""

    template: Template
    first: InitialBindings


class ProtocolClose(PrintableFields, Message, frozen=True):
    """The sender closes the connection after this message, because the other end broke the protocol.

    Attributes:
        stopped: True if there was no protocol error: the server is shutting down.
    """

    texts = ("reason",)

    reason: str
    stopped: bool = False


class TemplateDecision(msgspec.Struct, frozen=True, array_like=True):
    """An executor's decision whether it runs a template with a strategy, such as CUDA graphs.

    Attributes:
        template: the first digits of the template's digest.
        ops: number of the template's ops.
        strategy: name of the run strategy.
        decision: whether the strategy is used, and why.
    """

    template: str
    ops: Count
    strategy: str
    decision: str


class StatsRequest(Message, frozen=True):
    """Request an executor's memory statistics.

    Attributes:
        reset_peak: restart the peak counters afterwards.
        decisions: send decisions, too.
    """

    reset_peak: bool = False
    decisions: bool = False


class StatsReply(Message, frozen=True):
    """Reply to `StatsRequest`: bytes and counts by name, and how the executor runs the session's templates."""

    values: dict[str, int]
    decisions: tuple[TemplateDecision, ...] = ()


class Goodbye(Message, frozen=True):
    """End the session and free its values.

    The executor cancels the running submission.

    Attributes:
        finish: True if the executor first handles all earlier messages, because one of them changes files.
    """

    finish: bool = False


# Request a gateway's status.


class StatusRequest(Message, frozen=True):
    """Request a gateway's status."""

    protocol: int
    token: Secret


class Latency(msgspec.Struct, frozen=True):
    """Percentiles of the latest durations, in seconds; 0 without data."""

    p50: Seconds = 0.0
    p99: Seconds = 0.0


class ServingFigures(msgspec.Struct, frozen=True):
    """Requests of a session or of a model, as `djinn_server.request_times` defines them.

    Attributes:
        requests: number of requests.
        tokens: number of tokens.
        answer: durations of answers outside of generations.
        first_token: durations of the first token of a generation.
        token: durations of each later token.
    """

    model: Name = ""
    requests: Count = 0
    tokens: Count = 0
    answer: Latency = Latency()
    first_token: Latency = Latency()
    token: Latency = Latency()


class SessionStatus(msgspec.Struct, frozen=True):
    """Status of a session: memory in bytes, age in seconds.

    Attributes:
        phase: phase of its last program.
        steps: number of decode or training steps.
        seconds: device time.
        kinds: bytes by kind of value.
        decisions: decisions of its latest plans.
        latency: round trip of its connection in seconds; 0 if unknown.
        bandwidth: maximum bytes per second to the client; 0 if unknown.
        host: bytes of an idle session in host memory.
        disk: bytes of an idle session on disk.
        shared: bytes that other sessions share.
        serving: its requests.
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
    """Status of an executor process.

    Attributes:
        load: share of the last seconds in which it ran programs, plus 1 for each assigned session.
        figures: its metrics, under their names in `/metrics` without the common prefix.
        tenant: the tenant of its sessions; empty for a reserve executor.
        models: requests by model.
        queue: number of submissions by upper bound of their wait for the device, in seconds as text.
        log: its latest log lines, for the operator.
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
    """An event in the gateway: time (seconds since 1970), name, tenant (empty: unknown), and facts as text."""

    seconds: Seconds
    name: Name
    tenant: Name = ""
    text: Name = ""


class Status(Message, frozen=True):
    """Reply to `StatusRequest`. A client with several servers chooses by `load` and `recent`.

    Attributes:
        load: load of the least loaded device, by all tenants together.
        recent: sessions that began on this least loaded device in the last minute.
        assignment: the policy that assigns sessions to executors.
        events: the latest events that the requester may see, newest last.
        instance: id of the gateway process, unique on all machines.
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
    """Return a status as builtin values, for `djinn status --json` and dashboards.

    The result has the additional field `memory_by_owner`: bytes by client.
    """
    executors: dict[str, Any] = msgspec.to_builtins(status.executors)
    owners: dict[str, int] = {}
    for session in (session for executor in status.executors for session in executor.sessions):
        owners[session.client] = owners.get(session.client, 0) + session.memory
    return {
        "version": status.version,
        "process": status.process,
        "uptime": status.uptime,
        "executors": executors,
        "memory_by_owner": owners,
        "events": msgspec.to_builtins(status.events),
    }


class Kill(Message, frozen=True):
    """Request that a gateway ends a session. `session` is an unambiguous prefix of its name."""

    protocol: int
    token: Secret
    session: Name


class Killed(Message, frozen=True):
    """Reply to `Kill`: the full name of the ended session, and its client's name."""

    session: Name
    client: Name


_PARTS = (
    cache_messages, cancel_messages, numeric_messages, peer_messages, resume_messages, state_messages, timing_messages, upload_messages,
    weight_messages,
)  # fmt: skip
# The closed set of messages: those that this module and its parts define.
MESSAGES: Final[tuple[type[Message], ...]] = tuple(
    kind
    for names in (globals(), *map(vars, _PARTS))
    for kind in names.values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind.__module__ == names["__name__"]
)

_encoder = msgspec.msgpack.Encoder()
# the message as MessagePack
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(functools.reduce(operator.or_, MESSAGES))
M = TypeVar("M", bound=Message)


encode: Final[Callable[[Message], bytes]] = _encoder.encode  # the message as MessagePack


def decode(head: bytes | memoryview) -> Message:
    """Decode the message in `head`.

    Raises:
        ProtocolError: `head` is not a message, or a field has a wrong type or is out of range.
    """
    try:
        return _decoder.decode(head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ProtocolError(f"cannot read a message of {len(head)} bytes: {error}") from error


def is_of_kind(head: bytes, kind: type[Message]) -> bool:
    """Return True if the encoded message `head` has the type `kind`. Does not decode the message."""
    return head.startswith(msgspec.msgpack.encode(tag_of(kind)), 1)  # after the byte with the number of fields


def expect(head: bytes | memoryview, kind: type[M]) -> M:
    """Decode the message in `head`, which must be of type `kind`.

    Raises:
        ProtocolError: the message has another type.
    """
    message = decode(head)
    if not isinstance(message, kind):
        detail = f": {message.reason}" if isinstance(message, Refused | ProtocolClose) else ""
        raise ProtocolError(f"expected {kind.__name__}, got {type(message).__name__}{detail}")
    return message
