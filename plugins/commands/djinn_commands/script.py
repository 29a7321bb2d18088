"""Run a user's script or module in this process as `python` does."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from threading import Event
from types import FrameType, ModuleType, TracebackType
from typing import Any

import attrs

from djinn_client.tracebacks import shorten_through


@attrs.frozen
class Script:
    """A user's script with its arguments.

    Attributes:
        name: path of a file or folder (`python PATH`), or name of a module (`python -m NAME`).
        arguments: arguments of the script.
        is_module: True if `name` names a module.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def run(self) -> None:
        """Run the script to its end. Print its exception as Python does, without the frames of this runner.

        Raises:
            SystemExit: the script exited, or raised an exception (status 1).
            KeyboardInterrupt: Ctrl-C interrupted the script. Its traceback is already printed.
        """
        argv, path = sys.argv, sys.path[:]
        sys.argv = [self.name, *self.arguments]
        if not sys.flags.safe_path:
            sys.path[0] = self._folder()
        try:
            self._run()
        except SystemExit:
            raise
        except BaseException as error:
            shorten_through(error)  # for example the frame of the Ctrl-C handler
            trace = _without_runner(error.__traceback__)
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            if isinstance(error, KeyboardInterrupt):
                raise
            raise SystemExit(1) from None
        finally:
            sys.argv = argv
            sys.path[:] = path

    def _folder(self) -> str:
        if self.is_module:
            return str(Path.cwd())
        place = Path(self.name).resolve()
        return str(place.parent if place.is_file() else place)

    def _run(self) -> None:
        if self.is_module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        elif Path(self.name).is_file() and not zipfile.is_zipfile(self.name):
            _run_file(Path(self.name).resolve())
        else:
            runpy.run_path(self.name, run_name="__main__")


class _ScriptLoader(SourceFileLoader):
    """Module loader that compiles a script without writing a `.pyc` file."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Do nothing in place of writing a compiled file."""


def _run_file(file: Path) -> None:
    """Run a file as the module `__main__`. The module remains in `sys.modules`, because exit handlers may use it."""
    main = ModuleType("__main__")
    loader = _ScriptLoader("__main__", str(file))
    vars(main).update(__file__=str(file), __loader__=loader, __cached__=None, __annotations__={})
    sys.modules["__main__"] = main
    loader.exec_module(main)


def _without_runner(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without its outermost frames, which belong to this runner."""
    while trace is not None and _is_runner(trace.tb_frame):
        trace = trace.tb_next
    return trace


def _is_runner(frame: FrameType) -> bool:
    return frame.f_code.co_filename == __file__ or frame.f_globals.get("__name__") in {
        "runpy",
        "importlib._bootstrap",
        "importlib._bootstrap_external",
    }


def end_by_interrupt() -> Callable[[], None]:
    """Return a function that makes the process end by SIGINT after all exit handlers, as `python` does after Ctrl-C.

    Call `end_by_interrupt` before other code registers with `atexit`, because handlers run in reverse order.
    """
    interrupted = Event()
    atexit.register(_die_if, interrupted)
    return interrupted.set


def _die_if(interrupted: Event) -> None:
    if interrupted.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
