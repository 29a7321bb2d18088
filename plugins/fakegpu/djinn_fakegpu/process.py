"""A process with the device, for tests.

The test process has Djinn's own device, and a sticky error stays until its process ends.
"""

from __future__ import annotations

import inspect
import json
import os
import runpy
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import Any, Final, Self

import attrs

# Importing `djinn` replaces this device in a process that is no executor.
_START: Final = """
from djinn_core.system.role import become_server
become_server("executor")
from djinn_fakegpu.process import _serve
_serve()
"""


@attrs.frozen
class Outcome:
    """Result of a program.

    Attributes:
        returncode: exit status; if a signal ended the process, the signal's number, negated.
        output: standard output and standard error, in one text.
    """

    returncode: int
    output: str


class FakeGpuProcess:
    """A server that forks a process for each program. Each process starts with PyTorch and the device loaded.

    with FakeGpuProcess() as gpu:
        gpu.check("torch.ones(3, device='fakegpu').sum().item()")
    """

    def __init__(self, **figures: float) -> None:
        """Start the server. `figures`: as for `djinn_fakegpu.control.configure`."""
        assert sys.platform == "linux", "the device needs Linux"
        command = [sys.executable, "-c", _START, json.dumps(figures)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._programs, self._outcomes = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._process.communicate()

    def run(self, program: Callable[..., object] | str, **arguments: Any) -> Outcome:
        """Run a function or lines of Python. A function sees only its arguments, `torch`, `pytest` and `control`."""
        source = program if isinstance(program, str) else _source(program, arguments)
        self._programs.write(json.dumps(source) + "\n")
        self._programs.flush()
        returncode, output = json.loads(self._outcomes.readline())
        return Outcome(returncode, output)

    def check(self, program: Callable[..., object] | str, **arguments: Any) -> str:
        """Run a program and return its output.

        Raises:
            AssertionError: the program failed; the message is its output.
        """
        outcome = self.run(program, **arguments)
        if outcome.returncode:
            raise AssertionError(f"the program ended with {outcome.returncode}:\n{outcome.output}")
        return outcome.output


def _source(function: Callable[..., object], arguments: dict[str, Any]) -> str:
    lines = textwrap.dedent(inspect.getsource(function))
    return f"{lines[lines.index('def ') :]}\n{function.__name__}(**{arguments!r})\n"


def _run(source: str) -> tuple[int, str]:
    reader, writer = os.pipe()
    with tempfile.NamedTemporaryFile("w", prefix="program-", suffix=".py") as program:  # only its owner can read it
        program.write(source)
        program.flush()
        child = 0
        if sys.platform != "win32":
            child = os.fork()
        if not child:
            _run_here(program.name, writer)
        os.close(writer)
        with os.fdopen(reader, errors="replace") as output:
            text = output.read()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def _run_here(program: str, output: int) -> None:
    import torch

    from djinn_fakegpu import control

    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 0
    try:
        runpy.run_path(program, {"torch": torch, "control": control, "pytest": sys.modules.get("pytest")})
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def _serve() -> None:
    """Load the device, then run programs from standard input until it ends."""
    import torch

    from djinn_fakegpu.library import load

    with suppress(ImportError):  # only some programs use it
        import_module("pytest")
    load(json.loads(sys.argv[1]))
    torch.set_num_threads(1)  # the threads of a pool would be missing in forks
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_run(json.loads(line))) + "\n")
        sys.stdout.flush()
