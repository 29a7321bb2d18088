"""The library in C++: compiled when it is first loaded, against the PyTorch of this environment."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from djinn.errors import StartupError
from djinn_core.system.directories import cache_directory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SOURCES: Final = Path(__file__).resolve().parent / "csrc"
_FLAGS: Final = ("-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden")
_lock = threading.Lock()
_loaded = False


def load(figures: Mapping[str, float] | None = None) -> None:
    """Register the device `fakegpu` with PyTorch, once. `figures` describe the hardware; later calls may only change rates.

    Raises:
        StartupError: another device took PrivateUse1's place, or the library cannot be compiled here.
    """
    global _loaded
    with _lock:
        if not _loaded:
            name = torch._C._get_privateuse1_backend_name()
            if name != "privateuseone":
                raise StartupError(
                    f"this process has the device {name!r} and can have no other: use fakegpu in an executor process"
                )
            torch.ops.load_library(str(build()))
        torch.ops.fakegpu.configure({name: float(value) for name, value in (figures or {}).items()})
        if not _loaded:
            torch._C._rename_privateuse1_backend("fakegpu")
            torch._register_device_module("fakegpu", _module())
        _loaded = True


def build() -> Path:
    """Return the compiled library. Processes that need it at the same time wait for one of them.

    Raises:
        StartupError: there is no compiler, or it failed.
    """
    sources = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])
    digest = hashlib.sha256(str((torch.__version__, _FLAGS)).encode())
    for source in sources:
        digest.update(source.read_bytes())
    beside = SOURCES.parent / "lib"
    folder = beside if os.access(SOURCES.parent, os.W_OK) else cache_directory() / "fakegpu"
    made = folder / f"{digest.hexdigest()[:20]}.so"
    if made.exists():
        return made
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        raise StartupError(
            "the device fakegpu is compiled when it is first used, and there is no C++ compiler: apt-get install g++"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with _held(folder / "lock"):
        if not made.exists():
            _compile(compiler, [source for source in sources if source.suffix == ".cpp"], made)
    return made


def _compile(compiler: str, sources: list[Path], made: Path) -> None:
    """Compile two files that include the others: most of the time goes into PyTorch's headers."""
    from torch.utils.cpp_extension import include_paths

    headers = [flag for path in include_paths() for flag in ("-isystem", path)]
    libraries = Path(torch.__file__).parent / "lib"
    folder = made.with_suffix(f".{os.getpid()}")
    folder.mkdir()

    def compiled(part: int) -> str:
        (unit := folder / f"{part}.cpp").write_text("".join(f'#include "{source}"\n' for source in sources[part::2]))
        _run([compiler, *_FLAGS, *headers, "-c", str(unit), "-o", str(to := unit.with_suffix(".o"))])
        return str(to)

    try:
        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(compiled, range(2)))
        linked = folder / made.name
        _run(
            [
                compiler,
                "-shared",
                "-o",
                str(linked),
                *objects,
                f"-L{libraries}",
                "-ltorch_cpu",
                "-lc10",
                f"-Wl,-rpath,{libraries}",
                "-Wl,-s",
            ]
        )
        linked.rename(made)
        for other in made.parent.glob("*.so"):
            other.unlink() if other != made else None
    finally:
        shutil.rmtree(folder)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise StartupError(f"the device fakegpu cannot be compiled: {done.stderr.strip() or command[0]}")


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold a lock on a file, which the system releases if this process dies."""
    fcntl: Any = importlib.import_module("fcntl")  # which Windows lacks, says mypy
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Properties(types.SimpleNamespace):
    """What `torch.cuda.get_device_properties` returns for a GPU."""


def _module() -> types.ModuleType:
    """The functions of `torch.fakegpu`, as PyTorch expects of a device."""
    module: Any = types.ModuleType("torch.fakegpu")
    ops, accelerator = torch.ops.fakegpu, torch.accelerator

    def index_of(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index if device is not None else None
        return accelerator.current_device_index() if index is None else int(index)

    def generator(device: Any = "fakegpu") -> torch.Generator:
        return ops.default_generator(index_of(device))  # type: ignore[no-any-return]

    def manual_seed_all(seed: int) -> None:
        for one in module.default_generators:
            one.manual_seed(seed)

    def get_device_properties(device: Any = None) -> _Properties:
        total = accelerator.get_memory_info(index_of(device))[1]
        return _Properties(name="Fake GPU", total_memory=total, multi_processor_count=132, major=9, minor=0)

    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = ops.is_in_bad_fork
    module.device_count = ops.device_count
    module.current_device = accelerator.current_device_index
    module.set_device = accelerator.set_device_index
    module.synchronize = accelerator.synchronize
    module.default_generators = tuple(ops.default_generator(index) for index in range(ops.device_count()))
    module.manual_seed_all = manual_seed_all
    module.manual_seed = lambda seed: generator().manual_seed(seed)
    module.get_rng_state = lambda device="fakegpu": generator(device).get_state()
    module.set_rng_state = lambda state, device="fakegpu": generator(device).set_state(state)
    module.get_device_properties = get_device_properties
    module.reset_peak_memory_stats = accelerator.reset_peak_memory_stats
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module  # type: ignore[no-any-return]
