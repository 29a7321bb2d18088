"""Compile C++ libraries against the installed PyTorch.

A library is compiled once for each version of PyTorch, named by a digest of its sources, and shared by processes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import attrs
import torch

from djinn_core.errors import ConfigurationError, StartupError
from djinn_core.system.directories import cache_directory
from djinn_core.system.private_directories import private_directory
from djinn_core.system.processes import lock_file

_UNITS: Final = 2  # compiled in parallel; one unit includes several files, since PyTorch's headers take most time


@attrs.frozen
class NativeLibrary:
    """A C++ library that uses no symbol of Python.

    Attributes:
        name: name in messages.
        sources: folder of the `.cpp` and `.h` files.
        optimization: optimization flag of the compiler.
    """

    name: str
    sources: Path
    optimization: str = "-O2"

    @property
    def _flags(self) -> tuple[str, ...]:
        return ("-std=c++20", self.optimization, "-g0", "-fPIC", "-fvisibility=hidden", *_sanitizers())

    def path(self) -> Path:
        """Return the path of the compiled library, which may not exist yet.

        The library is in `lib/` beside the sources. If `lib/` lacks it and cannot be written, it is in the user's cache.

        Raises:
            StartupError: others can write to the folder in the cache.
        """
        digest = hashlib.sha256(str((torch.__version__, self._flags)).encode())
        for source in sorted([*self.sources.glob("*.h"), *self.sources.glob("*.cpp")]):
            digest.update(source.read_bytes())
        name = f"torch_{torch.__version__.replace('+', '_')}-{digest.hexdigest()[:20]}.so"
        beside = self.sources.parent / "lib"
        if (beside / name).exists() or os.access(self.sources.parent, os.W_OK):
            return beside / name
        try:
            cache_folder = private_directory(
                cache_directory() / "native" / self.sources.parent.name, "compiled libraries"
            )
        except (ConfigurationError, OSError) as error:
            raise StartupError(f"the folder for the compiled library of {self.name} cannot be used: {error}") from error
        return cache_folder / name

    def build(self, *, wait: bool = True) -> Path:
        """Return the path of the compiled library. Compile it if needed, or `wait` while another process does.

        Raises:
            StartupError: there is no compiler, or the compiler failed.
            BlockingIOError: another process compiles the library, and `wait` is False.
        """
        library_path = self.path()
        if library_path.exists():
            return library_path
        compiler = os.environ.get("CXX") or shutil.which("c++")
        if compiler is None:
            raise StartupError(
                f"{self.name} must be compiled against the installed PyTorch, but this machine has no C++ compiler: install one, such as g++"
            )
        library_path.parent.mkdir(parents=True, exist_ok=True)
        with (library_path.parent / "lock").open("w") as lock:
            lock_file(lock.fileno(), wait=wait)
            if not library_path.exists():
                self._compile(compiler, library_path)
        return library_path

    def _compile(self, compiler: str, output: Path) -> None:
        torch_folder = Path(torch.__file__).parent
        include, libraries = (
            torch_folder / "include",
            torch_folder / "lib",
        )  # `torch.utils.cpp_extension` needs setuptools
        headers = [f"-isystem{path}" for path in (include, include / "torch" / "csrc" / "api" / "include")]
        sources = sorted(self.sources.glob("*.cpp"))
        folder = output.with_suffix(f".{os.getpid()}")
        folder.mkdir()

        def compiled(part: int) -> str:
            (unit := folder / f"{part}.cpp").write_text(
                "".join([f'#include "{source}"\n' for source in sources[part::_UNITS]])
            )
            self._run([compiler, *self._flags, *headers, "-c", str(unit), "-o", str(to := unit.with_suffix(".o"))])
            return str(to)

        try:
            with ThreadPoolExecutor(_UNITS) as pool:
                objects = list(pool.map(compiled, range(min(_UNITS, len(sources)))))
            linked = folder / output.name
            linking = ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}", "-Wl,-s", *_sanitizers()]
            self._run([compiler, "-shared", "-o", str(linked), *objects, f"-L{libraries}", *linking])
            linked.rename(output)
            for old_library in output.parent.glob(f"{output.name.partition('-')[0]}-*.so"):
                if old_library != output and not _sanitizers():
                    old_library.unlink()
        finally:
            shutil.rmtree(folder)

    def _run(self, command: Sequence[str]) -> None:
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        if result.returncode:
            raise StartupError(f"{self.name} cannot be compiled: {result.stderr.strip() or command[0]}")


def _sanitizers() -> Sequence[str]:
    """Return the compiler flags of the sanitizers that `DJINN_NATIVE_SANITIZE` names, as djinn_native/setup.py does."""
    names = os.environ.get("DJINN_NATIVE_SANITIZE", "")
    return (f"-fsanitize={names}", "-fno-sanitize=vptr", "-fno-sanitize-recover=all") if names else ()
