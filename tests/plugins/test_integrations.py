"""Integrations of installed plugins: loaded when their library is imported, and never in the way of an import."""

from __future__ import annotations

import os
import statistics  # noqa: F401 - it is imported before
import sys
import textwrap
import types

import pytest

LIBRARY = "device = 'cpu'\n"
PLUGIN = """
from djinn.hooks import Integration, hookimpl

djinn_api_version = "2.0"

def adapt(module):
    {adapt}

@hookimpl
def djinn_register_integrations():
    return [Integration("teller", "a_library.part", adapt)]
"""
TELL = "module.device = 'remote'"
SHOW = """
import djinn, sys
assert "plugin_teller" not in sys.modules, "importing djinn has loaded the plugin"
{before}
import a_library.part
print(a_library.part.device, file=sys.stderr)
"""


@pytest.fixture
def install(tmp_path):
    """Return a function that installs the library and a plugin for it, with a body of `adapt` or with other source."""

    def install(adapt=TELL, *, library="a_library", source=PLUGIN):
        (tmp_path / "a_library").mkdir()
        (tmp_path / "a_library" / "__init__.py").write_text("")
        (tmp_path / "a_library" / "part.py").write_text(LIBRARY)
        (tmp_path / "plugin_teller.py").write_text(source.format(adapt=adapt))
        metadata = tmp_path / "djinn_teller-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: djinn-teller\nVersion: 1.0\n")
        groups = f"[djinn.integrations.{library}]\nteller = plugin_teller\n"
        (metadata / "entry_points.txt").write_text(groups)

    return install


@pytest.fixture
def run(python, plain_environment, tmp_path):
    """Return a function that runs a program with the installed plugins and returns its standard error."""

    def run(code="", *, before="", **variables):
        environ = plain_environment | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        }
        text = textwrap.dedent(code) or SHOW.format(before=before)
        done = python.run("-c", text, env=environ | {"CUDA_VISIBLE_DEVICES": ""} | variables)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run


def test_integration_runs_at_import(install, run):
    install()
    assert run().splitlines() == ["remote"]


def test_integration_runs_for_imported_library(install, run):
    install()
    said = run("import a_library.part, djinn, sys\nprint(a_library.part.device, file=sys.stderr)")
    assert said.splitlines() == ["remote"]


def test_raising_integration_does_not_stop_import(install, run):
    install("raise RuntimeError('no wings')")
    said = run()
    assert said.splitlines()[-1] == "cpu"
    assert "no wings" in said
    assert "plugin 'teller' (djinn-teller 1.0)" in said


def test_broken_integration_does_not_stop_import(install, run):
    install(source="raise RuntimeError('no feet')")
    said = run()
    assert said.splitlines()[-1] == "cpu"
    assert "plugin 'teller' (djinn-teller 1.0) cannot be used" in said
    assert "no feet" in said


def test_disabled_integration_does_not_run(install, run):
    install()
    assert run(DJINN_DISABLE="teller").splitlines() == ["cpu"]
    # Also between the import of the library, which loads the plugin, and that of the part that it is about.
    assert run(before="import a_library; djinn.configure(disable=('teller',))").splitlines() == ["cpu"]


def test_plugin_selection_keeps_integrations(install, run):
    install()
    assert run(DJINN_PLUGINS="").splitlines() == ["remote"]
    assert run(before="djinn.configure(plugins=[])").splitlines() == ["remote"]


def test_invalid_settings_do_not_stop_integration(install, run):
    install()
    assert run(DJINN_THREADS="many").splitlines() == ["remote"]


def test_configured_integration_object_runs(install, run):
    install(library="never_imported")
    said = run("""
        import a_library.part, djinn, plugin_teller, sys
        before = a_library.part.device
        djinn.configure(plugins=[plugin_teller])
        djinn.configure(plugins=[plugin_teller])
        print(before, a_library.part.device, file=sys.stderr)
    """)
    assert said.splitlines() == ["cpu remote"]


def test_library_imported_by_client_is_integrated_later(monkeypatch):
    from djinn_client.runtime import attaching

    told = []
    monkeypatch.setattr(attaching, "plugins_by_library", lambda: {"statistics": ("candidates",), "no_such_library": ()})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "djinn_client.runtime.client", types.ModuleType("half imported"))
        attaching._integrate((), sys.modules["statistics"])  # as in the middle of the client's import
    monkeypatch.setattr(attaching, "_integrate", lambda *given: told.append(given))
    monkeypatch.setattr(attaching.port, "sink", attaching._SinkStub())
    attaching._load()
    assert told == [(("candidates",), sys.modules["statistics"])]
