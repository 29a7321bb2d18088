"""Interface between interception and the runtime that runs programs: defined here, implemented by the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, Protocol

import attrs
import msgspec
import torch

from djinn_core.errors import StartupError
from djinn_core.ir.program import Program, Slot
from djinn_core.ir.stored_tensor import StoredTensor, UnfinishedOpening, WeightListing
from djinn_core.ir.values import TensorMeta
from djinn_core.wire.cache_messages import CacheAction
from djinn_core.wire.messages import DeviceInfo
from djinn_core.wire.numeric_messages import NumericSettings


class DescribedValue(msgspec.Struct, frozen=True):
    """A result that only the executor could know: its metadata, or the Python type of a scalar (`bool`, `int`...)."""

    meta: TensorMeta
    scalar: str = ""


WHOLE: Final = -1  # in place of where a piece begins: it is all of a program


class Submission(msgspec.Struct, frozen=True):
    """A program to run now.

    Attributes:
        program: what to run.
        free: values to forget when it has run.
        fetch: values whose tensors must come back. describe: values whose metadata must come back.
        synchronize: wait until the device has finished everything.
        known: identity of the recorded program that it is, or is a piece of; programs with the same one were recorded alike.
        at: number of instructions of that program before it; `WHOLE` where it is all of it.
    """

    program: Program
    free: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()
    describe: tuple[int, ...] = ()
    synchronize: bool = False
    known: object = None
    at: int = WHOLE


class SubmissionReply(msgspec.Struct, frozen=True):
    """The reply: tensors on the CPU for `fetch`, metadata for `describe`.

    Attributes:
        server_seconds: seconds that the executor had spent on the session at this reply; only differences have meaning.
    """

    tensors: tuple[torch.Tensor, ...] = ()
    described: tuple[DescribedValue, ...] = ()
    server_seconds: float = 0.0


@attrs.frozen
class CacheMemory:
    """Memory of KV caches on executors, in bytes.

    Attributes:
        total: size of the caches. resident: how much of it is in the devices' memory. pinned: how much stays there.
        limited: True if every executor that holds some has a memory limit; others evict nothing.
        refused: reason why an action could not be done; empty if it was.
    """

    total: int = 0
    resident: int = 0
    pinned: int = 0
    limited: bool = True
    refused: str = ""


class SavedWeights(msgspec.Struct, frozen=True):
    """Outcome of saving weights: `nbytes` were written, or none, because an op failed to compute the tensor called `poisoned`."""

    nbytes: int
    poisoned: str = ""


@attrs.frozen
class Publication:
    """Weights that are published under a name.

    Attributes:
        name: the name.
        nbytes: bytes of the file on the server's disk.
        age: seconds since it was published, when the server was asked.
        seconds_left: seconds for which it stayed published then.
    """

    name: str
    nbytes: int
    age: float
    seconds_left: float


class Runtime(Protocol):
    """Runs programs on remote devices."""

    @property
    def successor(self) -> Runtime | None:
        """The runtime that goes on with its values, and takes what is submitted now; None mostly. It changes under the recorders' lock."""

    @property
    def takes_pieces(self) -> Callable[[object], bool] | None:
        """Tells of a recorded program (`Submission.known`) whether it may come in pieces now; None where all may."""

    def submit(self, submission: Submission) -> int:
        """Send a submission without waiting for it; returns its number.

        Raises:
            KeyboardInterrupt: there was an interrupt, and nothing of it was sent.
        """

    def wait(self, number: int) -> SubmissionReply:
        """Wait for the values that submission `number` requested: one round trip.

        Raises:
            RemoteError: a value that it asked for could not be computed.
            SessionLost: the remote state is gone.
        """

    def interrupted(self) -> None:
        """Stop this thread's unanswered submissions after an interrupted wait, unless they are nearly done."""

    def defer(self, number: int, nbytes: int) -> None:
        """Submission `number` asked for `nbytes` that will be waited for later, once, or forgotten.

        The caller must have held the recorders' lock since it was submitted.
        """

    def has_come(self, number: int) -> bool:
        """True if `wait` returns or raises at once; reads replies that have arrived, and does not block."""

    def discard(self, number: int) -> None:
        """Give up the result of a deferred submission: no thread will wait for it. Safe in finalizers."""

    def mark_unobserved(self, number: int) -> None:
        """Report errors of this thread's submissions after `number` only where their results are used."""

    @property
    def round_trip_seconds(self) -> float | None:
        """Network round trip to the executor in seconds, without the executor's own time; None if it is not known yet."""

    def upload(self, handle: int, source: torch.Tensor, device: int = 0) -> None:
        """Make `source` (a CPU tensor) the value `handle` of a logical device; it is the caller's again afterwards."""

    def expect_uploads(self, tensors: Sequence[torch.Tensor]) -> None:
        """These CPU tensors will be uploaded next, one after the other, and are not written before; none: that is over.

        Their memory is held until then.
        """

    def open_weights(self, address: str, device: int = 0) -> WeightListing | UnfinishedOpening:
        """The tensors that the executors of a logical device find at an address; one round trip. The caller must hold the recorders' lock.

        What takes longer than a moment, such as a download, is unfinished, and asked for again.

        Raises:
            WeightsUnavailable: there are none, or the server may not or cannot read them.
            SessionLost: the remote state is gone.
        """

    def read_weights(self, handle: int, stored: StoredTensor, device: int = 0) -> None:
        """Have the executor make the value `handle` of a logical device of what it reads itself. It waits for nothing."""

    def save_weights(
        self,
        address: str,
        names: Sequence[str],
        handles: Sequence[int],
        metadata: Mapping[str, str],
        seconds: float = 0.0,
    ) -> SavedWeights:
        """Have the executor write values to a safetensors file; one round trip. The caller must hold the recorders' lock.

        `seconds`: how long it lives at an address `published:`; 0: as long as the server allows.

        Raises:
            WeightsUnavailable: the server cannot or may not write there.
            SessionLost: the remote state is gone.
        """

    def remove_weights(self, address: str, device: int = 0) -> None:
        """Remove the file at an address, or a published name; one round trip. The caller must hold the recorders' lock.

        Raises:
            WeightsUnavailable: there is none, or it may not or cannot be removed.
            SessionLost: the remote state is gone.
        """

    def published(self, device: int = 0) -> tuple[Publication, ...]:
        """The names that are published at the executors of a logical device; one round trip. The caller must hold the recorders' lock.

        Raises:
            WeightsUnavailable: nothing is published there.
            SessionLost: the remote state is gone.
        """

    def figures(self, *, reset_peak: bool = False, device: int = 0) -> Mapping[str, int]:
        """Counts and bytes of a logical device for this session; one round trip. The caller must hold the recorders' lock.

        Raises:
            SessionLost: the remote state is gone.
        """

    def caches(self, action: CacheAction, handles: Sequence[int]) -> CacheMemory:
        """`look` where KV caches are, `pin`, `unpin`, `evict` or `restore` them; without handles, all of the session.

        One round trip. The caller must hold the recorders' lock.

        Raises:
            SessionLost: the remote state is gone.
        """


class Fallback(Protocol):
    """CPU fallback: computes on this machine ops that the executor cannot run; only where it is configured."""

    def needed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Any], slots: tuple[Slot, ...]
    ) -> bool:
        """True if the executor cannot run calls like this one."""

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of the call."""


class CaptureRecorder(Protocol):
    """Is told where recorded instructions go, while a timeline is recorded; on the thread that sends them."""

    def follow(self, recorder: object) -> None:
        """Note from now on when the thread of a recorder enters and leaves modules."""

    def met(self, module: torch.nn.Module) -> None:
        """A module is called, and in no other one."""

    def taken(self, recorder: object, instructions: int) -> None:
        """The oldest `instructions` of those that a recorder holds are about to be submitted, in one submission or several."""

    def enter(self, what: str, instructions: int = 0) -> None:
        """This thread begins to `submit` so many instructions, or to `upload`."""

    def leave(self) -> None:
        """It has ended what it began last."""


Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # (func, args, kwargs) -> result
# (what handles it, func, args, kwargs) -> result
Around = Callable[[Dispatch, Any, tuple[Any, ...], dict[str, Any]], Any]


def _not_installed(*_: Any) -> NoReturn:
    raise StartupError("remote_accelerator is not registered in this process: `import djinn` before using it")


class RuntimeFunctions(msgspec.Struct, eq=False):
    """Functions of the runtime that interception calls.

    Attributes:
        start: begins the session; None where nothing can run programs.
        is_available: a session is open or could begin.
        prepare: called before the first op is recorded; begins a session that could fail to begin.
        device_count: number of logical devices. counts_when_open: that number is known only when a session is open.
        describe: the session's name and the physical device of an index.
        residence: the executor of a storage of a logical device, for people.
        is_open: a session is open.
    """

    start: Callable[[], Runtime] | None
    is_available: Callable[[], bool]
    prepare: Callable[[], None]
    device_count: Callable[[], int]
    counts_when_open: Callable[[], bool]
    describe: Callable[[int], tuple[str, DeviceInfo]]
    residence: Callable[[int, int], str]
    is_open: Callable[[], bool]  # taken last: where it is the client's, all are


def no_session() -> bool:
    """False: `Port.is_open` while there is no client."""
    return False


def no_ops() -> int:
    """Zero: `Port.ops_unsent` of a device that counts each op in `Port.ops_captured` at once."""
    return 0


def _all_are_shown(_on: bool) -> None:
    """Do nothing: Python dispatches each op of the device in Python."""


class Port(RuntimeFunctions, eq=False):
    """The one object of a process that interception and the runtime meet at: what each sets for the other, and counters.

    Attributes:
        record: records an op of `LazyTensor.__torch_dispatch__` that has no handler of its own. dispatch_layout: implementation of
            `PartsTensor.__torch_dispatch__`.
        around: stands around each op, which it calls; None: nothing does. Set it with `stand_around`.
        show_all_ops: have C++ hand each op to Python, or only those that it does not know.
        copy_later: begin a copy to a new CPU tensor (source, memory format); None if it must wait.
        copy_into_later: begin a copy to a CPU tensor (target, source); false where it must wait.
        bound_state: the value that holds the random state of an index that is bound to one device.
        early: the runtime's `EarlyStart`, with executors that were started before it was imported.
        traced_by: backends of `torch.compile` that accept remote tensors. ending: the interpreter is shutting down.
    """

    record: Dispatch = _not_installed
    around: Around | None = None
    show_all_ops: Callable[[bool], None] = _all_are_shown
    dispatch_layout: Dispatch = _not_installed
    copy_later: Callable[[Any, torch.memory_format], torch.Tensor | None] = _not_installed
    copy_into_later: Callable[[torch.Tensor, Any], bool] = _not_installed
    bound_state: Callable[[int], Any] = _not_installed
    early: Any = None
    traced_by: list[Callable[..., Any]] = msgspec.field(default_factory=list)
    ending: bool = False

    checkpoint_instructions: int = 4096
    wait_timeout: float = 0.0  # seconds that any single wait of any thread may take; 0: as long as it takes
    sessions_ended: int = 0
    whole_programs: int = 0  # how many want to see programs that are not sent in pieces
    memory_changes: int = (
        0  # unseen by recorders: schedules that were executed by hand, sessions that were lost or ended
    )
    ops_captured: int = 0
    ops_unsent: Callable[[], int] = no_ops  # captured in C++, and not yet in `ops_captured`
    ops_inferred: int = 0  # ops for which a meta kernel was run
    fallback: Fallback | None = None
    numeric_settings: NumericSettings = msgspec.field(default_factory=NumericSettings)
    timeline: CaptureRecorder | None = None
    missing: Mapping[str, str] = msgspec.field(
        default_factory=dict
    )  # ops that a server of the session lacks, and which server
    forked: bool = False

    def stand_around(self, around: Around | None) -> None:
        """Have `around` stand around each op from now on; None: nothing."""
        self.around = around
        self.show_all_ops(around is not None)

    def take(self, functions: RuntimeFunctions) -> None:
        """Put all functions of the runtime in the place of those from before."""
        for name, function in msgspec.structs.asdict(functions).items():
            setattr(self, name, function)

    def runtime(self) -> Runtime:
        """The runtime, started at the first call.

        Raises:
            StartupError: nothing can run programs in this process.
        """
        if self.start is None:
            raise StartupError("no runtime in this process: `import djinn` before using remote_accelerator")
        return self.start()


port = Port(
    start=None,
    is_available=lambda: True,
    prepare=lambda: None,
    device_count=lambda: 1,
    counts_when_open=lambda: False,
    describe=lambda _: ("", DeviceInfo("", "")),
    residence=lambda *_: "",
    is_open=no_session,
)
