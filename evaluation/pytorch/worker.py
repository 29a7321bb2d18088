"""One file of PyTorch's tests on one device: results by test, written as JSON.

    python worker.py ORDER RESULTS

ORDER is a file with the fields of `Order`. The process imports the test file once and runs its tests in children. If a
test hangs or crashes, only its child ends, and the next child continues. Test names are those of the CPU on every
device, so that results can be compared.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil

REMOTE = "remote_accelerator"
TEXT = 6000  # maximum characters of a stored traceback
TRIES = 3  # maximum number of children that end before their first test
OWN = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
NOT_MADE = {
    "outcome": "skipped",
    "text": "PyTorch makes this test for the CPU only, as it does for some dtypes",
}
GRACE = 30.0  # seconds after its limit before a test that ignores a signal is killed


@attrs.frozen
class Order:
    """Tests to run: those in `named`. If it is None, every `stride`-th match of `only`, from number `first` on.

    A test may take `test_seconds` of processor time, and `patience` times as long in wall time. All tests together may take
    `file_seconds` of wall time.

    Attributes:
        device_generic: True to run only tests that PyTorch makes for each device, False to run every `TestCase`.
        server: process id of the server, whose processor time counts as well, or None.
    """

    file: str
    device: str
    named: Sequence[str] | None
    only: str
    stride: int
    test_seconds: float
    file_seconds: float
    device_generic: bool = True
    patience: float = 10.0
    server: int | None = None
    first: int = 0


def main() -> None:
    """Run the requested tests."""
    order = Order(**json.loads(Path(sys.argv[1]).read_text()))
    results = Path(sys.argv[2])
    sys.argv = sys.argv[:1]  # PyTorch's test utilities would parse the other arguments
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = "cpu" if order.device == "cpu" else "privateuse1"
    if order.device != "cpu":
        os.environ |= {"TRANSFORMERS_TEST_DEVICE": REMOTE, "TRANSFORMERS_TEST_DEVICE_SPEC": "device_spec.py"}
        import djinn  # noqa: F401 - before PyTorch's test utilities look for backends
    import torch

    torch.set_num_threads(1)
    tests = tests_of(load(Path(order.file)), order.device_generic)
    choice = [name for name in tests if re.search(order.only, name)][order.first :: order.stride]
    if order.named is not None:
        choice = [name for name in order.named if name in tests]
    outcomes = run_all(tests, choice, order)
    outcomes |= {name: NOT_MADE for name in order.named or () if name not in tests}
    results.write_text(json.dumps({"tests": len(tests), "chosen": len(choice), "outcomes": outcomes}))


def common_name(name: str) -> str:
    """Return the name that a test has on the CPU. A test's name may contain both spellings of the remote device."""
    for device in ("privateuse1", REMOTE):
        name = name.replace(device.upper(), "CPU").replace(f"_{device}", "_cpu")
    return name


def load(file: Path) -> Any:
    """Return the test file as a module, with shims for names of PyTorch 2.6."""
    from evaluation.pytorch.shims import as_now, put_in_place

    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = file.read_text()
        put_in_place(source)
        exec(compile(as_now(source), file, "exec"), vars(module))
    return module


def tests_of(module: Any, device_generic: bool) -> dict[str, unittest.TestCase]:
    """Return a file's tests by common name. `device_generic`: True for only those that PyTorch made for the device."""
    from torch.testing._internal.common_device_type import DeviceTypeTestBase

    base = DeviceTypeTestBase if device_generic else unittest.TestCase
    results: dict[str, unittest.TestCase] = {}
    for name in sorted(vars(module)):
        case = vars(module)[name]
        if isinstance(case, type) and issubclass(case, base) and case.__module__ == module.__name__:
            for test in unittest.defaultTestLoader.getTestCaseNames(case):
                results[common_name(f"{name}.{test}")] = case(test)
    return results


def run_all(tests: dict[str, unittest.TestCase], chosen: Sequence[str], order: Order) -> dict[str, Any]:
    """Run tests until the time limit. Return the outcome of each test that has run.

    Raises:
        RuntimeError: no test can be run.
    """
    outcomes: dict[str, Any] = {}
    end = time.monotonic() + order.file_seconds
    pending, idle = list(chosen), 0
    while pending and time.monotonic() < end:
        finished_names, text = _run_in_child([tests[name] for name in pending], order, end)
        outcomes |= finished_names
        idle = 0 if finished_names else idle + 1
        if idle == TRIES:
            raise RuntimeError(text)
        pending = [name for name in pending if name not in outcomes]
    return outcomes


def _run_in_child(tests: Sequence[unittest.TestCase], order: Order, end: float) -> tuple[dict[str, Any], str]:
    """Return outcomes of as many tests as one child completes, and its output."""
    outcomes: dict[str, Any] = {}
    current = ""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            os.close(reading)
            _be_child(tests, order, writing, output.fileno())
        os.close(writing)
        start = time.monotonic()
        for line in _lines(reading, child, end, order.test_seconds * order.patience + GRACE):
            current, start = line.pop("started", ""), time.monotonic()
            if "test" in line:
                outcomes[line.pop("test")] = line
            if "setup" in line:
                outcomes |= {_name(test): line["setup"] for test in tests if type(test).__name__ == line["case"]}
        os.close(reading)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        text = output.read()[-TEXT:].decode(errors="replace")
        if current and time.monotonic() < end:
            how = "hangs" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else "crashed"
            outcomes[current] = {"outcome": how, "seconds": time.monotonic() - start, "text": text}
    return outcomes, text


def _be_child(tests: Sequence[unittest.TestCase], order: Order, writing: int, output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        faulthandler.enable()
        unittest.TestSuite(tests).run(Reporting(order, writing))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _lines(reading: int, child: int, end: float, silence: float) -> Iterator[dict[str, Any]]:
    """Yield lines of the child until it ends. Kill it after `silence` seconds without a line, or at `end`."""
    rest, heard = b"", time.monotonic()
    while True:
        exit_status = os.waitid(
            os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT
        )  # its children may keep the pipe open
        ready, _, _ = select.select([reading], [], [], 0.0 if exit_status else 0.2)
        data = os.read(reading, 1 << 16) if ready else b""
        if data:
            heard = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            yield from map(json.loads, lines)
        elif exit_status:
            return
        if time.monotonic() > min(heard + silence, end):
            os.kill(child, signal.SIGKILL)
            heard = end = float("inf")


class ProcessorTime:
    """Processor time of this process, its ended children, and a server with its executors.

    Unlike wall time, it does not depend on other load.
    """

    def __init__(self, server: int | None) -> None:
        self._server = server
        self._used: dict[psutil.Process, float] = {}  # by server process, including ended ones
        self._find()

    def used(self) -> float:
        """Return the seconds so far."""
        try:
            self._used |= {process: sum(process.cpu_times()[:2]) for process in self._running}
        except psutil.NoSuchProcess:
            self._find()
        return sum(self._used.values()) + sum(sum(resource.getrusage(who)[:2]) for who in OWN)

    def _find(self) -> None:
        server = [] if self._server is None else [psutil.Process(self._server)]
        self._running = [*server, *(child for process in server for child in process.children(recursive=True))]


def _name(test: unittest.TestCase) -> str:
    return common_name(f"{type(test).__name__}.{test._testMethodName}")


class Reporting(unittest.TestResult):
    """Test result that writes a JSON line per test. After each remote test, it checks that the session still exists."""

    def __init__(self, order: Order, writing: int) -> None:
        super().__init__()
        self.device, self.limit, self.writing = order.device, order.test_seconds, writing
        self.longest = order.test_seconds * order.patience
        self.outcome, self.text = "passed", ""
        self.witness: Any = None
        signal.signal(signal.SIGALRM, self._look_at_limits)
        if self.device != "cpu" and not self._has_session():
            raise RuntimeError(self.text)
        self.time = ProcessorTime(order.server)
        self.started = self.time.used(), time.monotonic()

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.outcome, self.text = "passed", ""
        self._say(started=_name(test))
        signal.setitimer(signal.ITIMER_REAL, self.limit, self.limit)
        self.started = self.time.used(), time.monotonic()

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        seconds = self.time.used() - self.started[0]
        is_session_lost = self.device != "cpu" and not self._has_session()
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._report(_name(test), "lost session" if is_session_lost else self.outcome, seconds)
        if is_session_lost:
            self._open_another()

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._record(err)
        if not isinstance(test, unittest.TestCase):  # a class whose set-up failed
            case = str(test).rpartition(".")[2].rstrip(")")
            self._say(case=case, setup={"outcome": "failed", "seconds": 0.0, "text": self.text})

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._record(err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self._record(err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.outcome, self.text = "skipped", reason

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self.outcome, self.text = "failed", "AssertionError: unexpected success"

    def _record(self, err: Any) -> None:
        self.outcome, self.text = "failed", "".join(traceback.format_exception(*err))[-TEXT:]

    def _report(self, test: str, outcome: str, seconds: float) -> None:
        self._say(test=test, outcome=outcome, seconds=round(seconds, 4), text=self.text)

    def _say(self, **what: Any) -> None:
        os.write(self.writing, (json.dumps(what) + "\n").encode())

    def _has_session(self) -> bool:
        """Return True if the session answers with the right value of a tensor. Modes that a test left on do not matter."""
        import torch

        try:
            with torch.inference_mode(False), torch.no_grad():
                if self.witness is None:
                    self.witness = torch.arange(3, device=REMOTE)
                return self.witness.tolist() == [0, 1, 2]
        except Exception:
            self.text = (self.text + traceback.format_exc())[-TEXT:]
            return False

    def _open_another(self) -> None:
        import djinn

        self.witness = None
        djinn.init()
        if not self._has_session():
            os._exit(1)

    def _look_at_limits(self, *_: Any) -> None:
        """End the process if the test exceeds its limit. The test may be inside any code, so no exception could end it."""
        processor, clock = self.started
        if self.time.used() - processor < self.limit and time.monotonic() - clock < self.longest:
            return
        traceback.print_stack()
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
