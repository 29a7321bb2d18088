"""Recorders: the program that each thread is recording, and when it is cut and sent."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from time import perf_counter
from typing import Any, Final, TypeVar

import msgspec
import torch

from djinn_client.interception.deadlines import locked_in_time
from djinn_client.interception.interpreter_shutdown import suppress_at_shutdown
from djinn_client.interception.native import calls as native_calls
from djinn_client.interception.native import entries as native_entries
from djinn_client.interception.native.entries import (
    DIFFERENTIATING,
    ENTRIES,
    EPOCH,
    LIMIT,
    RecordedProgram,
)
from djinn_client.interception.native.library import implement, ops
from djinn_client.interception.recording.cut_points import steady_cut
from djinn_client.interception.recording.entry import Entry, MetaOnlyStorages, SentEntries
from djinn_client.interception.recording.fetch_prediction import FetchPredictor
from djinn_client.interception.recording.split_submission import fits, in_parts
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.shape_inference.message_limits import check_dimensions
from djinn_client.interception.tap import taps
from djinn_client.interception.tensors.known_contents import known_contents
from djinn_client.interception.tensors.storage import Storage, Value, handles_to_free, live_values
from djinn_client.sink import M, Submission, SubmissionReply, Ticket
from djinn_client.torch_dispatch import without_modes
from djinn_core.errors import DjinnError, ForkedProcess, UnsupportedOperation
from djinn_core.ir.handles import number_storages_by, storage_of
from djinn_core.ir.module_path import ForwardCalls, ModuleCall
from djinn_core.ir.program import Program
from djinn_core.ir.stored_tensor import StoredTensor
from djinn_core.system.gc_pause import collect_later
from djinn_core.system.interrupts import InterruptibleLock, interrupt_mask, require_stack_room
from djinn_core.wire import limits
from djinn_core.wire.message_base import Message

WAITING_LIMIT = 1024  # freed handles that may wait for the unsent programs of other threads
NOTHING = Program((), (), ())
UPLOADED_LIMIT = 256 << 20  # bytes of uploads after which a program is cut, so that dead uploads are freed

T = TypeVar("T")


class SyncRequest(msgspec.Struct):
    """Requests that accompany a program.

    Attributes:
        fetch: handles of values whose elements the reply contains.
        describe: handles of values whose metadata the reply contains.
        synchronize: True if the reply comes after the device has finished.
        later: as `Submission.later`.
        predicts: True to add the predicted next fetches to `fetch`.
    """

    fetch: tuple[int, ...] = ()
    describe: tuple[int, ...] = ()
    synchronize: bool = False
    later: int | None = None
    predicts: bool = False


def _memory_of(tensor: torch.Tensor) -> memoryview[int]:
    array: Any = tensor.numpy()
    return memoryview(array)


_NO_PROGRAM: Final = -1
_no_counters: Final = _memory_of(
    torch.zeros(DIFFERENTIATING + 1, dtype=torch.int64)
)  # recorders whose threads have ended
_by_program: Final[dict[int, Recorder]] = {}
_retire_lock = threading.RLock()  # held while a program loses its recorder


class Recorder:
    """Record one thread's program.

    C++ appends the entries, and orders programs of several threads that use one storage.

    Attributes:
        program: number of the program in C++.
        counters: counters of the program, such as the number of entries, in C++ memory.
        is_of_thread: True if it records a thread's ops, which are sent.
        captures: for each active capture, the entries that were sent.
        fixed: the last entry before the innermost capture, which `take_back` must not remove. None outside of captures.
        constants: uploaded values (handle, elements, logical device) while a capture tracks them.
        module: the module call that the thread is inside, or None.
        moments: for each change of `module`, the number of entries before it and the new module call.
        forward_calls: earlier module calls of the thread.
        fetches: predicts the thread's fetches.
        uploaded: bytes of uploads since the last cut.
        uploads: number of uploads since the last cut.
    """

    __slots__ = (
        "_shared",
        "_thread",
        "captures",
        "constants",
        "counters",
        "fetches",
        "fixed",
        "forward_calls",
        "module",
        "moments",
        "program",
        "uploaded",
        "uploads",
    )
    is_of_thread = True

    def __init__(self, shared: Recorders, program: int | None = None) -> None:
        """Create a recorder.

        Args:
            shared: the state that the recorders of all threads share.
            program: number of a thread's program. None: create a program for no thread.
        """
        self._shared = shared
        self.program = int(ops.new_program()) if program is None else program
        self.counters = _memory_of(ops.counters(self.program))
        self.moments: dict[int, ModuleCall | None] = {}
        self.module: ModuleCall | None = None
        self.captures: list[SentEntries] = []
        self.fetches = FetchPredictor()
        self.constants: list[tuple[int, torch.Tensor, int]] | None = None
        self.fixed: Entry | None = None
        self.forward_calls = ForwardCalls()
        self.differentiating = False
        self.uploaded = 0
        self.uploads = 0
        self.limit = port.checkpoint_instructions
        self._thread = weakref.ref(threading.current_thread())
        if port.lock.acquire(blocking=False):  # else another thread may be taking the program of a finished recorder
            try:
                for recorder in [*_by_program.values()]:
                    if recorder.done:
                        recorder.retire()
            finally:
                port.lock.release()
        _by_program[self.program] = self

    def retire(self) -> None:
        """Release the program for another thread. This thread has ended, and all its entries were sent."""
        with _retire_lock:
            if (number := self.program) == _NO_PROGRAM:
                return
            _by_program.pop(number, None)
            self.program, self.counters = _NO_PROGRAM, _no_counters
        ops.let_go(number)

    @staticmethod
    def begin_in_child() -> None:
        """Forget everything in a forked child, before it records."""
        global _retire_lock
        _retire_lock = threading.RLock()  # a thread of the parent may have held the lock
        native_calls.begin_in_child()
        native_entries.begin_in_child()
        _by_program.clear()
        ops.forget_programs()
        ops.set_forked(port.forked)

    def begin_on_thread(self) -> None:
        """Make this the recorder of the current thread."""
        ops.switch_program(self.program)

    @property
    def thread(self) -> str:
        """Return the name of the thread; empty if it has ended."""
        thread = self._thread()
        return thread.name if thread is not None else ""

    @property
    def done(self) -> bool:
        """Return True if nothing is unsent and the thread has ended."""
        return self.ended and not self.unsent  # in this order, because the thread may record its last op in between

    @property
    def ended(self) -> bool:
        """Return True if the thread has ended, and will record nothing more."""
        thread = self._thread()
        if thread is None:
            return True
        # Python marks the main thread as ended before it runs atexit handlers, which may record.
        return not thread.is_alive() and thread is not threading.main_thread()

    @property
    def entries(self) -> RecordedProgram:
        """Unsent entries."""
        return RecordedProgram(ops.look(self.program, 0), {**self.moments}, self.forward_calls)

    @property
    def unsent(self) -> int:
        """Return the number of unsent entries."""
        return self.counters[ENTRIES]

    @property
    def epoch(self) -> int:
        """Return the number of cuts so far."""
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
        """Return True if the thread is in a backward pass."""
        return bool(self.counters[DIFFERENTIATING])

    @differentiating.setter
    def differentiating(self, on: bool) -> None:
        self.counters[DIFFERENTIATING] = on

    def move_to(self, module: ModuleCall | None) -> None:
        """Set the module that the thread is inside. `follow_modules` does the same without a call."""
        self.moments[self.counters[ENTRIES]] = self.module = module

    def order_after(self, storage: Storage) -> None:
        """Order the unsent work of other threads on `storage` before the entries that this thread records next."""
        ops.note_read(storage.holder)

    def take_back(self, value: Value) -> bool:
        """Remove the last instruction if it created the empty memory of `value`. Return True if it was removed."""
        if self.fixed is not None and self.unsent and self.entries[-1].handles == self.fixed.handles:
            return False
        if not ops.take_back(value.holder):
            return False
        if self.moments and next(reversed(self.moments)) > self.counters[ENTRIES]:
            self.moments.popitem()
            self.move_to(self.module)
        return True

    @without_modes
    def prepare(self) -> None:
        """Raise an error if no server can be reached, so that the first op fails instead of the first fetch.

        A capture needs no server.
        """
        if not self.captures:
            port.prepare()

    def cut(self) -> None:
        """Send the recorded ops without waiting."""
        if self.unsent:
            self._send(SyncRequest())

    def flush(self) -> None:
        """Send the recorded ops and pending frees of all threads, without waiting."""
        self.send_then(lambda: None)

    def cut_all(self) -> None:
        """Send the recorded ops of all threads except threads in captures, without waiting."""
        require_stack_room()
        if any(recorder.unsent and not recorder.captures for recorder in self._shared.all()):
            with interrupt_mask, suppress_at_shutdown, collect_later, self._shared.locked_session():
                for recorder in self._shared.all():
                    if not recorder.captures:
                        recorder.cut()

    def query(self, message: Message, kind: type[M], device: int = 0) -> M:
        """Send all recorded ops, then `message`, and return the reply; see `Sink.ask`."""
        return self.send_then(lambda: port.sink.ask(message, kind, device), in_time=True)

    def send_then(self, question: Callable[[], T], *, in_time: bool = False) -> T:
        """Send the recorded ops of all threads, then call `question` and return its result, under the sink's lock.

        `in_time`: as in `locked_session`.
        """
        require_stack_room()
        with interrupt_mask, suppress_at_shutdown, collect_later, self._shared.locked_session(in_time=in_time):
            for recorder in self._shared.all():
                if recorder is not self:
                    recorder.cut()
            self._send(SyncRequest())
            try:
                return question()
            except KeyboardInterrupt:
                port.sink.abandon()
                raise

    def cut_at_limit(self) -> None:
        """Send most of a program that has reached `limit` entries."""
        self.limit = port.checkpoint_instructions
        if self.unsent >= self.limit and not self.captures:
            self._send(SyncRequest(), steady_cut)

    @without_modes
    def ask(self, request: SyncRequest) -> SubmissionReply:
        """Send the recorded ops and wait for the results that `request` names."""
        if len(request.fetch) > limits.BUFFERS:  # limit for one reply
            first = self.ask(msgspec.structs.replace(request, fetch=request.fetch[: limits.BUFFERS]))
            last = self.ask(SyncRequest(request.fetch[limits.BUFFERS :]))
            return msgspec.structs.replace(last, tensors=first.tensors + last.tensors, described=first.described)
        return self.ask_unseen(request)

    def ask_unseen(self, request: SyncRequest) -> SubmissionReply:
        """Send and wait as `ask`, but leave the active dispatch modes on. All values must fit into one reply."""
        require_stack_room()
        _open()
        with interrupt_mask:
            try:
                with collect_later:
                    ticket = self._send_masked(request)
                    pause = collect_later.thread
                    before, pause.only_waits = pause.only_waits, pause.depth == 1
                    try:
                        return port.sink.wait(ticket)
                    finally:
                        pause.only_waits = before
            except KeyboardInterrupt:
                port.sink.abandon()
                raise
            except DjinnError as error:
                suppress_at_shutdown.at(error)
                raise

    @without_modes
    def ask_later(self, fetch: tuple[int, ...], nbytes: int) -> Ticket:
        """Send the recorded ops and request the values `fetch`, `nbytes` bytes in total. Return a ticket for `Sink.wait`."""
        _open()
        ticket: Ticket = None
        try:
            with interrupt_mask:
                ticket = self._send(SyncRequest(fetch=fetch, later=nbytes))
        except KeyboardInterrupt:
            if ticket is not None:
                port.sink.abandon(ticket)  # the program was sent, and its values are not requested any more
            raise
        return ticket

    def upload(self, handle: int, source: torch.Tensor | StoredTensor, device: int) -> None:
        """Upload one CPU tensor as the remote value `handle` of a logical device. The executor reads a stored weight itself.

        Raises:
            UnsupportedOperation: `source` has too many dimensions, or it is a stored weight inside a call that is
                recorded for replay.
        """
        require_stack_room()
        if isinstance(source, StoredTensor):
            if self.constants is not None:
                raise UnsupportedOperation(
                    "stored weights cannot be read inside a call that is recorded for replay: read them before the call"
                )
            self._upload(handle, source, device)
            return
        check_dimensions("an upload", source.dim())
        if self.constants is not None:
            self.constants.append((handle, source.clone(), device))
        if self.captures and not port.is_open():
            self._shared.deferred_uploads.append((handle, source.clone(), device))
            return
        self._upload(handle, source, device)
        self.uploaded += source.nbytes
        self.uploads += 1
        if self.uploaded >= UPLOADED_LIMIT or self.uploads >= port.checkpoint_instructions:
            self.uploaded = self.uploads = 0
            if ops.look_freed() and not self.captures:
                self._send(SyncRequest())

    def _upload(self, handle: int, source: torch.Tensor | StoredTensor, device: int) -> None:
        _open()
        with interrupt_mask, suppress_at_shutdown, collect_later:
            self._shared.send_deferred_uploads()
            begun = perf_counter()
            try:
                port.sink.upload(handle, source, device)
            finally:
                for notify in taps.uploaded:
                    notify(begun)

    def _send(self, request: SyncRequest, count_entries: Callable[[list[Entry]], int] = len) -> Ticket:
        require_stack_room()
        _open()
        with interrupt_mask, suppress_at_shutdown, collect_later:
            return self._send_masked(request, count_entries)

    def _send_masked(self, request: SyncRequest, count_entries: Callable[[list[Entry]], int] = len) -> Ticket:
        shared = self._shared
        if not port.lock.acquire(blocking=False):
            waits = request.later is None and (request.fetch or request.describe or request.synchronize)
            with locked_in_time(port.lock) if waits else port.lock:  # the wait here can be interrupted
                return self._send_masked(request, count_entries)
        try:
            if shared.deferred_uploads:
                shared.send_deferred_uploads()
            while shared.unsent:
                shared.submit(shared.unsent.popleft())
            if request.synchronize or shared.waiting:
                everything = request.synchronize or shared.waiting > WAITING_LIMIT
                for recorder in shared.all():
                    if recorder is not self and recorder.unsent and (everything or recorder.ended):
                        shared.submit(recorder.take(SyncRequest()))
            return shared.submit(self.take(request, count_entries))
        finally:
            port.lock.release()

    def take(self, request: SyncRequest, count_entries: Callable[[Any], int] = len) -> Submission:
        """Remove the recorded ops, and return them as a submission with the requests of `request`.

        The caller must submit it before it releases the sink's lock.

        `count_entries`: returns the number of entries to take from the given entries. By default, all entries are taken.
        """
        if self.program == _NO_PROGRAM:  # another thread has taken everything since the caller looked
            return Submission(NOTHING, (), request.fetch, request.describe, request.synchronize, later=request.later)
        shared = self._shared
        meta_only = shared.meta_only
        if meta_only.storages:
            meta_only.sift(self.entries)
            meta_only.refuse((*request.fetch, *request.describe))
        count = -1 if count_entries is len else count_entries(self.entries)
        program = RecordedProgram(ops.take(self.program, count), self.moments, self.forward_calls)
        shared.waiting, length = program.waiting, len(program)
        if self.moments:  # a new table: the entries keep the old one
            last = next(reversed(self.moments))
            self.moments = {last - length if last > length else 0: self.module}
        for notify in taps.taken:
            notify(self, length)
        shared.ops_captured += length
        if length:
            self.counters[LIMIT] = port.checkpoint_instructions
            if request.predicts:
                request.fetch += self.fetches.begin(program, request.fetch[0])
            elif not request.fetch:
                self.fetches.note_piece(program)
        self.uploaded = self.uploads = 0
        for capture in self.captures:
            capture.entries.extend(program)
            capture.fetched.update(request.fetch)
        if shared.thread.recorder is not self and self.done:
            self.retire()
        return self._submission(program, request)

    def _submission(self, taken: RecordedProgram, request: SyncRequest) -> Submission:
        meta_only = self._shared.meta_only
        program: Program = taken
        free = taken.free
        if meta_only.storages:
            present = meta_only.sift(taken)
            dead = self._forget_meta_only([*taken.dead, *free])
            program = freeze(present, dead)
            free = [handle for handle in dead if handle not in program.dead]
        return Submission(program, tuple(free), request.fetch, request.describe, request.synchronize, request.later)

    def _forget_meta_only(self, dead: list[int]) -> list[int]:
        """Return the handles in `dead` whose values have data.

        If the last value of a storage without data dies, forget the storage.
        """
        storages = self._shared.meta_only.storages
        freed = {storage_of(handle) for handle in dead}.intersection(storages)
        if not freed:
            return dead
        live = {storage_of(handle) for handle in (*(handle for handle, _ in live_values()), *handles_to_free())}
        present = [handle for handle in dead if storage_of(handle) not in storages]
        storages -= freed - live
        return present


def _open() -> None:
    """Begin a session if none is open. If the caller holds the lock, the session is open already."""
    try:
        port.sink.open()
    except DjinnError as error:
        suppress_at_shutdown.at(error)
        raise


def freeze(entries: Sequence[Entry], dead: list[int]) -> Program:
    """Return the entries as a program. Handles in `dead` that occur in the entries die with the program."""
    if not entries:
        return NOTHING
    calls, handles, slots, sites, modules = zip(*map(msgspec.structs.astuple, entries), strict=True)
    operands = tuple(chain.from_iterable(handles))
    inside = frozenset(dead).intersection(operands) if dead else frozenset()
    return Program(calls, operands, tuple(chain.from_iterable(slots)), inside, sites, modules)


class Recorders:
    """The recorders of all threads, and their shared state: everything that waits to be sent.

    Attributes:
        thread: recorder of the current thread, created on first use. Exists after `begin`.
        deferred_uploads: uploads that a capture defers, because it starts no server: (handle, copy of the data, device).
        unsent: submissions that were not sent because of an interrupt or an error. They are sent first.
        waiting: number of freed handles that wait for the unsent programs of other threads.
        ops_captured: number of ops taken so far.
        begun: True once the library is loaded.
        meta_only: storages without data.
    """

    def __init__(self) -> None:
        self.deferred_uploads: deque[tuple[int, torch.Tensor, int]] = deque()
        self.unsent: deque[Submission] = deque()
        self.waiting = 0
        self.meta_only = MetaOnlyStorages()
        self.ops_captured = 0
        self.begun = False
        self.thread: _ThreadRecorder | _ForkedChild

    def begin(self) -> None:
        """Prepare recorders for threads. Call this once the library is loaded."""
        self.thread = _ThreadRecorder(self)
        self.begun = True

    def all(self) -> list[Recorder]:
        """The recorders of all threads."""
        return [recorder for recorder in [*_by_program.values()] if recorder.is_of_thread]

    @contextmanager
    def locked_session(self, *, in_time: bool = False) -> Iterator[None]:
        """Hold the sink's lock in the block, with a session open.

        The context's lock must be acquired before the sink's lock. So this begins the session before it acquires the
        sink's lock, and starts over if another thread ended the session in between.

        `in_time`: True if this thread's deadline limits the wait for the lock.
        """
        while True:
            session_number = port.sessions_ended
            _open()
            with locked_in_time(port.lock) if in_time else port.lock:
                if port.sessions_ended == session_number:
                    yield
                    return

    def send_deferred_uploads(self) -> None:
        """Upload the data that captures have deferred."""
        while self.deferred_uploads:
            port.sink.upload(*self.deferred_uploads[0])
            self.deferred_uploads.popleft()

    def submit(self, submission: Submission) -> Ticket:
        """Submit a submission, in parts if necessary. Return the ticket of its reply.

        After an interrupt or error, the unsent parts are sent with the next submission, without their requests.
        """
        ticket: Ticket = None
        parts = [submission] if fits(submission) else [*in_parts(submission)]
        for position, part in enumerate(parts):
            begun = perf_counter()
            try:
                ticket = port.sink.submit(part)
            except BaseException as error:
                # The runtime refuses the values of a part that it cannot plan. It sends nothing of a part that is
                # interrupted.
                unsent = parts[position if isinstance(error, KeyboardInterrupt) else position + 1 :]
                self.unsent.extendleft(
                    msgspec.structs.replace(part, fetch=(), describe=(), synchronize=False, later=None)
                    for part in reversed(unsent)
                )
                raise
            finally:
                for notify in taps.submitted:
                    notify(begun, len(part.program))
        return ticket

    def drop_everything(self) -> None:
        """Drop all recorded ops and pending frees after a session has ended. The next session cannot use them."""
        for recorder in self.all():
            recorder.take(SyncRequest())
        ops.end_session()  # freed handles, and states of generators
        self.deferred_uploads.clear()
        self.unsent.clear()
        self.meta_only.clear()
        known_contents.clear()

    def limit_programs(self) -> None:
        """Limit programs, including current programs, to `port.checkpoint_instructions` instructions from now on."""
        for recorder in self.all():
            recorder.limit = port.checkpoint_instructions

    def count_ops(self) -> int:
        """Return the number of ops that all threads have recorded so far."""
        return self.ops_captured + sum(recorder.counters[ENTRIES] for recorder in list(_by_program.values()))

    def have_unsent_values(self) -> bool:
        """Return True if an unsent program has values. A program that only seeds the random state has no values."""
        return bool(self.deferred_uploads) or bool(ops.any_unsent_values())

    def forget_everything(self) -> None:
        """Reset in a forked child: the programs belong to the parent, and threads of the parent may have held the locks."""
        port.lock = InterruptibleLock()
        collect_later.restart()
        self.waiting = 0
        Recorder.begin_in_child()
        self.deferred_uploads.clear()
        self.unsent.clear()
        self.thread = _ForkedChild() if port.forked else _ThreadRecorder(self)


class _ThreadRecorder(threading.local):
    def __init__(self, recorders: Recorders) -> None:
        self.recorder = Recorder(recorders, int(ops.thread_program()))


class _ForkedChild:
    """Replacement of `_ThreadRecorder` in a forked child, in which nothing can be recorded."""

    @property
    def recorder(self) -> Recorder:
        """Raise `ForkedProcess`.

        Raises:
            ForkedProcess: always.
        """
        raise ForkedProcess


recorders: Final = Recorders()


def current() -> Recorder:
    """Return this thread's recorder."""
    return recorders.thread.recorder


def is_capturing() -> bool:
    """Return True if this thread is inside `capture()`."""
    return bool(current().captures)


def current_or_none() -> Recorder | None:
    """Return this thread's recorder. Return None in a forked child, which works on the CPU only."""
    try:
        return recorders.thread.recorder
    except ForkedProcess:
        return None


@contextmanager
def recording_on(recorder: Recorder) -> Iterator[None]:
    """Context manager in which this thread's ops are recorded on `recorder`."""
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


def _cut(program: int) -> None:
    if (recorder := _by_program.get(program)) is not None:
        recorder.cut()
    elif ops.counters(program)[ENTRIES] and program not in _by_program:
        # otherwise C++ would ask again forever
        raise AssertionError(f"program {program} has unsent ops, but no recorder")


def _at_limit() -> None:
    current().cut_at_limit()


def _begin_program() -> None:
    current()


def register() -> None:
    """Register the functions that C++ calls."""
    implement(cut=_cut, at_limit=_at_limit, begin_program=_begin_program)
    number_storages_by(ops.reserve_storages)  # plans create values in addition to those of programs
    recorders.begin()
