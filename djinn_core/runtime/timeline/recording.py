"""Recording of a timeline: what is called while `djinn.profile()` is in force, and nothing of it otherwise.

It stands in the place of `port.dispatch`, so that an op costs two looks at the clock more; everything else is told of programs,
submissions and waits. Limits bound what a long run keeps: what is beyond them is counted.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

import attrs
import torch
from torch.autograd.profiler import record_function

from djinn_core.errors import DjinnError
from djinn_core.hookspecs.observers import Event
from djinn_core.interception.recording.module_calls import module_now
from djinn_core.interception.recording.recorder import Recorder, current
from djinn_core.interception.runtime_interface import Dispatch, port
from djinn_core.ir.module_path import ModuleCall, module_chain, outermost_call
from djinn_core.ir.program import Site, line_of_site
from djinn_core.runtime.sending.pending import PendingSubmission
from djinn_core.runtime.timeline.clocks import ClientClock
from djinn_core.runtime.timeline.events import BACKWARD
from djinn_core.runtime.timeline.recorded import Range, Span, SubmissionRecord, ThreadRecord, UserLine
from djinn_core.runtime.waits import user_line
from djinn_core.wire.messages import Completed

OPS_LIMIT: Final = 1_000_000  # calls on the device that are kept, of all threads together; 72 bytes each
SUBMISSIONS_LIMIT: Final = 200_000
SPANS_LIMIT: Final = 500_000  # of each thread


class _PerThread(threading.local):
    record: ThreadRecord | None = None
    hot: tuple[Callable[[Any], None], Recorder, ThreadRecord] | None = None


class Recording:
    """The raw records, and the hooks that make them. Implements `Observer`, `SubmissionRecorder` and `CaptureRecorder`.

    Attributes:
        begun, ended: the block's moments. thread: the one that it is of. ops: whether each instruction is timed by executors.
        threads: records of threads. submissions: records in the order in which they were sent. clocks: by executor and process.
        connected: called when a session has begun in the block.
        ops_end: from when on calls on the device were not recorded, because there were too many; 0: all were.
        lost: how many submissions and spans were not kept.
    """

    name = "djinn.profile"

    def __init__(self, *, ops: bool) -> None:
        self.ops = ops
        self.connected: Callable[[], None] = _nothing
        self.begun = self.ended = 0.0
        self.threads: list[ThreadRecord] = []
        self.submissions: list[SubmissionRecord] = []
        self.clocks: dict[tuple[int, str], ClientClock] = {}
        self.names: dict[int, tuple[str, ...]] = {}
        self.lost = 0
        self.ops_end = 0.0
        self._lock = threading.Lock()
        self._local = _PerThread()
        self._of: dict[int, ThreadRecord] = {}  # by identity of the recorder, which its record holds
        self._taken: deque[tuple[ThreadRecord, int, int]] = deque()  # instructions that are being submitted
        self._now: tuple[ThreadRecord, int] | None = None  # whose are submitted now, and which is the first
        self._earlier = 0  # submissions of former sessions in the block: numbers go on
        self._last = 0
        self._asking = False
        self._pending: dict[tuple[int, int], SubmissionRecord] = {}
        self._stop_ops: Callable[[], None] = _nothing
        self._paths = _ModulePaths()
        self._lines: dict[
            int, tuple[Site, UserLine]
        ] = {}  # by identity of a site, which is kept so that it stays its own
        self.thread = self._mine()

    # --- hooks ---------------------------------------------------------------------------------------------------

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Record what happens inside the block."""
        plain = port.dispatch
        timed = self._timed(plain)

        def stop() -> None:
            if port.dispatch is timed:  # as the interpreter's shutdown has not wrapped it
                port.dispatch = plain

        port.dispatch, port.timeline, self._stop_ops = timed, self, stop
        enter, leave = record_function.__enter__, record_function.__exit__
        record_function.__enter__ = self._range_begins(enter)  # type: ignore[method-assign]
        record_function.__exit__ = self._range_ends(leave)  # type: ignore[method-assign]
        try:
            yield
        finally:
            record_function.__enter__, record_function.__exit__ = enter, leave  # type: ignore[method-assign]
            port.timeline = None
            stop()
            for record in list(self.threads):
                self._name_modules(record)
                self._end_ranges(record)
                record.ranges.sort(key=lambda one: one.first)

    def _mine(self) -> ThreadRecord:
        """This thread's record."""
        record = self._local.record
        if record is None or record.recorder is not current():
            record = self._local.record = self._record_of(current())
            record.name = threading.current_thread().name  # another thread may have sent its program first
        return record

    def _record_of(self, recorder: Recorder) -> ThreadRecord:
        with self._lock:
            record = self._of.get(id(recorder))
            if record is None:
                name = threading.current_thread().name
                record = self._of[id(recorder)] = ThreadRecord(name, recorder, len(self.threads) + 1)
                self.threads.append(record)
        return record

    def _hot(self) -> tuple[Callable[[Any], None], Recorder, ThreadRecord]:
        """Objects that each call on the device needs, together."""
        record = self._mine()
        hot = self._local.hot = record.calls.append, record.recorder, record
        return hot

    def _timed(self, dispatch: Dispatch) -> Dispatch:
        """`dispatch`, with the moments of each call."""
        clock, local = time.perf_counter, self._local

        def timed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hot = local.hot or self._hot()
            begun = clock()
            try:
                return dispatch(func, args, kwargs)
            finally:
                note, recorder, record = hot
                note(begun)  # three short calls are quicker than one with a tuple
                note(clock())
                note(func)
                if recorder.module is not record.module or recorder.differentiating:
                    _note_module(record, recorder)

        return timed

    def _range_begins(self, enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def begins(entered: Any) -> Any:
            record = self._mine()
            record.open.append((entered.name, time.perf_counter(), record.recorded))
            return enter(entered)

        return begins

    def _range_ends(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        def ends(entered: Any, *error: Any) -> Any:
            record = self._mine()
            while record.open:
                name, begun, first = record.open.pop()
                if len(record.ranges) < SPANS_LIMIT:
                    record.ranges.append(Range(name, begun, time.perf_counter(), first, record.recorded))
                if name == entered.name:
                    break
            return leave(entered, *error)

        return ends

    def _end_ranges(self, record: ThreadRecord) -> None:
        """Ranges that go on are shown until the end of the block."""
        for name, begun, first in record.open:
            record.ranges.append(Range(name, begun, time.perf_counter(), first, record.recorded))
        record.open.clear()

    # --- `CaptureRecorder` -----------------------------------------------------------------------------------------

    def taken(self, recorder: object, instructions: int) -> None:
        """As `CaptureRecorder.taken`."""
        assert isinstance(recorder, Recorder)
        record = self._record_of(recorder)
        if instructions:
            self._taken.append((record, record.sent, instructions))
            record.sent += instructions
        if record is self._local.record:
            self._name_modules(record)
        if sum([one.count for one in self.threads]) > OPS_LIMIT and not self.ops_end:
            self.ops_end = time.perf_counter()
            self._stop_ops()

    def enter(self, what: str, instructions: int = 0) -> None:
        """As `CaptureRecorder.enter`."""
        self._mine().entered.append((what, time.perf_counter(), instructions))
        if what == "submit":
            self._now = self._take(instructions)

    def leave(self) -> None:
        """As `CaptureRecorder.leave`."""
        record = self._mine()
        if record.entered:
            what, begun, _ = record.entered.pop()
            self._add(record, Span("plan" if what == "submit" else "upload", what, begun, time.perf_counter()))

    def _take(self, instructions: int) -> tuple[ThreadRecord, int] | None:
        """The thread that has recorded the next `instructions`, and the number of the first."""
        if not instructions or not self._taken:
            return None
        record, first, left = self._taken.popleft()
        if left > instructions:
            self._taken.appendleft((record, first + instructions, left - instructions))
        return record, first

    def _name_modules(self, record: ThreadRecord) -> None:
        """Name the modules that were met since the last time, while they are there."""
        for _, call in record.modules[len(record.paths) :]:
            record.paths.append(self._paths.names(call))

    def _add(self, record: ThreadRecord, span: Span) -> None:
        if len(record.spans) < SPANS_LIMIT:
            record.spans.append(span)
        else:
            self.lost += 1

    # --- `SubmissionRecorder` --------------------------------------------------------------------------------------

    def sent(
        self, executor: int, number: int, pending: PendingSubmission, begun: float, sending: float, nbytes: int
    ) -> None:
        """As `SubmissionRecorder.sent`."""
        now, mine = time.perf_counter(), self._mine()
        number += self._earlier
        self._last = max(self._last, number)
        if pending.answered or not pending.program.sites:
            line = UserLine(*user_line(sys._getframe(1))[:3])  # noqa: SLF001 - the public ways build a list of all frames
        else:  # pieces that nothing waits for are many, and the walk up the stack is most of what their record costs
            line = self._line_of(pending.program.sites[-1])
        self._add(mine, Span("send", "send", begun, now, line, executor=executor, number=number))
        if len(self.submissions) >= SUBMISSIONS_LIMIT:
            self.lost += 1
            return
        thread, first = self._now or (mine, -1)
        prepared = pending.prepared
        count = len(prepared.nodes) if prepared is not None else 0
        program = pending.program if self.ops and count else None
        for call in program.modules if program is not None else ():
            if id(call) not in self.names:  # the program holds it
                self.names[id(call)] = self._paths.names(call)
        where = executor, number, thread, first, begun, sending, now, nbytes, line, count
        record = SubmissionRecord(*where, prepared, program)
        self.submissions.append(record)
        self._pending[executor, number] = record

    def _line_of(self, site: Site) -> UserLine:
        known = self._lines.get(id(site))
        if known is None:
            code, _ = site
            known = self._lines[id(site)] = site, UserLine(code.co_filename, line_of_site(site), code.co_name)
        return known[1]

    def completed(
        self, executor: int, number: int, pending: PendingSubmission, completed: Completed, nbytes: int
    ) -> None:
        """As `SubmissionRecorder.completed`."""
        del pending
        record = self._pending.pop((executor, number + self._earlier), None)
        if record is None:  # it was sent before the block
            return
        record.received, record.fetched = time.perf_counter(), nbytes
        record.timing, record.times, record.failures = completed.timing, completed.times, len(completed.failures)
        if completed.times is not None:
            clock = self.clocks.setdefault((executor, completed.times.instance), ClientClock())
            clock.sample(record.sending, completed.times.taken, completed.times.done, record.received)

    # --- `Observer` ------------------------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """As `Observer.observe`: waits and connections, on the thread that had them."""
        if event.name not in {"waited", "connected"} or self._asking:
            return
        now, record, fields = time.perf_counter(), self._mine(), event.fields
        begun = now - fields["seconds"]
        if event.name == "connected":
            self._earlier = self._last
            self._pending.clear()
            self._asking = True  # what is asked now is no round trip of the program's
            try:
                self.connected()
            finally:
                self._asking = False
            self._add(record, Span("connect", f"connect to {fields['server']}", begun, time.perf_counter()))
            return
        file, at, function, cause = user_line(sys._getframe(1))  # noqa: SLF001 - the public ways build a list of all frames
        line = UserLine(file, at, function)
        number = fields["submission"] and fields["submission"] + self._earlier
        self._add(record, Span("wait", cause, begun, now, line, cause, fields["executor"], number))


def _nothing() -> None:
    pass


def _note_module(record: ThreadRecord, recorder: Recorder) -> None:
    """The thread is in another module than at the op before."""
    call, last = module_now(recorder), record.module
    record.module = call
    # In a backward pass each op makes a link of its own, with the number of its autograd node.
    same_node = call is not None and last is not None and isinstance(call[0], int) and call[0] == last[0]
    if not same_node and (call is not last or not record.modules):
        record.modules.append((record.count - 1, call))


@attrs.define
class _ModulePaths:
    """Names of modules, from the outermost to the innermost that a call is in; each of them looked up once."""

    _tables: WeakKeyDictionary[torch.nn.Module, dict[int, str]] = attrs.field(factory=WeakKeyDictionary)
    _last: tuple[ModuleCall | None, tuple[str, ...], dict[int, str]] = (
        None,
        (),
        {},
    )  # an outer call, its names, names in its root

    def names(self, call: ModuleCall | None) -> tuple[str, ...]:
        """Paths such as `("GPT2", "transformer.h.3", "transformer.h.3.attn")`; the outermost has the name of its class."""
        if call is None:
            return ()
        if isinstance(call[0], int):
            modules = module_chain(call)
            table = self._table(modules[0]) if modules else {}
            return (BACKWARD, *[_name(module, modules[0], table) for module in modules])
        outer, around, table = self._last
        if call[1] is not outer or outer is None:  # mostly the next one is called in the same module
            root = outermost_call(call)
            module = root[0]() if root is not None and not isinstance(root[0], int) else None
            table = self._table(module) if module is not None else {}
            around = self.names(call[1])
            self._last = call[1], around, table
        inner = call[0]()
        return around if inner is None else (*around, table.get(id(inner)) or type(inner).__name__)

    def _table(self, root: torch.nn.Module) -> dict[int, str]:
        table = self._tables.get(root)
        if table is None:
            table = self._tables[root] = {id(one): name for name, one in root.named_modules()}
        return table


def _name(module: torch.nn.Module, root: torch.nn.Module, table: Mapping[int, str]) -> str:
    return type(module).__name__ if module is root else table.get(id(module)) or type(module).__name__


def check_alone() -> None:
    """Raise where a timeline is being recorded.

    Raises:
        DjinnError: one is.
    """
    if port.timeline is not None:
        raise DjinnError(
            "djinn.profile() is in force already: blocks of it cannot be inside of each other, nor in two threads at a time"
        )
