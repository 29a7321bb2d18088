"""Recorders: the program that each thread is recording, and the points at which it is cut and sent."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, filterfalse
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import torch

from djinn_client.interception.interpreter_shutdown import suppress_at_shutdown
from djinn_client.interception.native import calls as native_calls
from djinn_client.interception.native import entries as native_entries
from djinn_client.interception.native.calls import list_of
from djinn_client.interception.native.entries import (
    DIFFERENTIATING,
    ENTRIES,
    EPOCH,
    FORGOTTEN,
    LIMIT,
    NODE,
    UNTOLD,
    WATCHED,
    Entries,
    UnsentEntries,
)
from djinn_client.interception.native.library import implement, ops
from djinn_client.interception.recording.cut_points import steady_cut
from djinn_client.interception.recording.entry import Entry, SentEntries
from djinn_client.interception.recording.fetch_prediction import FetchPredictor
from djinn_client.interception.recording.meta_only_storages import MetaOnlyStorages
from djinn_client.interception.recording.program_prediction import OPENING, PredictablePrograms, ProgramPredictor
from djinn_client.interception.recording.split_submission import fits, in_parts
from djinn_client.interception.runtime_interface import (
    WHOLE,
    CacheMemory,
    Publication,
    Runtime,
    SavedWeights,
    Submission,
    SubmissionReply,
    port,
)
from djinn_client.interception.shape_inference.message_limits import check_dimensions
from djinn_client.interception.tensors.storage import Storage, Value, live_values, still_to_free
from djinn_client.stack_room import require_stack_room
from djinn_client.torch_dispatch import without_modes
from djinn_core.errors import DjinnError, ForkedProcess, UnsupportedOperation
from djinn_core.ir.handles import number_storages_by, storage_of
from djinn_core.ir.module_path import ForwardCalls, ModuleCall
from djinn_core.ir.program import Program
from djinn_core.ir.stored_tensor import StoredTensor, UnfinishedOpening, WeightListing
from djinn_core.system.gc_pause import collect_later
from djinn_core.system.interrupts import InterruptibleLock, interrupt_mask
from djinn_core.wire import limits

WAITING_LIMIT = 1024  # freed handles that may wait for the unsent programs of other threads
NOTHING = Program((), (), ())
UPLOADED_LIMIT = 256 << 20  # bytes of uploads after which a program is cut, so that those that died are freed

if TYPE_CHECKING:
    from djinn_client.interception.recording.op_observer import OpObserver
    from djinn_core.wire.cache_messages import CacheAction

T = TypeVar("T")


class SyncRequest(msgspec.Struct, frozen=True):
    """Requests of a cut beside running the program."""

    fetch: tuple[int, ...] = ()
    describe: tuple[int, ...] = ()
    synchronize: bool = False


def _memory_of(tensor: torch.Tensor) -> memoryview[int]:
    array: Any = tensor.numpy()
    return memoryview(array)


_NO_PROGRAM: Final = -1
_no_counters: Final = _memory_of(torch.zeros(NODE + 1, dtype=torch.int64))  # of recorders whose threads have ended
_by_program: Final[dict[int, Recorder]] = {}
_retiring = threading.RLock()  # held while a program loses its recorder


class Recorder:
    """Records one thread's program.

    C++ appends the entries, and orders the programs of threads that use a storage.

    Attributes:
        program: its number in C++. counters: its counters, which are memory of C++.
        captures: what captures under way get of programs that are sent. fixed: the last entry from before the innermost capture.
        constants: uploaded values (handle, elements, logical device) while a capture tracks them. dead: handles that no tensor refers to or ever referred to.
        forward_calls: the calls of modules that the thread was inside before.
    """

    __slots__ = (
        "__weakref__",
        "_module",
        "_module_moments",
        "_moments",
        "_predictor",
        "_shared",
        "_thread",
        "_usual",
        "_watcher",
        "captures",
        "constants",
        "counters",
        "dead",
        "fetches",
        "fixed",
        "forward_calls",
        "program",
        "uploaded",
        "uploads",
    )

    def __init__(self, shared: Recorders, program: int | None = None) -> None:
        """`shared`: what it has in common with the recorders of other threads.

        `program`: number of a thread's program; None: a new one that no thread records yet.
        """
        self._shared = shared
        self.program = int(ops.new_program()) if program is None else program
        self.counters = _memory_of(ops.counters(self.program))
        self._moments: list[tuple[int, ModuleCall | None]] = []
        self._module: ModuleCall | None = None
        self._watcher: OpObserver | None = None
        self._module_moments: list[Any] | None = None
        self.captures: list[SentEntries] = []
        self.fetches = FetchPredictor()
        self.constants: list[tuple[int, torch.Tensor, int]] | None = None
        self.dead: list[int] = []
        self.fixed: Entry | None = None
        self.module = None
        self.module_moments = None
        self.forward_calls = ForwardCalls()
        self.differentiating = False
        self.watcher = None
        self.uploaded = 0
        self.uploads = 0
        self.limit = OPENING
        self._usual = OPENING, 0  # the limit as it was set last, and the largest length of a program then
        self._predictor = ProgramPredictor(shared.predictable_programs)
        self._thread = weakref.ref(threading.current_thread())
        if shared.sending.acquire(blocking=False):  # else another thread may be taking the program of one that is done
            try:
                for other in [*_by_program.values()]:
                    if other.done:
                        other.retire()
            finally:
                shared.sending.release()
        _by_program[self.program] = self

    @classmethod
    def of_thread(cls, shared: Recorders) -> Recorder:
        """The recorder of the present thread."""
        return cls(shared, int(ops.thread_program()))

    def retire(self) -> None:
        """Give the program to another thread: this one has ended, and everything was sent."""
        with _retiring:
            if (number := self.program) == _NO_PROGRAM:
                return
            _by_program.pop(number, None)
            self.program, self.counters = _NO_PROGRAM, _no_counters
        ops.let_go(number)

    @staticmethod
    def end_session() -> None:
        """Forget what was freed, and states of generators: a session has ended, and the next one has no use for it."""
        ops.end_session()

    @staticmethod
    def begin_in_child() -> None:
        """Forget everything in a forked child, before it records."""
        global _retiring
        _retiring = threading.RLock()  # a thread of the parent may have held it
        native_calls.begin_in_child()
        native_entries.begin_in_child()
        _by_program.clear()
        ops.forget_programs()
        ops.set_forked(port.forked)

    def begin_on_thread(self) -> None:
        """The present thread records on this recorder from now on."""
        ops.switch_program(self.program)

    @property
    def thread(self) -> str:
        """Name of the thread; empty where it has ended."""
        thread = self._thread()
        return thread.name if thread is not None else ""

    @property
    def done(self) -> bool:
        """True if nothing is unsent and the thread will record nothing more."""
        return self.ended and not self.entries  # in this order: the thread may record its last op meanwhile

    @property
    def ended(self) -> bool:
        """True if the thread will record nothing more."""
        thread = self._thread()
        if thread is None:
            return True
        # Python counts the main thread as ended before it calls what is registered to run at exit, which may record.
        return not thread.is_alive() and thread is not threading.main_thread()

    def drop(self) -> None:
        """Forget what was recorded. Nothing records on this recorder any more."""
        self.retire()

    @property
    def entries(self) -> UnsentEntries:
        """Unsent entries."""
        return UnsentEntries(self)

    @property
    def unsent(self) -> int:
        """Number of unsent entries."""
        return self.counters[ENTRIES]

    @property
    def epoch(self) -> int:
        """Number of cuts so far."""
        return self.counters[EPOCH]

    @property
    def limit(self) -> int:
        """Number of entries at which C++ calls `cut_at_limit`."""
        return self.counters[LIMIT]

    @limit.setter
    def limit(self, limit: int) -> None:
        self.counters[LIMIT] = limit

    @property
    def differentiating(self) -> bool:
        """True if the thread is in a backward pass."""
        return bool(self.counters[DIFFERENTIATING])

    @differentiating.setter
    def differentiating(self, on: bool) -> None:
        self.counters[DIFFERENTIATING] = on

    @property
    def watcher(self) -> OpObserver | None:
        """Observer that is called for every op."""
        return self._watcher

    @watcher.setter
    def watcher(self, watcher: OpObserver | None) -> None:
        self._watcher = watcher
        self.counters[WATCHED] = watcher is not None

    @property
    def module(self) -> ModuleCall | None:
        """The call of a module that the thread is inside."""
        return self._module

    @module.setter
    def module(self, module: ModuleCall | None) -> None:
        self._module = module
        if self._module_moments is not None:
            self.counters[NODE] = FORGOTTEN
        count = self.counters[ENTRIES]
        moments = self._moments
        if moments and moments[-1][0] == count:
            moments[-1] = count, module
        else:
            moments.append((count, module))

    @property
    def module_moments(self) -> list[Any] | None:
        """While a timeline is recorded, when the thread entered what, one after the other in one list.

        That is a weak reference to a module, `BACKWARD`, the number of an autograd node, which C++ reports, or None where the thread left
        the former two.
        """
        return self._module_moments

    @module_moments.setter
    def module_moments(self, moments: list[Any] | None) -> None:
        self._module_moments = moments
        self.counters[NODE] = UNTOLD if moments is None else FORGOTTEN

    def order_after(self, storage: Storage) -> None:
        """Order the unsent work of other threads on `storage` before the entries that this thread records next."""
        ops.note_read(storage.holder)

    def begin_writes(self, targets: Iterable[torch.Tensor]) -> None:
        """Send unsent reads of `targets` by other threads, then note the writes."""
        for target in targets:
            ops.note_write(target)

    def take_back(self, value: Value, _names: Container[str]) -> bool:
        """Take back the last instruction where it made the empty memory of `value`; whether it was."""
        if self.fixed is not None and len(self.entries) and self.entries[-1].handles == self.fixed.handles:
            return False
        return bool(ops.take_back(value.holder))

    def look(self, first: int) -> Entries:
        """The unsent entries from `first` on."""
        columns = ops.look(self.program, first)
        return Entries(columns, self._modules(columns, first))

    def _modules(self, columns: Sequence[torch.Tensor], first: int = 0) -> list[ModuleCall | None]:
        """The call of a module, or the autograd node, in which each entry was issued."""
        count = columns[0].numel()
        nodes = list_of(columns[5])  # empty outside of backward passes
        moments = self._moments
        if len(moments) == 1 and moments[0][0] <= first:
            made = [moments[0][1]] * count
        else:
            made = []
            moments = [(at - first, module) for at, module in moments]
            ends = [at for at, _ in moments[1:]] + [count]
            begin = moments[0][0] if moments else count
            made += [None] * max(0, min(begin, count))
            for (_, module), end in zip(moments, ends, strict=True):
                made += [module] * (min(end, count) - len(made))
            made += [None] * (count - len(made))
        if not nodes:
            return made
        calls = self.forward_calls
        return [(node, None, calls) if m is None and node != -1 else m for node, m in zip(nodes, made, strict=True)]

    @without_modes
    def prepare(self) -> None:
        """Have an op fail that cannot be sent anywhere, and not the first wait for a result; a capture is not sent."""
        if not self.captures:
            port.prepare()

    def cut(self, runtime: Runtime | None = None) -> None:
        """Send the recorded ops without waiting. `runtime`: the session of the caller's `locked_session` block."""
        if self.entries:
            self._send(runtime or _runtime(), SyncRequest())

    def flush(self) -> None:
        """Send what all threads have recorded so far, and what may be freed, without waiting."""
        self.asked(lambda _: None)

    def cut_all(self) -> None:
        """Send what all threads have recorded so far, but for captures, without waiting."""
        require_stack_room()
        if any(recorder.entries and not recorder.captures for recorder in self._shared.all()):
            with interrupt_mask, suppress_at_shutdown, collect_later, self._shared.locked_session() as runtime:
                for recorder in self._shared.all():
                    if not recorder.captures:
                        recorder.cut(runtime)

    def figures(self, *, reset_peak: bool, device: int) -> Mapping[str, int]:
        """The executor's figures when it has done what was recorded so far; see `Runtime.figures`."""
        return self.asked(lambda runtime: runtime.figures(reset_peak=reset_peak, device=device))

    def caches(self, action: CacheAction, handles: Sequence[int]) -> CacheMemory:
        """Do `action` with KV caches when the executor has done what was recorded so far; see `Runtime.caches`."""
        return self.asked(lambda runtime: runtime.caches(action, handles))

    def open_weights(self, address: str, device: int) -> WeightListing | UnfinishedOpening:
        """The tensors at an address, or how far it is being opened; see `Runtime.open_weights`."""
        return self.asked(lambda runtime: runtime.open_weights(address, device))

    def save_weights(
        self,
        address: str,
        names: Sequence[str],
        handles: Sequence[int],
        metadata: Mapping[str, str],
        seconds: float = 0.0,
    ) -> SavedWeights:
        """Write tensors where the server is, as they are after what was recorded so far; see `Runtime.save_weights`."""
        return self.asked(lambda runtime: runtime.save_weights(address, names, handles, metadata, seconds))

    def remove_weights(self, address: str, device: int) -> None:
        """Remove a file where the server is; see `Runtime.remove_weights`."""
        self.asked(lambda runtime: runtime.remove_weights(address, device))

    def published(self, device: int) -> tuple[Publication, ...]:
        """The names that are published; see `Runtime.published`."""
        return self.asked(lambda runtime: runtime.published(device))

    def asked(self, question: Callable[[Runtime], T]) -> T:
        """The runtime's reply when everything that was recorded so far is sent; the recorders' lock is held meanwhile."""
        require_stack_room()
        with interrupt_mask, suppress_at_shutdown, collect_later, self._shared.locked_session() as runtime:
            for other in self._shared.all():
                if other is not self:
                    other.cut(runtime)
            self._send(runtime, SyncRequest())
            try:
                return question(runtime)
            except KeyboardInterrupt:
                runtime.interrupted()
                raise

    def cut_at_limit(self) -> None:
        """Handle reaching `limit` entries: send a predicted piece, or most of a program that has grown too long."""
        predictor = self._predictor
        if len(self.entries) >= port.checkpoint_instructions:
            if not self.captures:
                self._send(_runtime(), SyncRequest(), steady_cut)
        elif self.captures or port.whole_programs:
            self.limit = port.checkpoint_instructions
            return
        elif predictor.opens():
            predictor.recognise(self.entries)
        elif predictor.until_cut() is not None:
            runtime = _runtime()
            if (takes := runtime.takes_pieces) is not None and not takes(predictor.predicted):
                self.limit = port.checkpoint_instructions
                return
            if predictor.is_due(self.entries):
                self._send(runtime, SyncRequest(), predictor.cut)
        self._set_limit()

    def _set_limit(self) -> None:
        """Set `limit` to the end of the next predicted piece, or to the largest length of a program."""
        opens = self._predictor.opens() and len(self.entries) < OPENING
        ahead = OPENING if opens else self._predictor.until_cut()
        most = port.checkpoint_instructions
        self.limit = most if ahead is None else min(ahead, most)
        self._usual = self.limit, most

    @without_modes
    def ask(self, ask: SyncRequest) -> SubmissionReply:
        """Send what was recorded so far and wait for what `ask` names."""
        if len(ask.fetch) > limits.BUFFERS:  # that many come with one reply
            first = self.ask(msgspec.structs.replace(ask, fetch=ask.fetch[: limits.BUFFERS]))
            rest = self.ask(SyncRequest(ask.fetch[limits.BUFFERS :]))
            return msgspec.structs.replace(rest, tensors=first.tensors + rest.tensors, described=first.described)
        return self.ask_unseen(ask)

    def ask_unseen(self, ask: SyncRequest) -> SubmissionReply:
        """As `ask`, for a caller that no modes see, and no more values than come with one reply."""
        require_stack_room()
        runtime = _runtime()
        with interrupt_mask:
            try:
                with collect_later:
                    runtime, number = self._send_masked(runtime, ask)
                    pause = collect_later.thread
                    before, pause.only_waits = pause.only_waits, pause.depth == 1
                    try:
                        return runtime.wait(number)
                    finally:
                        pause.only_waits = before
            except KeyboardInterrupt:
                runtime.interrupted()
                raise
            except DjinnError as error:
                suppress_at_shutdown.at(error)
                raise

    @without_modes
    def ask_later(self, fetch: tuple[int, ...], nbytes: int) -> tuple[Runtime, int]:
        """Send what was recorded so far, and ask for values of `nbytes` that `wait` of the runtime gives later."""
        runtime, number = _runtime(), None
        try:
            with interrupt_mask, self._shared.sending:
                runtime, number = self._send(runtime, SyncRequest(fetch=fetch))
                runtime.defer(number, nbytes)
        except KeyboardInterrupt:
            if number is not None:
                runtime.discard(number)  # it was sent, and is not asked for any more
            raise
        return runtime, number

    def upload(self, handle: int, source: torch.Tensor, device: int) -> None:
        """Make `source` (a CPU tensor) the value `handle` of a logical device; it is the caller's again afterwards.

        Raises:
            UnsupportedOperation: it has more dimensions than remote tensors have.
        """
        check_dimensions("an upload", source.dim())
        require_stack_room()
        if self.constants is not None:
            self.constants.append((handle, source.clone(), device))
        if self.captures and not port.is_open():
            self._shared.held_back.append((handle, source.clone(), device))
            return
        runtime = _runtime()
        with interrupt_mask, suppress_at_shutdown, collect_later:
            self._shared.send_held_back(runtime)
            if (timeline := port.timeline) is None:
                runtime.upload(handle, source, device)
            else:
                timeline.enter("upload")
                try:
                    runtime.upload(handle, source, device)
                finally:
                    timeline.leave()
        self.uploaded += source.nbytes
        self.uploads += 1
        if self.uploaded >= UPLOADED_LIMIT or self.uploads >= port.checkpoint_instructions:
            self.uploaded = self.uploads = 0
            if ops.look_freed() and not self.captures:
                self._send(runtime, SyncRequest())

    def read_weights(self, handle: int, stored: StoredTensor, device: int) -> None:
        """Have the executor make the value `handle` of what it reads itself.

        Raises:
            UnsupportedOperation: a call is recorded that will be repeated without being called.
        """
        require_stack_room()
        if self.constants is not None:
            raise UnsupportedOperation(
                "weights cannot be read in a call that is recorded to be repeated: read them before it"
            )
        runtime = _runtime()
        with interrupt_mask, suppress_at_shutdown, collect_later:
            self._shared.send_held_back(runtime)
            runtime.read_weights(handle, stored, device)

    def _send(self, runtime: Runtime, ask: SyncRequest, cut: Callable[[list[Entry]], int] = len) -> tuple[Runtime, int]:
        require_stack_room()
        with interrupt_mask, suppress_at_shutdown, collect_later:
            return self._send_masked(runtime, ask, cut)

    def _send_masked(
        self, runtime: Runtime, ask: SyncRequest, cut: Callable[[list[Entry]], int] = len
    ) -> tuple[Runtime, int]:
        """The runtime that the submission went to, which is the successor of `runtime` where there is one by now; its number there."""
        shared = self._shared
        if not shared.sending.acquire(blocking=False):
            with shared.sending:  # waits where it can be interrupted
                return self._send_masked(runtime, ask, cut)
        try:
            runtime = runtime.successor or runtime
            if shared.held_back:
                shared.send_held_back(runtime)
            while shared.unsent:
                shared.submit(runtime, shared.unsent.popleft())
            if ask.synchronize or shared.waiting:
                everything = ask.synchronize or shared.waiting > WAITING_LIMIT
                for other in shared.all():
                    if other is not self and other.entries and (everything or other.ended):
                        shared.submit(runtime, other.take(SyncRequest()))
            return runtime, shared.submit(runtime, self.take(ask, cut))
        finally:
            shared.sending.release()

    def take(self, ask: SyncRequest, cut: Callable[[Any], int] = len) -> Submission:
        """Take what was recorded so far, as far as `cut` says, to be submitted before `sending` is released."""
        if self.program == _NO_PROGRAM:  # another thread has taken all since the caller looked
            return Submission(NOTHING, (), ask.fetch, ask.describe, ask.synchronize)
        shared = self._shared
        meta_only = shared.meta_only
        if meta_only.storages:
            meta_only.sift(self.entries)
            meta_only.refuse((*ask.fetch, *ask.describe))
        dead, shared.waiting = ops.freed(self.program)
        count = -1 if cut is len else cut(self.entries)
        columns = ops.take(self.program, count)
        taken = Entries(columns, self._modules(columns))
        length = len(taken.calls)
        if self._moments:
            at, module = self._moments[-1]
            self._moments = [(at - length if at > length else 0, module)]
        if (timeline := port.timeline) is not None:
            timeline.taken(self, length)
        port.ops_captured += length
        if length:
            if not self._predictor.taken(taken) or (self.limit, port.checkpoint_instructions) != self._usual:
                self._set_limit()
            if not ask.fetch:
                self.fetches.sent(taken)
        if count >= 0 and len(self.entries):
            used = set(self.look(0).handles)
            ops.put_back([handle for handle in dead if handle in used], self.program)
            dead = [handle for handle in dead if handle not in used]
        self.uploaded = self.uploads = 0
        for captured in self.captures:
            captured.entries.extend(taken)
            captured.fetched.update(ask.fetch)
        known, at = self._predictor.place if length else (None, WHOLE)
        if shared.thread.recorder is not self and self.done:
            self.retire()
        return self._submission(taken, dead, ask, known, at)

    def _submission(self, taken: Entries, dead: list[int], ask: SyncRequest, known: object, at: int) -> Submission:
        meta_only = self._shared.meta_only
        present: Sequence[Entry] = taken
        if meta_only.storages:
            present, known = meta_only.sift(taken), None  # it may have fewer instructions
            dead = self._forget_meta_only(dead)
        handles = [*dead, *self._take_dead()] if self.dead else dead
        program = taken.program(handles) if present is taken and taken.calls else freeze(present, handles)
        inside = program.dead
        free = tuple(filterfalse(inside.__contains__, handles)) if handles and inside != set(handles) else ()
        return Submission(program, free, ask.fetch, ask.describe, ask.synchronize, known, at)

    def _forget_meta_only(self, dead: list[int]) -> list[int]:
        """Return those of the dead handles whose values exist. A storage without data is forgotten with its last value."""
        storages = self._shared.meta_only.storages
        gone = {storage_of(handle) for handle in dead}.intersection(storages)
        if not gone:
            return dead
        left = {storage_of(handle) for handle in (*(handle for handle, _ in live_values()), *still_to_free())}
        present = [handle for handle in dead if storage_of(handle) not in storages]
        storages -= gone - left
        return present

    def _take_dead(self) -> list[int]:
        """Take the handles in `dead` that no remaining entry refers to."""
        if not self.entries:
            taken, self.dead = self.dead, []
            return taken
        used = {handle for entry in self.entries for handle in entry.handles} if self.dead else set()
        taken = [handle for handle in self.dead if handle not in used]
        self.dead = [handle for handle in self.dead if handle in used]
        return taken


def _runtime() -> Runtime:
    try:
        start = port.start
        return start() if start is not None else port.runtime()
    except DjinnError as error:
        suppress_at_shutdown.at(error)
        raise


def freeze(entries: Sequence[Entry], dead: list[int]) -> Program:
    """The entries as a frozen program; handles in `dead` that it mentions die with it."""
    if not entries:
        return NOTHING
    calls, handles, slots, sites, modules = zip(*map(msgspec.structs.astuple, entries), strict=True)
    operands = tuple(chain.from_iterable(handles))
    inside = frozenset(dead).intersection(operands) if dead else frozenset()
    return Program(calls, operands, tuple(chain.from_iterable(slots)), inside, sites, modules)


class Recorders:
    """The recorders of all threads, and what they share: how programs follow one another, and what waits to be sent.

    Attributes:
        thread: the present thread's recorder, which its first use makes; there since `begin`.
        sending: serialises cutting and sending, so that programs arrive in the order in which they were cut. Reentrant, because
            cutting one thread's program may demand that another's goes first. A forked child has a new one. No thread that holds
            it begins a session: `locked_session` begins the session first.
        held_back: uploads that a capture holds back, so that it starts no server: handles and copies of what they will be.
        unsent: submissions that were taken and not sent, because an interrupt came before: they go first.
        waiting: number of freed handles that wait for the unsent programs of other threads.
        meta_only: storages without data. predictable_programs: programs as they were recorded last time.
    """

    def __init__(self) -> None:
        self.held_back: deque[tuple[int, torch.Tensor, int]] = deque()
        self.unsent: deque[Submission] = deque()
        self.waiting = 0
        self.meta_only = MetaOnlyStorages()
        self.predictable_programs = PredictablePrograms()
        # Weak: a recorder whose thread has ended lives as long as a storage that its program touches.
        self._all: weakref.WeakSet[Recorder] = weakref.WeakSet()
        self._make_locks()
        self.thread: _ThreadRecorder | _ForkedChild

    def _make_locks(self) -> None:
        self.sending = InterruptibleLock()
        self._all_lock = threading.RLock()

    def begin(self) -> None:
        """Give each thread a recorder; once the library is loaded."""
        self.thread = _ThreadRecorder(self)

    def new(self) -> Recorder:
        """A recorder for a thread."""
        made = Recorder.of_thread(self)
        with self._all_lock:
            self._all.add(made)
        if (timeline := port.timeline) is not None:
            timeline.follow(made)
        return made

    def all(self) -> list[Recorder]:
        """The recorders of all threads."""
        with self._all_lock:
            return list(self._all)

    @contextmanager
    def locked_session(self) -> Iterator[Runtime]:
        """Hold `sending` in the block and yield the open session. Begin a session if none is open.

        The lock order is the context's lock, then `sending`, so this begins the session before it takes `sending`. It starts over
        if another thread ended the session in between.
        """
        while True:
            ended = port.sessions_ended
            runtime = _runtime()
            with self.sending:
                if port.sessions_ended == ended:
                    yield runtime.successor or runtime
                    return

    def send_held_back(self, runtime: Runtime) -> None:
        """Upload what captures have held back. The caller holds `sending`."""
        while self.held_back:
            runtime.upload(*self.held_back[0])
            self.held_back.popleft()

    def submit(self, runtime: Runtime, submission: Submission) -> int:
        """Submit what was taken. Where an interrupt comes before it is sent, nothing of it is lost, but what it asks for."""
        number = 0
        parts = [submission] if fits(submission) else [*in_parts(submission)]
        for position, part in enumerate(parts):
            try:
                if (timeline := port.timeline) is None:
                    number = runtime.submit(part)
                else:
                    timeline.enter("submit", len(part.program))
                    try:
                        number = runtime.submit(part)
                    finally:
                        timeline.leave()
            except KeyboardInterrupt:
                left = parts[position:]
                rest = [msgspec.structs.replace(one, fetch=(), describe=(), synchronize=False) for one in left]
                self.unsent.extendleft(reversed(rest))
                raise
        return number

    def drop_everything(self) -> None:
        """Drop everything recorded for a session that has ended, and its pending frees: the next session has no use for them."""
        with self.sending:
            for recorder in self.all():
                recorder.take(SyncRequest())
            Recorder.end_session()
            self.held_back.clear()
            self.unsent.clear()
            self.meta_only.clear()
            port.sessions_ended += 1
            port.memory_changes += 1

    def have_unsent_values(self) -> bool:
        """Return True if an unsent program has values. A program that only seeds the random state has no values."""
        return bool(self.held_back) or bool(ops.any_unsent_values())

    def forget_everything(self) -> None:
        """In a forked child: the programs belong to the parent, and locks may be held by threads that stayed there."""
        self._make_locks()
        collect_later.restart()
        self._all.clear()
        self.waiting = 0
        self.predictable_programs = PredictablePrograms()
        Recorder.begin_in_child()
        self.held_back.clear()
        self.unsent.clear()
        self.thread = _ForkedChild() if port.forked else _ThreadRecorder(self)


class _ThreadRecorder(threading.local):
    def __init__(self, recorders: Recorders) -> None:
        self.recorder = recorders.new()


class _ForkedChild:
    """In the place of `_ThreadRecorder` where nothing can be recorded."""

    @property
    def recorder(self) -> Recorder:
        """None.

        Raises:
            ForkedProcess: always.
        """
        raise ForkedProcess


recorders: Final = Recorders()


def current() -> Recorder:
    """This thread's recorder."""
    return recorders.thread.recorder


def current_or_none() -> Recorder | None:
    """This thread's recorder; None in a forked child, which computes on the CPU without the device."""
    try:
        return recorders.thread.recorder
    except ForkedProcess:
        return None


@contextmanager
def recording_on(recorder: Recorder) -> Iterator[None]:
    """Have this thread record on `recorder` inside the block."""
    thread = recorders.thread
    if isinstance(thread, _ForkedChild):
        raise ForkedProcess
    before, thread.recorder = thread.recorder, recorder
    recorder.begin_on_thread()
    try:
        yield
    finally:
        thread.recorder = before
        before.begin_on_thread()


def recorder_of(program: int) -> Recorder | None:
    """The recorder over a program of C++."""
    return _by_program.get(program)


def _unsent_ops() -> int:
    """Entries of all threads that were not taken yet."""
    return sum(recorder.counters[ENTRIES] for recorder in list(_by_program.values()))


def _cut(program: int) -> None:
    if (recorder := recorder_of(program)) is not None:
        recorder.cut()
    elif ops.look_calls(program) and recorder_of(program) is None:
        raise AssertionError(f"program {program} has unsent ops and no recorder")  # C++ would ask for ever


def _at_limit() -> None:
    current().cut_at_limit()


def _begin_program() -> None:
    current()


def register() -> None:
    """Have C++ call these."""
    implement(cut=_cut, at_limit=_at_limit, begin_program=_begin_program)
    number_storages_by(ops.reserve_storages)  # plans make values beside those that programs record
    port.ops_unsent = _unsent_ops
    recorders.begin()
