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
Ticket = Any  # stands for a submission that something was asked of


class DescribedValue(msgspec.Struct, frozen=True):
    """A result that only the executor could know: its metadata, or the Python type of a scalar (`bool`, `int`...)."""

    meta: TensorMeta
    scalar: str = ""


class Submission(msgspec.Struct, frozen=True):
    """A program to run now.

    Attributes:
        program: what to run.
        free: values to forget when it has run.
        fetch: values whose tensors must come back. describe: values whose metadata must come back.
        synchronize: wait until the device has finished everything.
        later: bytes of `fetch`, if these are waited for later, once, or abandoned; None: they are waited for at once.
    """

    program: Program
    free: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()
    describe: tuple[int, ...] = ()
    synchronize: bool = False
    later: int | None = None

    @property
    def is_answered(self) -> bool:
        """True if its reply has something that a caller waits for."""
        return bool(self.fetch or self.describe or self.synchronize)


class SubmissionReply(msgspec.Struct, frozen=True):
    """The reply: tensors on the CPU for `fetch`, metadata for `describe`.

    Attributes:
        tensors, described: in the order in which they were asked for.
        server_seconds: seconds that the executor had spent on the session at this reply; only differences have meaning.
    """

    tensors: tuple[torch.Tensor, ...] = ()
    described: tuple[DescribedValue, ...] = ()
    server_seconds: float = 0.0


class OpHandler(ABC):
    """Runs calls of ops that the device cannot record as one instruction.

    Attributes:
        name: unique among op handlers. The device asks for `layouts`, which makes sparse, quantized and nested tensors, for
            `collectives` of `torch.distributed`, and for `fallback`, which runs the ops that the executor cannot run.
    """

    name: str

    @abstractmethod
    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, and return what PyTorch returns for remote tensors."""

    def needed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Any], slots: tuple[Slot, ...]
    ) -> bool:
        """True if the call must not be recorded. The device asks `fallback` alone."""
        del func, args, kwargs, operands, slots
        return True


class Facts(msgspec.Struct, eq=False):
    """Facts about the runtime, as they are now. Interception reads them each time, and sets none but `numeric_settings`.

    Attributes:
        is_open: whether a session is open.
        is_available: whether a session is open or could begin.
        prepare: called before the first op is recorded; begins a session that could fail to begin.
        device_count: number of logical devices. counts_when_open: that number is known only when a session is open.
        describe: the session's name and the physical device of an index.
        residence: the executor of a storage of a logical device, for people.
        round_trip_seconds: network round trip to the executor, without the executor's own time; None if it is not known yet.
        missing: ops that a server of the session lacks, and which server.
        offered: custom ops that every executor of the session runs, each with its schema there.
        operators: the operator libraries of plugins. Loads plugins.
        op_handler: the op handler of a name; None if no plugin offers it. Loads plugins.
        fallback: the op handler for calls that executors cannot run; None: such calls are errors.
        checkpoint_instructions: how many instructions a program may hold before it is sent.
        numeric_settings: PyTorch's settings under which the next submission was recorded.
        forked: the process is a forked child that cannot use the session of its parent.
        sessions_ended: how many sessions have ended.
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
    """What interception hands programs and tensors to. It goes on when one session ends and another begins.

    Attributes:
        facts: of the runtime and the open session.
        lock: held while a program is taken and submitted, so that programs arrive in the order in which they were cut. Reentrant. No
            thread that holds it begins a session: call `open` before.
    """

    facts: Facts
    lock: InterruptibleLock

    @abstractmethod
    def open(self) -> None:
        """Begin a session if none is open; a lost one stays lost.

        Raises:
            SessionLost: the caller holds the lock, and the session has ended.
        """

    @abstractmethod
    def submit(self, submission: Submission) -> Ticket:
        """Send a submission without waiting for it. The caller holds the lock.

        Raises:
            KeyboardInterrupt: there was an interrupt, and nothing of it was sent.
        """

    @abstractmethod
    def wait(self, ticket: Ticket) -> SubmissionReply:
        """Wait for the values that a submission requested: one round trip. The caller holds no lock.

        Raises:
            RemoteError: a value that it asked for could not be computed.
            SessionLost: the remote state is gone.
        """

    @abstractmethod
    def is_there(self, ticket: Ticket) -> bool:
        """True if `wait` returns or raises at once; reads replies that have arrived, and does not block."""

    @abstractmethod
    def abandon(self, ticket: Ticket | None = None, *, later: bool = False) -> None:
        """Give up what was asked.

        Without a ticket, after an interrupted wait: stop this thread's unanswered submissions, unless they are nearly done. With one
        that is waited for later: no thread will wait for it; safe in finalizers. With `later`: report errors of this thread's
        submissions after it only where their results are used.
        """

    @abstractmethod
    def upload(self, handle: int, source: torch.Tensor | StoredTensor, device: int = 0) -> None:
        """Make `source` the value `handle` of a logical device: a CPU tensor, which is the caller's again afterwards, or a stored one.

        The executor reads a stored tensor itself; nothing waits for that.
        """

    @abstractmethod
    def expect(self, tensors: Sequence[torch.Tensor]) -> None:
        """These CPU tensors will be uploaded next, one after the other, and are not written before; none: that is over.

        Their memory is held until then.
        """

    @abstractmethod
    def ask(self, message: Message, kind: type[M], device: int = 0) -> M:
        """The reply, of a `kind`, to a message about a logical device; one round trip. The caller holds the lock.

        Of several executors the router says which answer. A refusal in the reply begins with the executor's name.

        Raises:
            SessionLost: the remote state is gone.
        """
