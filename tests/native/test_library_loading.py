"""`djinn_native.load`: the right library is found and checked, and each refusal is one line that names the cure."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch

import djinn_native

MINOR = ".".join(torch.__version__.split(".")[:2])
ABI = {
    "djinn_native": djinn_native.__version__,
    "torch": torch.__version__.partition("+")[0],
    "PrivateUse1": "61",
    "AutogradPrivateUse1": "146",
    "device_type": "20",
}


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """Return an empty folder that replaces the package's libraries."""
    monkeypatch.setattr(djinn_native, "_LIBRARIES", tmp_path)
    monkeypatch.setattr(djinn_native, "load", djinn_native.load.__wrapped__)
    return tmp_path


def compile_library(folder, source, minor=MINOR):
    """Compile a fake library for a minor version of PyTorch."""
    target = folder / f"djinn_torch_{minor.replace('.', '_')}.so"
    command = ["c++", "-x", "c++", "-shared", "-fPIC", "-o", target, "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return target


def with_abi(**changes):
    """Return the source of a library that states its ABI."""
    text = ";".join(f"{name}={value}" for name, value in (ABI | changes).items())
    return f'extern "C" const char* djinn_native_abi() {{ return "{text}"; }}\n'


def load_error():
    with pytest.raises(djinn_native.NativeLibraryError) as caught:
        djinn_native.load()
    (line,) = str(caught.value).splitlines()
    version = torch.__version__.partition("+")[0]
    assert f'make TORCH=torch=={version} venv"' in line
    return line


def test_build_without_libraries_is_refused(libraries):
    assert "it has no library at all" in load_error()


def test_other_minor_version_is_refused(libraries, monkeypatch):
    shutil.copy(compile_library(libraries, "", minor="2.13"), libraries / "djinn_torch_2_14.so")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu126")
    assert "2.11.0+cu126: it has libraries for PyTorch 2.13, 2.14 only" in load_error()


def test_missing_symbol_is_named(libraries):
    compile_library(libraries, 'extern "C" void gone_from_torch(); extern "C" void f() { gone_from_torch(); }')
    assert "undefined symbol: gone_from_torch" in load_error()


def test_invalid_library_file_is_refused(libraries):
    (libraries / f"djinn_torch_{MINOR.replace('.', '_')}.so").write_text("text")
    assert "cannot be loaded" in load_error()


def test_library_without_self_test_is_refused(libraries):
    compile_library(libraries, "")
    assert "it has no self-test" in load_error()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"djinn_native": "25.1.0"}, "it was built from djinn-native 25.1.0"),
        ({"torch": "2.11.0"}, "it was built for PyTorch 2.11.0"),
        ({"PrivateUse1": "60"}, "the number PrivateUse1 is 60 there and 61 in this PyTorch"),
        ({"device_type": "13"}, "the number device_type is 13 there and 20 in this PyTorch"),
    ],
)
def test_different_abi_number_is_named(libraries, changes, why):
    difference = 'extern "C" const char* djinn_native_difference() { return ""; }\n'
    compile_library(libraries, with_abi(**changes) + difference)
    assert why in load_error()


def test_difference_found_by_library_is_named(libraries):
    difference = 'extern "C" const char* djinn_native_difference() { return "the layout of IValue: Int"; }\n'
    compile_library(libraries, with_abi() + difference)
    assert "the layout of IValue: Int differs in this PyTorch" in load_error()


def test_different_tensor_layout_is_refused(libraries):
    difference = 'extern "C" const char* djinn_native_difference() { return ""; }\n'
    read = 'extern "C" void djinn_native_read_tensor(void*, long long* fields) { fields[0] = 3; }\n'
    compile_library(libraries, with_abi() + difference + read)
    assert "it reads other values from a tensor" in load_error()


WITHOUT_LIBRARY = """\
import sys

sys.modules["djinn_native"] = None  # as where it is not installed
import djinn, torch

try:
    torch.ones(2, device="remote_accelerator:0")
except djinn.DjinnError as error:
    print(error)
"""


def test_missing_library_message_names_installation(plain_environment):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_LIBRARY],
        env=plain_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "./djinn_native" in done.stdout + done.stderr
    assert "StartupError" in done.stderr or done.stdout
