"""A process that has the device, for tests: a test process has Djinn's own device, and sticky errors stay until a process ends."""

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

# Importing `djinn` takes the place of this device in a process that is no executor.
_START: Final = """
from djinn_core.system.role import become_server
become_server("executor")
from djinn_fakegpu.process import _serve
_serve()
"""


@attrs.frozen
class Outcome:
    """How a program ended: `returncode` is negative for a signal, `output` is what it wrote to both streams."""

    returncode: int
    output: str


class FakeGpuProcess:
    """Forks a process for each program. They start with PyTorch and the device, and share nothing afterwards.

    with FakeGpuProcess() as gpu:
        gpu.check("torch.ones(3, device='fakegpu').sum().item()")
    """

    def __init__(self, **figures: float) -> None:
        """`figures`: as for `djinn_fakegpu.control.configure`."""
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
        """Run a function, which sees its arguments, `torch`, `pytest` and `control` alone, or lines of Python."""
        source = program if isinstance(program, str) else _source(program, arguments)
        self._programs.write(json.dumps(source) + "\n")
        self._programs.flush()
        returncode, output = json.loads(self._outcomes.readline())
        return Outcome(returncode, output)

    def check(self, program: Callable[..., object] | str, **arguments: Any) -> str:
        """Run it and return its output.

        Raises:
            AssertionError: it failed; the message is its output.
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
    with tempfile.NamedTemporaryFile("w", prefix="program-", suffix=".py") as program:  # which its owner alone may read
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
    """Load the device, then run programs from the standard input until it ends."""
    import torch

    from djinn_fakegpu.library import load

    with suppress(ImportError):  # programs that do not name it run without it
        import_module("pytest")
    load(json.loads(sys.argv[1]))
    torch.set_num_threads(1)  # the threads of a pool would be missing in forks
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_run(json.loads(line))) + "\n")
        sys.stdout.flush()
