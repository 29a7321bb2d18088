"""Modules are adapted when a program imports them, from wherever they come, and are not imported for it."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import logging
import sys
import threading
import types

import pytest

from djinn_client.interception.on_import import adapt_on_import, rebind


class MemoryFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A module finder, as in frozen programs and notebooks. Each module is a text that runs after `pause` seconds."""

    def __init__(self, texts, pause=lambda: None):
        self.texts, self.pause = texts, pause

    def find_spec(self, fullname, path, target=None):
        if fullname in self.texts:
            return importlib.util.spec_from_loader(fullname, self, is_package="." not in fullname)
        return None

    def exec_module(self, module):
        self.pause()
        exec(self.texts[module.__name__], vars(module))


@pytest.fixture
def add_modules(monkeypatch):
    """Return a function that makes modules in memory importable until the test ends."""

    def add_modules(texts, **options):
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, MemoryFinder(texts, **options)])
        for name in texts:
            monkeypatch.delitem(sys.modules, name, raising=False)

    before = set(sys.modules)
    yield add_modules
    for name in set(sys.modules) - before:
        sys.modules.pop(name)


def add_one(module):
    module.answer += 1


def test_module_is_adapted_after_import(monkeypatch, tmp_path):
    (tmp_path / "a_library_in_a_file.py").write_text("answer = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    adapt_on_import({"a_library_in_a_file": add_one})
    import a_library_in_a_file

    assert a_library_in_a_file.answer == 2


def test_module_of_custom_finder_is_adapted(add_modules):
    add_modules({"in_memory": "answer = 1\nimport in_memory.part", "in_memory.part": "answer = 10"})
    adapt_on_import({"in_memory": add_one, "in_memory.part": add_one})
    library = importlib.import_module("in_memory")
    assert (library.answer, library.part.answer) == (2, 11)


def test_imported_module_is_adapted_at_once(add_modules):
    add_modules({"imported_before": "answer = 1"})
    library = importlib.import_module("imported_before")
    adapt_on_import({"imported_before": add_one})
    assert library.answer == 2


def test_module_imported_by_other_thread_is_awaited(add_modules):
    begun, go_on = threading.Event(), threading.Event()
    add_modules({"half_imported": "answer = 1"}, pause=lambda: (begun.set(), go_on.wait(60)))
    thread = threading.Thread(target=importlib.import_module, args=("half_imported",))
    thread.start()
    assert begun.wait(60)
    adapting = threading.Thread(target=adapt_on_import, args=({"half_imported": add_one},))
    adapting.start()
    adapting.join(0.2)  # were it not to wait, it would look at half a module now
    go_on.set()
    thread.join(60)
    adapting.join(60)
    assert sys.modules["half_imported"].answer == 2


def test_module_is_adapted_after_failed_import(add_modules):
    texts = {"failing_at_first": "answer = 1 / 0"}
    add_modules(texts)
    adapt_on_import({"failing_at_first": add_one})
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("failing_at_first")
    texts["failing_at_first"] = "answer = 1"
    assert importlib.import_module("failing_at_first").answer == 2


def test_failing_adapter_does_not_stop_import(add_modules, caplog):
    add_modules({"laid_out_otherwise": "answer = 1"})
    adapt_on_import({"laid_out_otherwise": lambda module: module.missing}, by="plugin 'one' (djinn-one 1.0)")
    adapt_on_import({"laid_out_otherwise": add_one}, by="plugin 'two' (djinn-two 1.0)")
    with caplog.at_level(logging.WARNING, "djinn"):
        assert importlib.import_module("laid_out_otherwise").answer == 2
    assert "could not be adapted to the device" in caplog.text
    assert "djinn-one" in caplog.text
    assert "djinn-two" not in caplog.text


def test_function_is_replaced_in_all_modules(monkeypatch):
    here, there, elsewhere = (types.ModuleType(name) for name in ("a_library", "a_library.part", "another"))
    for module in (here, there, elsewhere):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    here.function = there.renamed = elsewhere.function = old = object()
    new = object()
    rebind(old, new, ("a_library",))
    assert (here.function, there.renamed, elsewhere.function) == (new, new, old)


def test_compile_without_integrations_names_package(python, plain_environment):
    script = (
        "from importlib.metadata import EntryPoints\nfrom djinn_client.interception import install\n"
        "install.entry_points = lambda group: EntryPoints()\n"
        "import djinn\nimport torch._inductor.compile_fx"
    )
    assert "pip install ./plugins/integrations" in python.run("-c", script, env=plain_environment).stderr
