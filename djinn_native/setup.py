"""Build the library for the PyTorch of this environment. pip must not isolate the build: --no-build-isolation.

`DJINN_NATIVE_SANITIZE=address,undefined` builds it with these sanitizers, in a separate object folder (`python -m
evaluation sanitizers`).
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:  # a source distribution is made without PyTorch; a build stops in `run`
    from setuptools.command.build_ext import build_ext as BuildExtension  # noqa: N812

    torch = None

HERE = Path(__file__).resolve().parent
TABLE = tomllib.loads((HERE / "pyproject.toml").read_text())
MINORS = TABLE["tool"]["djinn-native"]["torch-minors"]
SOURCES = sorted(path.relative_to(HERE).as_posix() for path in HERE.glob("csrc/*.cpp"))
SANITIZERS = os.environ.get("DJINN_NATIVE_SANITIZE", "")

sys.path.insert(0, str(HERE / "building"))
from compiler_here import missing_compiler  # noqa: E402


def refusal() -> str:
    """Return one line with the reason why the library cannot be built here, and the remedy; otherwise an empty string."""
    if torch is None:
        return (
            "djinn-native is compiled against the PyTorch of its environment, but there is none here: if PyTorch is "
            "installed, "
            "add --no-build-isolation to the command of pip"
        )
    if minor(torch.__version__) not in MINORS:
        return (
            f"djinn-native supports only PyTorch {', '.join(MINORS)}, but this is {torch.__version__}: in the checkout "
            f"run "
            f'"make TORCH=torch=={MINORS[-1]}.0 venv"'
        )
    return missing_compiler()


def minor(version: str) -> str:
    """Return `2.13` for `2.13.0+cpu`."""
    return ".".join(version.split(".")[:2])


class Library(BuildExtension):
    """Build command for a shared library without Python symbols, so that one file works with every Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # A permanent folder, so that objects of unchanged files are reused, even if setuptools chose a temporary one.
        kind = f"-{SANITIZERS.replace(',', '-')}" if SANITIZERS else ""
        self.build_temp = str(HERE / "build" / f"torch-{torch.__version__}{kind}") if torch else self.build_temp

    def run(self) -> None:
        if said := refusal():
            sys.exit(said)
        (HERE / "lib").mkdir(exist_ok=True)  # an editable installation copies the library to it
        # pip does not add its environment's programs, such as ninja, to the search path.
        os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + (".dll" if sys.platform == "win32" else ".so")  # noqa: PTH118

    def get_libraries(self, ext: Extension) -> list[str]:
        return list(ext.libraries)  # not Python's

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return list(ext.export_symbols)  # not PyInit_...


class AnyPython(bdist_wheel):
    """Wheel command for a wheel that fits every Python of one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def extension() -> Extension:
    """Return the extension for this PyTorch.

    Its name contains PyTorch's version, because a wheel has one library per version.
    """
    if torch is None:
        return Extension("djinn_native.lib.djinn_torch", SOURCES)
    built = CppExtension(f"djinn_native.lib.djinn_torch_{minor(torch.__version__).replace('.', '_')}", SOURCES)
    built.libraries = [library for library in built.libraries if library != "torch_python"]
    for name, values in flags().items():
        setattr(built, name, values)
    return built


def flags() -> dict[str, list[Any]]:
    """Return compiler and linker flags, as attributes of an `Extension`."""
    version = [("DJINN_NATIVE_VERSION", f'"{TABLE["project"]["version"]}"')]
    if sys.platform == "win32":
        return {"define_macros": version, "extra_compile_args": ["/O2", "/permissive-"]}
    # Failed assertions contain file names, which must be equal on every machine.
    torch_folder = Path(torch.__file__).resolve().parent
    places = [f"-ffile-prefix-map={HERE}=djinn_native", f"-ffile-prefix-map={torch_folder}=torch"]
    compiling = ["-O2", "-g0", "-fvisibility=hidden", *places]
    # PyTorch has loaded its libraries by then; the path is for programs that inspect this library alone.
    origin = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
    linking = [f"-Wl,-rpath,{origin}/../../torch/lib"]
    if SANITIZERS:
        checks = [f"-fsanitize={SANITIZERS}", "-fno-sanitize=vptr"]  # vptr needs type information that PyTorch hides
        compiling += [
            "-O1",
            "-g",
            "-fno-omit-frame-pointer",
            "-D_GLIBCXX_ASSERTIONS",
            "-fno-sanitize-recover=all",
            *checks,
        ]
        linking += checks
    elif sys.platform == "linux":
        linking += ["-Wl,-s"]
    return {"define_macros": version, "extra_compile_args": compiling, "extra_link_args": linking}


def package_folders() -> dict[str, str]:
    """Return the folder of the package: the folder of this file."""
    # Then an editable installation is a line in a .pth file. Otherwise it is a finder, which delays each start of
    # Python by 12 ms.
    if "editable_wheel" in sys.argv and HERE.name == "djinn_native":
        return {"": ".."}
    return {"djinn_native": "."}


os.umask(0o022)  # file modes in the wheel must be equal on every machine
setup(
    script_name="setup.py",  # so that no pip program mistakes it for a module of the package
    packages=["djinn_native"],
    package_dir=package_folders(),
    ext_modules=[extension()],
    cmdclass={"build_ext": Library, "bdist_wheel": AnyPython},
)
