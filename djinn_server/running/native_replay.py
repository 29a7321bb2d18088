"""Replay the steps of a template in C++ (`csrc`): a loop over PyTorch's boxed dispatcher without the interpreter's lock.

The library runs ops of PyTorch. Python runs Djinn's own ops, ops whose arguments are checked, and ops that may leave
memory unwritten. Between two calls of the library, all values are in the environment. So a step can fail, be poisoned,
cancelled or retried as in the Python loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import compress, count
from operator import is_not, itemgetter
from pathlib import Path
from typing import Any, Final

import torch

from djinn_core import torch_private
from djinn_core.errors import StartupError
from djinn_core.ir.operators import resolve, split_name
from djinn_core.logs import get_logger
from djinn_core.system.limits import lower_priority
from djinn_core.system.lru import LruCache
from djinn_server.running.compiled_step import CompiledStep, ComplexSource, Environment, ListSource, Source
from djinn_server.system.native_library import NativeLibrary

LIBRARY: Final = NativeLibrary("the native replay", Path(__file__).resolve().parent / "csrc")
# Ops whose arguments the library checks. In the Python loop, a rule of `checks` does this.
LIBRARY_CHECKS: Final = frozenset({"aten::scaled_dot_product_attention"})
MIN_STEPS: Final = 8  # consecutive steps from which a call of the library is faster
BUILD_AFTER_RUNS: Final = 3  # most templates never run so often
_MAX_EARLY_RANGES: Final = 64  # cached ranges of a template that end early, besides the ranges that do not
_DEFAULT, _PLACE, _LIST, _COMPLEX, _SCALAR_TENSOR = range(5)  # as `Given` in replay.cpp
_FAILED: Final = 4  # as `End::kFailed`
_MEMORY_FORMATS: Final = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
_SCALAR_TENSORS: Final = {
    torch.int64: 4,
    torch.float32: 6,
    torch.float64: 7,
}  # dtypes of scalar tensors that the library makes, with PyTorch's numbers
_PLAIN: Final = frozenset({torch.Tensor})
_NEVER_LOADED: Final = object()
_log = get_logger("djinn.server")
_loaded: bool | None = None  # None: not tried, or not compiled yet
_build_started = False
_load_lock = threading.Lock()


def load_library() -> bool:
    """Return True if the library is loaded. If it is not compiled, start to compile it in the background."""
    global _loaded, _build_started
    with _load_lock:
        if _loaded is None:
            try:
                if (path := LIBRARY.path()).exists():
                    torch.classes.load_library(str(path))
                    _loaded = True
                elif not _build_started:
                    _build_started = True
                    _build_in_background()
            except (OSError, StartupError) as error:
                _log.warning(
                    "the native replay library cannot be loaded: templates run in Python, which is slower; see `error`",
                    error=str(error),
                )
                _loaded = False
        return bool(_loaded)


def library_is_loaded() -> bool:
    """Return True if `load_library` has loaded the library."""
    return bool(_loaded)


def _build_in_background() -> None:
    """Start a process that compiles the library and may outlive this process."""
    nothing = subprocess.DEVNULL
    command = [sys.executable, "-m", __name__]
    subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)


def main() -> None:
    """Compile the library, unless another process does this or no compiler is installed."""
    lower_priority(19)
    with contextlib.suppress(BlockingIOError, StartupError):
        LIBRARY.build(wait=False)


class NativeReplay:
    """The steps of a template that the library runs. Thread-safe: several lanes of a session may call `run`.

    Attributes:
        ends: for each step, the number of the first step that Python must run, from this step on.
    """

    def __init__(self, steps: Sequence[CompiledStep], constants: Sequence[Any], slots: int, values: int) -> None:
        """`slots`, `values`: number of slots, and of all values after them in the environment (inputs, results)."""
        ops = list(dict.fromkeys([step.op for step in steps if step.plain]))
        numbers = [int(torch_private.takes_numbers_for_tensors(split_name(op)[0])) for op in ops]
        index = {op: number for number, op in enumerate(ops)}
        code = [word for step in steps for word in _step_code(step, index)]
        native_constants = [
            _MEMORY_FORMATS[constant] if isinstance(constant, torch.memory_format) else constant
            for constant in constants
        ]
        first_input = len(constants) + slots
        program = torch.classes.djinn_replay.Program
        self._program = program(native_constants, first_input, first_input + values, ops, numbers, code)
        self.ends: list[int] = self._program.ends()
        self._ranges: LruCache[tuple[int, int], _Range] = LruCache(_MAX_EARLY_RANGES + len(set(self.ends)))
        self._ranges_lock = threading.Lock()  # held while operands are loaded; the loaded operands are thread-local

    def run(
        self,
        start: int,
        stop: int,
        env: Environment,
        halt: ctypes.c_int | None = None,
        progress: ctypes.c_int | None = None,
        seconds: float = 0.0,
    ) -> tuple[int, Exception | None]:
        """Run the steps from `start` to `stop` (exclusive) in the library. Return the next step, and its error if it raised.

        Without an error, a next step before `stop` has one of three reasons: `halt` is set, the run took `seconds`, or Python
        must run this step.

        Args:
            start: number of the first step.
            stop: number of the step after the last one.
            env: the values of the run. Results are stored in it.
            halt: flag that ends the run before the next step once it is not 0; None: no flag.
            progress: receives the number of each step, or None.
            seconds: ends the run after this time; 0.0: no limit.
        """
        with self._ranges_lock:
            range_ = self._ranges.use((start, stop))
            if range_ is None:
                range_ = _Range(torch.classes.djinn_replay.Range(self._program, start, stop))
                self._ranges.store((start, stop), range_)
            if not range_.load(env):
                return start, None
        step, end, results = range_.run(_address(halt), _address(progress), seconds)
        error = range_.error() if end == _FAILED else None
        places = range_.result_places
        if step < stop:
            places, results = range_.unfinished_results()
        for place, value in zip(places, results, strict=True):
            env[place] = value
        return step, error


def _address(number: ctypes.c_int | None) -> int:
    return 0 if number is None else ctypes.addressof(number)


class _Range:
    """Consecutive steps that one call of the library runs.

    Attributes:
        result_places: places of the results that later steps need.
        run, unfinished_results: methods of `Range` in replay.cpp.
    """

    def __init__(self, native: Any) -> None:
        self.result_places: list[int] = native.result_places()
        self.run, self.unfinished_results = native.run, native.unfinished_results
        self._load, self._raise_error = native.load, native.raise_error
        self._released: list[int] = native.released()
        reads = native.reads()
        first_read = slice(reads[0], reads[0] + 1) if reads else slice(0)
        self._get = itemgetter(*reads) if len(reads) > 1 else itemgetter(first_read)
        self._slots = slice(*native.slots())
        self._loaded_slots: list[Any] = [_NEVER_LOADED] * (self._slots.stop - self._slots.start)

    def load(self, env: Environment) -> bool:
        """Pass the steps' operands to the library. Return False if it does not support an operand, such as poison."""
        values = self._get(env)
        if not _PLAIN.issuperset(map(type, values)):
            return False
        slots = env[self._slots]
        changed = [
            *compress(count(), map(is_not, slots, self._loaded_slots))
        ]  # by identity: 0, 0.0 and False are equal
        try:
            self._load(values, changed, [slots[place] for place in changed])
        except (RuntimeError, TypeError, ValueError, OverflowError):  # a number that no kernel accepts
            self._loaded_slots = [_NEVER_LOADED] * len(slots)
            return False
        self._loaded_slots = slots
        del values  # otherwise consumed inputs would stay alive until this call returns
        for place in self._released:
            env[place] = None
        return True

    def error(self) -> Exception:
        """Return the error of the op at which the last run failed."""
        try:
            self._raise_error()
        except Exception as error:
            return error.with_traceback(None)  # the frames would keep the values of the run alive
        raise AssertionError("the native library reported a failed op without its error; please report this bug")


class ReplayState:
    """Count the runs of a template. After `BUILD_AFTER_RUNS` runs, build its native program if the library is loaded."""

    __slots__ = ("_native", "_runs", "_tried_at")

    def __init__(self) -> None:
        self._runs, self._tried_at = 0, BUILD_AFTER_RUNS
        self._native: NativeReplay | None = None

    def native(
        self, steps: Sequence[CompiledStep], constants: Sequence[Any], slots: int, values: int
    ) -> NativeReplay | None:
        """Count a run, and return the native program of the template. The parameters are those of `NativeReplay`.

        Return None if the template ran too rarely, the library is not loaded, or no range of steps is long enough.
        """
        self._runs += 1
        if self._runs == self._tried_at and len(steps) >= MIN_STEPS:
            if not load_library():
                self._tried_at *= 2  # by then the library may be compiled
                return None
            native = NativeReplay(steps, constants, slots, values)
            if any(end - step >= MIN_STEPS for step, end in enumerate(native.ends)):
                self._native = native
        return self._native


def _step_code(step: CompiledStep, index: dict[str, int]) -> list[int]:
    """Return a step, encoded for `Program` in replay.cpp. `index`: number of each op by its name."""
    if not step.plain:
        return [-1]
    schema = torch_private.schema_of(overload_called(step.op)).arguments
    names = [argument.name for argument in schema]
    arguments = dict(zip(names, step.arguments, strict=False)) | dict(step.keywords)
    too_many = len(step.arguments) > sum([not argument.kwarg_only for argument in schema])
    if too_many or len(arguments) < len(step.arguments) + len(step.keywords):
        return [-1]  # Python raises the error
    code = [index[step.op], len(names)]
    for name in names:
        code += _source_code(arguments[name]) if name in arguments else [_DEFAULT]
    code += [int(step.returns_list), len(step.makes)]
    for result, place in step.makes:
        code += [result, place]
    return [*code, len(step.release), *step.release]


@functools.cache
def overload_called(op: str) -> Any:
    """Return the overload with this name: an op of PyTorch or of the library."""
    return torch_private.overload_called(op) if op.startswith("djinn_replay::") else resolve(op)


def _source_code(source: Source) -> list[int]:
    if isinstance(source, int):
        return [_PLACE, source]
    if isinstance(source, ListSource):
        return [_LIST, len(source.items), *[word for item in source.items for word in _source_code(item)]]
    if isinstance(source, ComplexSource):
        return [_COMPLEX, source.real, source.imaginary]
    if isinstance(source.number, int) and source.dtype in _SCALAR_TENSORS:
        return [_SCALAR_TENSOR, _SCALAR_TENSORS[source.dtype], source.number]
    return [_LIST, 0]  # an empty list does not fit a tensor argument, so Python runs the step


if __name__ == "__main__":
    main()
