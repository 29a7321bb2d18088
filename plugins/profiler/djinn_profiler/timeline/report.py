"""The table of a timeline: time by cause, module and line, with advice."""

from __future__ import annotations

import linecache
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from djinn_core.ir.module_path import BACKWARD
from djinn_profiler.timeline.assembling import AssembledTimeline, ThreadTime, executor_name
from djinn_profiler.timeline.durations import duration, unit_of
from djinn_profiler.timeline.events import (
    ANSWER,
    CAPTURE,
    CAUSES,
    CLIENT_BOUND,
    CONNECT,
    DECODE,
    DEVICE_BOUND,
    EARLIER,
    ENCODE,
    EXECUTE,
    NETWORK_BOUND,
    PLAN,
    PYTHON,
    QUEUE,
    READ,
    RECOVERY,
    REQUEST,
    SEND,
    SHARED,
    TRANSFER,
    UPLOAD,
    WAIT,
)
from djinn_profiler.timeline.user_places import ADVICE

ROWS: Final = 16  # maximum rows of modules and lines in a table
SURPRISING: Final = (
    3.0  # factor between measured and predicted times above which the model's error is not the only reason
)
_MIN_SECONDS: Final = 0.05  # minimum measured seconds for this remark
OUTSIDE: Final = "(outside of modules)"
_WORDS: Final = {
    PYTHON: "your code, libraries, PyTorch",
    CAPTURE: "capture: recording ops",
    PLAN: "plan: analysing and finding plans",
    SEND: "send: encoding, and writing to the connection",
    READ: "reading replies",
    UPLOAD: "uploads",
    CONNECT: "connecting",
    REQUEST: "requests on their way",
    RECOVERY: "finding an executor that resumes the session",
    ANSWER: "replies on their way",
    TRANSFER: "waiting for transfers between executors",
    EARLIER: "the executor runs earlier submissions",
    DECODE: "the executor reads the submission",
    EXECUTE: "the executor runs ops",
    ENCODE: "the executor prepares results",
    QUEUE: "waiting for a turn on the device",
}
_CAUSES: Final = (CLIENT_BOUND, NETWORK_BOUND, DEVICE_BOUND, SHARED)


@attrs.frozen
class ModuleTime:
    """A module's own time, without submodules, in seconds.

    Attributes:
        causes: the client's time by cause.
        device: time of the module's ops on executors.
    """

    path: str
    causes: Mapping[str, float]
    device: float

    @property
    def seconds(self) -> float:
        """Return the client's time."""
        return sum(self.causes.values())


@attrs.frozen
class LineTime:
    """Waits of one line: its position, their reason and number, total seconds, and seconds by cause."""

    line: str
    text: str
    cause: str
    times: int
    seconds: float
    causes: Mapping[str, float]


@attrs.frozen
class ExecutorTime:
    """Work of an executor in a timeline.

    Attributes:
        submissions: number of submissions that it ran.
        seconds: time of their ops.
        planned: number of submissions with a prediction.
        predicted: sum of these predictions in seconds.
        measured: measured seconds of the same submissions.
        calibrated: True if the predictions use measured speeds.
    """

    name: str
    submissions: int
    seconds: float
    planned: int
    predicted: float
    measured: float
    calibrated: bool = False

    @property
    def surprise(self) -> str:
        """Return why measured and predicted times differ by a factor above `SURPRISING`, or an empty text."""
        if not self.planned or self.predicted <= 0.0 or self.measured < _MIN_SECONDS:
            return ""
        times = self.measured / self.predicted
        if 1 / SURPRISING <= times <= SURPRISING:
            return ""
        if not self.calibrated:
            return f"{self.name} is not calibrated, so its speeds are assumed: `djinn calibrate` measures them"
        if times > 1:
            return f"the machine of {self.name} is busy with other work, or its calibration is old (`djinn calibrate`)"
        return f"the calibration of {self.name} is old: `djinn calibrate` measures its speeds again"


@attrs.frozen
class TimeTotals:
    """Time of a block by category.

    Attributes:
        seconds: length of the block.
        kinds: all seconds of the block's thread, by kind of event. Waits are counted by their parts.
        causes: all seconds of the block's thread, by cause: `client`, `network`, `device`, `other sessions`.
        round_trips: number of round trips that threads waited for.
        instructions: number of sent instructions.
        submissions: number of sent submissions.
        other_threads: seconds of each other thread, by name.
        calls: number of calls of the block's thread on the device.
    """

    seconds: float
    kinds: Mapping[str, float]
    causes: Mapping[str, float]
    modules: tuple[ModuleTime, ...]
    lines: tuple[LineTime, ...]
    executors: tuple[ExecutorTime, ...]
    round_trips: int
    instructions: int
    submissions: int
    other_threads: Mapping[str, float]
    calls: int


def totals(assembled: AssembledTimeline, seconds: float) -> TimeTotals:
    """Sum the times of a profiled block, which ran in the first thread. `seconds`: duration of the block."""
    first, *others = assembled.threads
    kinds = _kinds(first)
    causes: dict[str, float] = defaultdict(float)
    for kind, cause_seconds in kinds.items():
        causes[CAUSES[kind]] += cause_seconds
    other_threads = {item.record.name: sum(part.seconds for part in item.parts) for item in others}
    records = [item.record for item in assembled.phases]
    return TimeTotals(
        seconds,
        kinds,
        causes,
        tuple(_modules(assembled)),
        tuple(_lines(assembled)),
        tuple(_executors(assembled)),
        sum(len(item.waits) for item in assembled.threads),
        sum(record.instructions for record in records),
        len(records),
        other_threads,
        sum(part.kind == CAPTURE for part in first.parts),
    )


def label(modules: Sequence[str]) -> str:
    """Return a label of nested modules: the outermost and the innermost, as in `GPT2.transformer.h.3`."""
    if not modules:
        return OUTSIDE
    backward = BACKWARD in modules
    names = modules[modules.index(BACKWARD) + 1 :] if backward else modules
    name = ".".join(dict.fromkeys((names[0], names[-1]))) if names else ""
    return f"{BACKWARD} of {name}" if backward and name else name or BACKWARD


def _kinds(thread: ThreadTime) -> dict[str, float]:
    seconds_by_kind: dict[str, float] = defaultdict(float)
    for part in thread.parts:
        if part.kind != WAIT:
            seconds_by_kind[part.kind] += part.seconds
    for wait in thread.waits:
        for kind, begun, ended in wait.parts:
            seconds_by_kind[kind] += ended - begun
    return seconds_by_kind


def _modules(assembled: AssembledTimeline) -> list[ModuleTime]:
    seconds_by_module: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    device: dict[str, float] = defaultdict(float)
    for thread in assembled.threads:
        for part in thread.parts:
            if part.kind != WAIT:
                seconds_by_module[label(part.modules)][CAUSES[part.kind]] += part.seconds
        for wait in thread.waits:
            for kind, begun, ended in wait.parts:
                seconds_by_module[label(wait.modules)][CAUSES[kind]] += ended - begun
    for run in assembled.runs:
        device[label(run.modules)] += run.seconds
    rows = [
        ModuleTime(path, seconds_by_module.get(path, {}), device.get(path, 0.0))
        for path in {**seconds_by_module, **device}
    ]
    return sorted(rows, key=lambda item: -max(item.seconds, item.device))


def _lines(assembled: AssembledTimeline) -> list[LineTime]:
    times: Counter[tuple[str, str, str]] = Counter()
    seconds_by_line: dict[tuple[str, str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for wait in (wait for thread in assembled.threads for wait in thread.waits):
        line = wait.span.line
        key = str(line), linecache.getline(line.file, line.line).strip() if line.file else "", wait.span.cause
        times[key] += 1
        for kind, begun, ended in wait.parts:
            seconds_by_line[key][CAUSES[kind]] += ended - begun
    rows = [LineTime(*key, times[key], sum(causes.values()), causes) for key, causes in seconds_by_line.items()]
    return sorted(rows, key=lambda item: -item.seconds)


def _executors(assembled: AssembledTimeline) -> Iterator[ExecutorTime]:
    numbers = dict.fromkeys(item.record.executor for item in assembled.phases)
    for number in numbers:
        submissions = [item for item in assembled.phases if item.record.executor == number]
        with_prediction = [
            item
            for item in submissions
            if item.record.prepared is not None and item.record.prepared.predicted_seconds is not None
        ]
        predicted = sum(
            item.record.prepared.predicted_seconds or 0.0
            for item in with_prediction
            if item.record.prepared is not None
        )
        seconds, measured = (
            sum(item.executed - item.begun for item in group) for group in (submissions, with_prediction)
        )
        is_calibrated = bool(with_prediction) and all(
            item.record.prepared is not None and item.record.prepared.calibrated for item in with_prediction
        )
        yield ExecutorTime(
            executor_name(number), len(submissions), seconds, len(with_prediction), predicted, measured, is_calibrated
        )


def advice(block: TimeTotals) -> list[str]:
    """Return advice on how to shorten the block, the most promising first, or an empty list if no cause dominates."""
    total = block.seconds or 1.0
    share = {cause: block.causes.get(cause, 0.0) / total for cause in _CAUSES}
    kinds = {kind: cause_seconds / total for kind, cause_seconds in block.kinds.items()}
    advice_rows: list[tuple[float, str]] = []
    if share[NETWORK_BOUND] > 0.25 and block.lines and kinds.get(REQUEST, 0.0) + kinds.get(ANSWER, 0.0) > 0.2:
        line = block.lines[0]
        wait_advice = f"wait less often: the program waited for {block.round_trips} round trips, {line.times} of them at {line.line or 'one line'} ({line.cause})"
        advice_rows.append((share[NETWORK_BOUND], f"{wait_advice}; {ADVICE[line.cause]}"))
    if kinds.get(UPLOAD, 0.0) > 0.15:
        advice_rows.append(
            (
                kinds[UPLOAD],
                "upload less: keep reused tensors on the device, create tensors there, or have the server read weights itself (djinn.open_weights)",
            )
        )
    if kinds.get(CONNECT, 0.0) > 0.15:
        advice_rows.append(
            (
                kinds[CONNECT],
                "the block includes connecting: call djinn.init() before the block to measure the program alone",
            )
        )
    slow = [item.surprise for item in block.executors if item.surprise and item.measured > item.predicted]
    if share[DEVICE_BOUND] > 0.4 and slow:
        advice_rows.append(
            (share[DEVICE_BOUND], f"the device takes more than {SURPRISING:g} times as long as predicted: {slow[0]}")
        )
    elif share[DEVICE_BOUND] > 0.4:
        advice_text = "a smaller dtype, larger batches, compiled programs or a second executor help; djinn.profile(ops=True) shows which ops"
        if not any(item.planned for item in block.executors):
            advice_text += ". No time was predicted, so first check that its machine does no other work"
        advice_rows.append((share[DEVICE_BOUND], f"most time is spent on the device: {advice_text}"))
    if share[SHARED] > 0.1:
        advice_rows.append(
            (share[SHARED], "other sessions use the device: another server, or a larger share, helps (djinn status)")
        )
    if kinds.get(PLAN, 0.0) > 0.2:
        advice_rows.append(
            (
                kinds[PLAN],
                "the block includes planning: run a few steps before the block, or keep sizes constant from step to step",
            )
        )
    if not block.calls and not block.instructions and not block.lines:
        return ["nothing was done on the device in this block: are the model and its inputs on `remote_accelerator`?"]
    if block.calls and kinds.get(PYTHON, 0.0) + kinds.get(CAPTURE, 0.0) > 0.4:
        calls = f"{block.calls:,} calls on the device were made"
        advice_rows.append(
            (
                kinds.get(PYTHON, 0.0) + kinds.get(CAPTURE, 0.0),
                f"most time is spent in the client ({calls}): use fewer and larger ops, fused ops, or torch.compile",
            )
        )
    return [text for _, text in sorted(advice_rows, key=lambda item: -item[0])]


def table(block: TimeTotals, *, complete: bool) -> str:
    """Return the totals of a block as text. `complete`: True if no record was dropped."""
    total, (scale, unit) = block.seconds or 1.0, unit_of(block.seconds)
    lines = [
        f"{duration(block.seconds)}, {block.round_trips} round trips, {block.submissions} submissions of {block.instructions:,} instructions"
    ]
    if not complete:
        lines.append("the timeline is incomplete: the block did more than a timeline can hold")
    lines += ["", "where the time went, by cause"]
    for cause in _CAUSES:
        if (cause_seconds := block.causes.get(cause, 0.0)) > 0:
            lines.append(
                f"{cause_seconds * scale:10.3f} {unit} {cause_seconds / total:6.1%}  {cause}-bound"
                if cause != SHARED
                else f"{cause_seconds * scale:10.3f} {unit} {cause_seconds / total:6.1%}  {cause}"
            )
            kinds = [(kind, part) for kind, part in block.kinds.items() if CAUSES[kind] == cause]
            lines += [
                f"{part * scale:14.3f} {unit} {part / total:6.1%}  {_WORDS[kind]}"
                for kind, part in sorted(kinds, key=lambda item: -item[1])
                if part > 0
            ]
    lines += [
        "",
        f"{unit:>10} {'client':>8} {'network':>8} {'device':>8} {'ops there':>10}  by module, without the modules in it",
    ]
    for module in block.modules[:ROWS]:
        shares = " ".join(f"{module.causes.get(cause, 0.0) * scale:8.3f}" for cause in _CAUSES[:3])
        lines.append(f"{module.seconds * scale:10.3f} {shares} {module.device * scale:10.3f}  {module.path}")
    lines += _remaining_line(len(block.modules) - ROWS, "modules")
    if block.lines:
        lines += ["", f"{unit:>10} {'times':>6}  waits by line"]
        for line in block.lines[:ROWS]:
            lines.append(
                f"{line.seconds * scale:10.3f} {line.times:6}  {line.cause}: {line.line or 'outside of Python code'}"
            )
            lines += [f"{'':19}{line.text}"] if line.text else []
        lines += _remaining_line(len(block.lines) - ROWS, "lines")
    if block.executors:
        lines += ["", f"{unit:>10} {'count':>7}  submissions by executor: running their ops"]
    for item in block.executors:
        lines.append(f"{item.seconds * scale:10.3f} {item.submissions:7}  {item.name}")
        if item.planned:
            speeds = "" if item.calibrated else " (assumed speeds)"
            prediction = f"predicted for {item.planned} of them: {duration(item.predicted)}{speeds}; measured: {duration(item.measured)}"
            lines += [f"{'':20}{prediction}", *([f"{'':20}{item.surprise}"] if item.surprise else [])]
    for name, seconds in block.other_threads.items():
        lines.append(f"{seconds * scale:10.3f} {unit} of thread {name}, beside this one")
    if hints := advice(block):
        lines += ["", "what to do", *[f"- {hint}" for hint in hints]]
    return "\n".join(lines)


def _remaining_line(count: int, what: str) -> Sequence[str]:
    return [f"{'':10} and {count} more {what}"] if count > 0 else []
