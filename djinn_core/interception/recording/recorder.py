"""Recorders: the program that each thread is recording, and the points at which it is cut and sent."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, filterfalse
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import torch

from djinn_core.errors import DjinnError, ForkedProcess, UnsupportedOperation
from djinn_core.interception.device.device_state import device_state
from djinn_core.interception.interpreter_shutdown import suppress_at_shutdown
from djinn_core.interception.recording.call_site import CallSites
from djinn_core.interception.recording.cut_points import steady_cut
from djinn_core.interception.recording.entry import Entry, SentEntries
from djinn_core.interception.recording.fetch_prediction import FetchPredictor
from djinn_core.interception.recording.gc_pause import collect_later
from djinn_core.interception.recording.meta_only_storages import MetaOnlyStorages
from djinn_core.interception.recording.program_prediction import OPENING, PredictablePrograms, ProgramPredictor
from djinn_core.interception.recording.split_submission import fits, in_parts
from djinn_core.interception.runtime_interface import (
    WHOLE,
    CacheMemory,
    Publication,
    Runtime,
    SavedWeights,
    Submission,
    SubmissionReply,
    port,
)
from djinn_core.interception.shape_inference.message_limits import check_dimensions
from djinn_core.interception.tensors.storage import Storage, Value, take_freed
from djinn_core.interrupts import InterruptibleLock, interrupt_mask
from djinn_core.ir.module_path import ForwardCalls, ModuleCall
from djinn_core.ir.program import Program
from djinn_core.ir.stored_tensor import StoredTensor, UnfinishedOpening, WeightListing
from djinn_core.stack_room import require_stack_room
from djinn_core.torch_private import without_modes
from djinn_core.wire import limits

WAITING_LIMIT = 1024  # freed handles that may wait for the unsent programs of other threads
NOTHING = Program((), (), ())
UPLOADED_LIMIT = 256 << 20  # bytes of uploads after which a program is cut, so that those that died are freed

if TYPE_CHECKING:
    from djinn_core.interception.recording.op_observer import OpObserver
    from djinn_core.interception.tensors.lazy_tensor import LazyTensor
    from djinn_core.wire.cache_messages import CacheAction

T = TypeVar("T")


class SyncRequest(msgspec.Struct, frozen=True):
    """Requests of a cut beside running the program."""

    fetch: tuple[int, ...] = ()
    describe: tuple[int, ...] = ()
    synchronize: bool = False


class Recorder:
    """Records one thread's program.

    Entries are appended without a lock, while other threads may cut the program or use its storages. So the appending thread
    reads `epoch` and `overtaken` before and after an append. If one has changed, `settle` makes the new entries known to other
    threads, or sends them. At most one recorder has unsent writes to a storage, or unsent views of it: using the storage from
    another thread sends that program first (`order_after`).

    Attributes:
        entries: unsent entries. epoch: number of cuts so far. overtaken: number of times that another thread used or wrote a storage
            of which this recorder was the user or the writer. limit: number of entries at which `cut_at_limit` must be called.
        captures: what captures under way get of programs that are sent. fixed: the last entry from before the innermost capture.
        constants: uploaded values (handle, elements, logical device) while a capture tracks them. dead: handles that no tensor refers to or ever referred to.
        module: the call of a module that the thread is inside. forward_calls: those that it was inside before.
        module_moments: while a timeline is recorded, when the thread entered what, one after the other in one list: a weak reference to
            a module, `BACKWARD`, the number of an autograd node, or None where it left the former two.
        call_sites: of the module calls, and of the backward pass, that the thread is inside.
        differentiating: whether the thread is in a backward pass. watcher: observer that is called for every op.
    """

    __slots__ = (
        "__weakref__",
        "_predictor",
        "_shared",
        "_thread",
        "_usual",
        "call_sites",
        "captures",
        "constants",
        "dead",
        "differentiating",
        "entries",
        "epoch",
        "fetches",
        "fixed",
        "forward_calls",
        "limit",
        "module",
        "module_moments",
        "overtaken",
        "uploaded",
        "uploads",
        "watcher",
    )

    def __init__(self, shared: Recorders) -> None:
        """`shared`: what it has in common with the recorders of other threads."""
        self._shared = shared
        self.entries: list[Entry] = []
        self.epoch = 0
        self.overtaken = 0
        self.captures: list[SentEntries] = []
        self.fetches = FetchPredictor()
        self.constants: list[tuple[int, torch.Tensor, int]] | None = None
        self.dead: list[int] = []
        self.fixed: Entry | None = None
        self.module: ModuleCall | None = None
        self.module_moments: list[Any] | None = None
        self.forward_calls = ForwardCalls()
        self.call_sites = CallSites()
        self.differentiating = False
        self.watcher: OpObserver | None = None
        self.uploaded = 0
        self.uploads = 0
        self.limit = OPENING
        self._usual = OPENING, 0  # the limit as it was set last, and the largest length of a program then
        self._predictor = ProgramPredictor(shared.predictable_programs)
        self._thread = weakref.ref(threading.current_thread())

    @classmethod
    def of_thread(cls, shared: Recorders) -> Recorder:
        """The recorder of the present thread."""
        return cls(shared)

    @staticmethod
    def end_session() -> None:
        """Forget what was freed: a session has ended, and the next one has no use for it."""
        device_state.freed.clear()

    @staticmethod
    def begin_in_child() -> None:
        """Forget everything in a forked child, before it records."""
        device_state.freed.clear()

    @staticmethod
    def any_unsent(recorders: Iterable[Recorder]) -> bool:
        """True if an unsent program has values."""
        return any(entry.handles for recorder in recorders for entry in recorder.entries)

    @property
    def thread(self) -> str:
        """Name of the thread; empty where it has ended."""
        thread = self._thread()
        return thread.name if thread is not None else ""

    @property
    def done(self) -> bool:
        """True if nothing is unsent and the thread will record nothing more."""
        return not self.entries and self.ended

    @property
    def ended(self) -> bool:
        """True if the thread will record nothing more."""
        thread = self._thread()
        return thread is None or not thread.is_alive()

    def drop(self) -> None:
        """Forget what was recorded. Nothing records on this recorder any more."""
        self.entries = []

    def begin_on_thread(self) -> None:
        """The present thread records on this recorder from now on."""

    def order_after(self, storage: Storage) -> None:
        """Order the unsent work of other threads on `storage` before the entries that this thread records next."""
        if (writer := self._other_writer(storage)) is not None:
            writer.cut()
        with self._shared.tracking:
            last = storage.user
            if last is not None and last is not self:
                # It may be about to append a read, so it counts even where it has nothing unsent.
                storage.readers = {r for r in storage.readers or () if not r.done} | {last}
                last.overtaken += 1
            storage.user = self
        if (writer := self._other_writer(storage)) is not None:  # it appended before it could see the new user
            writer.cut()

    def begin_writes(self, targets: Iterable[LazyTensor]) -> None:
        """Send unsent reads of `targets` by other threads, then note the writes."""
        for target in targets:
            storage = target.remote.storage
            if storage.readers:
                self._cut_readers(storage)
            if storage.written is self:
                storage.written_at = self.epoch
            else:
                self.claim(storage, self.epoch)
            storage.elements = storage.host = None

    def claim(self, storage: Storage, epoch: int) -> None:
        """Make this recorder the one with unsent writes or views of `storage`, in its `epoch`; other such programs are sent."""
        while (writer := self._other_writer(storage)) is not None and writer.entries:
            writer.cut()
        storage.written, storage.written_at = self, epoch  # no other thread runs between the check and this
        if writer is not None:  # in the middle of an append: it sees one of these two
            with self._shared.tracking:
                writer.overtaken += 1
            writer.cut()

    def _other_writer(self, storage: Storage) -> Recorder | None:
        """The other recorder that may have unsent writes or views of `storage`."""
        writer = storage.written
        return writer if writer is not None and writer is not self and storage.written_at == writer.epoch else None

    def _cut_readers(self, storage: Storage) -> None:
        """Send the programs of other threads that read `storage`.

        They count as its readers until they are sent: a freed value waits for the unsent programs of all readers.
        """
        for reader in set(storage.readers or ()) - {self}:
            reader.cut()
        with self._shared.tracking:
            storage.readers = {r for r in storage.readers or () if r.entries and r is not self} or None

    def take_back(self, value: Value, ops: Container[str]) -> bool:
        """Take back the last instruction where it is one of `ops` and made `value`; whether it was."""
        with collect_later, self._shared.sending:
            last = self.entries[-1] if self.entries else None
            if last is None or last is self.fixed or last.call.op not in ops or last.handles != (value.handle,):
                return False
            self.entries.pop()
        value.storage.written = None
        return True

    def settle(self, used: Iterable[Storage], written: Collection[Storage]) -> None:
        """Make an appended op known to the other threads that cut this program, or used its storages, during the append.

        Another thread that took over a storage may not have seen the op. Then the op is sent now.

        Args:
            used: storages of the operands.
            written: storages that the op wrote, made or made views of.
        """
        for storage in written:
            if storage.written is self:
                storage.written_at = self.epoch
        if any(storage.user is not self for storage in used) or any(one.written is not self for one in written):
            self.cut()

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
            if device_state.freed and not self.captures:
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

    def take(self, ask: SyncRequest, cut: Callable[[list[Entry]], int] = len) -> Submission:
        """Take what was recorded so far, as far as `cut` says, to be submitted before `sending` is released."""
        meta_only = self._shared.meta_only
        if meta_only.storages:
            meta_only.sift(self.entries)
            meta_only.refuse((*ask.fetch, *ask.describe))
        # Values freed by now were used by entries recorded by now. A thread that appends after `epoch` has changed will see
        # that; where only a part is taken, by this recorder's own thread, the remaining entries are as unsent as before.
        dead = take_freed() if self._shared.made == 1 else self._collect_freed()
        entries = self.entries
        if cut is len:
            self.epoch += 1
            count = len(entries)
        else:
            count = cut(entries)
        taken = entries[:count]  # another thread may append meanwhile
        del entries[:count]
        if (timeline := port.timeline) is not None:
            timeline.taken(self, count)
        if taken:
            if not self._predictor.taken(taken) or (self.limit, port.checkpoint_instructions) != self._usual:
                self._set_limit()
            if not ask.fetch:
                self.fetches.sent(taken)
        if cut is not len:
            dead = _put_back(dead, self.entries)
        self.uploaded = self.uploads = 0
        for captured in self.captures:
            captured.entries.extend(taken)
            captured.fetched.update(ask.fetch)
        known, at = self._predictor.place if taken else (None, WHOLE)
        if meta_only.storages:
            taken, dead = meta_only.sift(taken), meta_only.forget(dead)
            known = None  # it may have fewer instructions
        handles = [*map(_handle_of, dead)]
        if self.dead:
            handles += self._take_dead()
        program = freeze(taken, handles)
        inside = program.dead
        free = tuple(filterfalse(inside.__contains__, handles)) if handles and inside != set(handles) else ()
        return Submission(program, free, ask.fetch, ask.describe, ask.synchronize, known, at)

    def _take_dead(self) -> list[int]:
        """Take the handles in `dead` that no remaining entry refers to."""
        if not self.entries:
            taken, self.dead = self.dead, []
            return taken
        used = {handle for entry in self.entries for handle in entry.handles} if self.dead else set()
        taken = [handle for handle in self.dead if handle not in used]
        self.dead = [handle for handle in self.dead if handle in used]
        return taken

    def _collect_freed(self) -> list[Value]:
        """Freed values that no other thread's unsent program uses; the others wait."""
        gone = take_freed()
        shared = self._shared
        # As mostly, and a weak set takes long to walk through.
        alone = not gone or shared.has_only(self)
        busy = set() if alone else {other for other in shared.all() if other.entries and other is not self}
        if not busy:
            shared.waiting = 0
            return gone
        mine: list[Value] = []
        waiting: list[Value] = []
        for value in gone:
            users = {value.storage.user, *(value.storage.readers or ())}
            (mine if busy.isdisjoint(users) else waiting).append(value)
        device_state.freed.extend(waiting)
        shared.waiting = len(waiting)
        return mine


def _put_back(dead: list[Value], entries: list[Entry]) -> list[Value]:
    """Let those of the freed values wait that `entries` mention; the others."""
    used = {handle for entry in entries for handle in entry.handles}
    device_state.freed.extend(value for value in dead if value.handle in used)
    return [value for value in dead if value.handle not in used]


def _runtime() -> Runtime:
    try:
        start = port.start
        return start() if start is not None else port.runtime()
    except DjinnError as error:
        suppress_at_shutdown.at(error)
        raise


def freeze(entries: list[Entry], dead: list[int]) -> Program:
    """The entries as a frozen program; handles in `dead` that it mentions die with it."""
    if not entries:
        return NOTHING
    calls, handles, slots, sites, modules = zip(*map(msgspec.structs.astuple, entries), strict=True)
    operands = tuple(chain.from_iterable(handles))
    inside = frozenset(dead).intersection(operands) if dead else frozenset()
    return Program(calls, operands, tuple(chain.from_iterable(slots)), inside, sites, modules)


_handle_of: Final = attrgetter("handle")


class Recorders:
    """The recorders of all threads, and what they share: how programs follow one another, and what waits to be sent.

    Attributes:
        thread: the present thread's recorder, which its first use makes.
        sending: serialises cutting and sending, so that programs arrive in the order in which they were cut. Reentrant, because
            cutting one thread's program may demand that another's goes first. A forked child has a new one. No thread that holds
            it begins a session: `locked_session` begins the session first.
        tracking: held while it changes which recorders use a storage.
        held_back: uploads that a capture holds back, so that it starts no server: handles and copies of what they will be.
        unsent: submissions that were taken and not sent, because an interrupt came before: they go first.
        waiting: number of freed handles that wait for the unsent programs of other threads.
        made: number of recorders that there have been. meta_only: storages without data. predictable_programs: programs as they were recorded last time.
    """

    def __init__(self) -> None:
        self.held_back: deque[tuple[int, torch.Tensor, int]] = deque()
        self.unsent: deque[Submission] = deque()
        self.waiting = 0
        self.meta_only = MetaOnlyStorages()
        self.predictable_programs = PredictablePrograms()
        # Weak: a recorder whose thread has ended lives as long as a storage that its program touches.
        self._all: weakref.WeakSet[Recorder] = weakref.WeakSet()
        self.made = 0
        self.kind: type[Recorder] = Recorder
        self._make_locks()
        self.thread: _ThreadRecorder | _ForkedChild = _ThreadRecorder(self)

    def _make_locks(self) -> None:
        self.sending = InterruptibleLock()
        self.tracking = threading.RLock()
        self._all_lock = threading.RLock()

    def begin_thread(self) -> None:
        """Give the present thread a recorder of another kind."""
        self._all.clear()
        self.made = 0
        self.thread = _ThreadRecorder(self)

    def new(self) -> Recorder:
        """A recorder for a thread."""
        made = self.kind.of_thread(self)
        with self._all_lock:
            self._all.add(made)
            self.made += 1
        if (timeline := port.timeline) is not None:
            timeline.follow(made)
        return made

    def all(self) -> list[Recorder]:
        """The recorders of all threads."""
        with self._all_lock:
            return list(self._all)

    def has_only(self, recorder: Recorder) -> bool:
        """True if no thread has another recorder than this one."""
        return self.made == 1 or (len(self._all) == 1 and recorder in self._all)

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
            self.kind.end_session()
            self.held_back.clear()
            self.unsent.clear()
            self.meta_only.clear()
            port.sessions_ended += 1
            port.memory_changes += 1

    def have_unsent_values(self) -> bool:
        """Return True if an unsent program has values. A program that only seeds the random state has no values."""
        return bool(self.held_back) or self.kind.any_unsent(self._all)

    def forget_everything(self) -> None:
        """In a forked child: the programs belong to the parent, and locks may be held by threads that stayed there."""
        self._make_locks()
        collect_later.restart()
        self._all.clear()
        self.made = self.waiting = 0
        self.kind.begin_in_child()
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
