"""Interface between interception and the runtime: programs go to a `Sink`, and facts come from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from djinn_core.ir.program import Program, Slot
from djinn_core.ir.stored_tensor import StoredTensor
from djinn_core.ir.values import TensorMeta
from djinn_core.system.interrupts import InterruptibleLock
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import DeviceInfo
from djinn_core.wire.numeric_messages import NumericSettings

M = TypeVar("M", bound=Message)
Ticket = Any  # identifies a submission with requested values


class DescribedValue(msgspec.Struct, frozen=True):
    """Metadata of a result that only the executor knows.

    Attributes:
        meta: metadata of the tensor.
        scalar: name of the Python type if the result is no tensor, such as `bool`, `int` or `NoneType`. Else empty.
    """

    meta: TensorMeta
    scalar: str = ""


class Submission(msgspec.Struct, frozen=True):
    """A program to run now, with requests.

    Attributes:
        program: the program.
        free: handles of values to free after the program.
        fetch: handles of values whose elements the reply contains.
        describe: handles of values whose metadata the reply contains.
        synchronize: True if the executor replies after its device has finished all work.
        later: size in bytes of the values in `fetch` if a later call waits for the reply. None if the caller waits at once.
    """

    program: Program
    free: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()
    describe: tuple[int, ...] = ()
    synchronize: bool = False
    later: int | None = None

    @property
    def is_answered(self) -> bool:
        """Return True if a caller waits for values in the reply."""
        return bool(self.fetch or self.describe or self.synchronize)


class SubmissionReply(msgspec.Struct, frozen=True):
    """The reply to a submission.

    Attributes:
        tensors: CPU tensors for `fetch`, in the order of the request.
        described: metadata for `describe`, in the order of the request.
        server_seconds: seconds that the executor has spent on the session. Only differences have a meaning.
    """

    tensors: tuple[torch.Tensor, ...] = ()
    described: tuple[DescribedValue, ...] = ()
    server_seconds: float = 0.0


class OpHandler(ABC):
    """Run ops that the device cannot record as one instruction.

    Attributes:
        name: unique among op handlers. The device uses `layouts` for sparse, quantized and nested tensors,
            `collectives` for `torch.distributed`, and `fallback` for ops that the executor cannot run.
    """

    name: str

    @abstractmethod
    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op, and return its result as PyTorch does for remote tensors."""

    def needed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Any], slots: tuple[Slot, ...]
    ) -> bool:
        """Return True if this handler must run the call instead of the recorder. Only the handler `fallback` is asked."""
        del func, args, kwargs, operands, slots
        return True


class Facts(msgspec.Struct, eq=False):
    """Current facts about the runtime. Interception reads them each time, and sets only `numeric_settings`.

    Attributes:
        is_open: True if a session is open.
        is_available: True if a session is open or could begin.
        prepare: called before the first op is recorded. It begins a session with a server, which may fail.
        device_count: returns the number of logical devices.
        counts_when_open: returns True if that number is known only during a session.
        describe: returns the session's name and the physical device of an index.
        residence: returns a text that names the executor with a storage (number, logical device).
        round_trip_seconds: returns the network round trip to the executor, without its own time, or None if unknown.
        missing: ops that a server of the session lacks, each with a text that names the server.
        offered: custom ops that every executor of the session runs, each with its schema on the executor.
        operators: returns the operator libraries of plugins. Loads plugins.
        op_handler: returns the op handler with a name, or None if no plugin offers it. Loads plugins.
        fallback: the op handler for ops that executors cannot run. If None, such ops raise an error.
        checkpoint_instructions: number of instructions after which a program is sent.
        numeric_settings: PyTorch's settings under which the next submission was recorded.
        forked: True in a forked child, which cannot use the session of its parent.
        sessions_ended: number of ended sessions.
    """

    is_open: Callable[[], bool] = lambda: False
    is_available: Callable[[], bool] = lambda: True
    prepare: Callable[[], None] = lambda: None
    device_count: Callable[[], int] = lambda: 1
    counts_when_open: Callable[[], bool] = lambda: False
    describe: Callable[[int], tuple[str, DeviceInfo]] = lambda _: ("", DeviceInfo("", ""))
    residence: Callable[[int, int], str] = lambda *_: ""
    round_trip_seconds: Callable[[], float | None] = lambda: None
    missing: Mapping[str, str] = msgspec.field(default_factory=dict)
    offered: Mapping[str, str] = msgspec.field(default_factory=dict)
    operators: Callable[[], Sequence[Any]] = tuple
    op_handler: Callable[[str], OpHandler | None] = lambda _: None
    fallback: OpHandler | None = None
    checkpoint_instructions: int = 4096
    numeric_settings: NumericSettings = msgspec.field(default_factory=NumericSettings)
    forked: bool = False
    sessions_ended: int = 0


class Sink(ABC):
    """Receive programs and tensors from interception. It outlives sessions.

    Attributes:
        facts: facts of the runtime and the open session.
        lock: held while a program is taken and submitted, so that programs arrive in recorded order. Reentrant. A thread
            that holds the lock must not begin a session: call `open` before.
    """

    facts: Facts
    lock: InterruptibleLock

    @abstractmethod
    def open(self) -> None:
        """Begin a session if none is open and none was lost.

        Raises:
            SessionLost: the caller holds the lock, and the session has ended.
        """

    @abstractmethod
    def submit(self, submission: Submission) -> Ticket:
        """Send a submission without waiting for the reply. The caller holds the lock.

        Raises:
            KeyboardInterrupt: an interrupt came before anything was sent.
        """

    @abstractmethod
    def wait(self, ticket: Ticket) -> SubmissionReply:
        """Wait for the requested values of a submission: one round trip. The caller does not hold the lock.

        Raises:
            RemoteError: a requested value could not be computed.
            SessionLost: the remote state is lost.
        """

    @abstractmethod
    def is_there(self, ticket: Ticket) -> bool:
        """Return True if `wait` would not block. This reads replies that have arrived, and never blocks."""

    @abstractmethod
    def abandon(self, ticket: Ticket | None = None, *, later: bool = False) -> None:
        """Abandon requested values.

        - Without a ticket: stop this thread's unanswered submissions, unless they end soon. Call this after an
          interrupted wait.
        - With a ticket: discard the reply on arrival, because no thread will wait for it. Finalizers may call this.
        - With a ticket and `later`: do not report errors of this thread's submissions after that of the ticket, except
          where the program uses their results.
        """

    @abstractmethod
    def upload(self, handle: int, source: torch.Tensor | StoredTensor, device: int = 0) -> None:
        """Upload `source` as the value `handle` of a logical device. A CPU tensor may be changed after the call.

        The executor itself reads a `StoredTensor`, and no caller waits for the read.
        """

    @abstractmethod
    def expect(self, tensors: Sequence[torch.Tensor]) -> None:
        """Announce the CPU tensors that will be uploaded next, in order. They do not change before their upload.

        The tensors are kept alive until their upload. An empty sequence withdraws the announcement.
        """

    @abstractmethod
    def ask(self, message: Message, kind: type[M], device: int = 0) -> M:
        """Send a message about a logical device, and return the reply, a message of the class `kind`: one round trip.

        The caller holds the lock. If the session has several executors, the router chooses which of them answer. A
        refusal in the reply begins with the executor's name.

        Raises:
            SessionLost: the remote state is lost.
        """
