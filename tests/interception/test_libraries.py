"""Libraries are told of the device when a program imports them, in either order, and are not imported for it."""

from __future__ import annotations

import logging
import subprocess
import sys
import types

from djinn_core.interception.libraries.on_import import ImportWatch, rebind

HEAVY = (
    "accelerate",
    "diffusers",
    "lightning",
    "safetensors",
    "sentence_transformers",
    "torch._dynamo",
    "transformers",
)
SAFETENSORS_FIRST = """
import sys
import safetensors.torch
import torch, djinn
safetensors.torch.save_file({"a": torch.arange(3.0)}, sys.argv[1])
assert safetensors.torch.load_file(sys.argv[1], device="remote_accelerator:0")["a"].tolist() == [0, 1, 2]
"""


def test_importing_djinn_imports_none_of_them(plain_environment):
    code = f"import djinn, sys; found = set({HEAVY}) & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", code], env=plain_environment, check=True, timeout=100)


def test_a_library_that_was_imported_before_is_told_as_well(python, served_environment, tmp_path):
    done = python.run("-c", SAFETENSORS_FIRST, tmp_path / "a.safetensors", env=served_environment)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_module_is_adapted_after_it_has_run(monkeypatch, tmp_path):
    (tmp_path / "a_library.py").write_text("answer = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    watch = ImportWatch({"a_library": lambda module: setattr(module, "answer", module.answer + 1)})
    monkeypatch.setattr(sys, "meta_path", [watch, *sys.meta_path])
    import a_library

    assert a_library.answer == 2


def test_a_library_that_is_laid_out_otherwise_stays_as_it_is(caplog):
    module = types.ModuleType("a_library")
    with caplog.at_level(logging.WARNING, "djinn"):
        ImportWatch({"a_library": lambda module: module.missing}).adapt(module)
    assert "was not told of the device" in caplog.text


def test_a_function_is_replaced_wherever_its_library_holds_it(monkeypatch):
    here, there, elsewhere = (types.ModuleType(name) for name in ("a_library", "a_library.part", "another"))
    for module in (here, there, elsewhere):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    here.function = there.renamed = elsewhere.function = old = object()
    new = object()
    rebind(old, new, ("a_library",))
    assert (here.function, there.renamed, elsewhere.function) == (new, new, old)
