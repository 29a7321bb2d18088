"""Names of `djinn.profiler`, with the package djinn-profiler and without it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import djinn
import djinn.profiler
from djinn_core.cli import main
from djinn_core.errors import PluginError

ROOT = Path(__file__).parents[2]


class MissingPackageFinder:
    """An import hook of a machine without the profiler package."""

    def find_spec(self, name, path=None, target=None):
        if name == "djinn_profiler":
            raise ModuleNotFoundError(name=name)


@pytest.fixture
def without_package():
    """Hide the profiler package, as if no name of it had been imported."""
    monkeypatch = pytest.MonkeyPatch()
    for name in [name for name in sys.modules if name.startswith("djinn_profiler.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "djinn_profiler", raising=False)
    monkeypatch.setattr(sys, "meta_path", [MissingPackageFinder(), *sys.meta_path])
    for module in (djinn, djinn.profiler):
        for name in djinn.profiler.__all__:
            monkeypatch.setitem(vars(module), name, None)
            del vars(module)[name]
    yield monkeypatch
    monkeypatch.undo()


def test_djinn_exports_profiler_functions():
    from djinn_profiler.timeline.profiling import profile
    from djinn_profiler.verification.verifying import verify

    assert djinn.profile is djinn.profiler.profile is profile
    assert djinn.verify is djinn.profiler.verify is verify


@pytest.mark.usefixtures("without_package")
def test_call_without_profiler_package_names_it():
    from djinn import profile

    with pytest.raises(
        PluginError, match=r"`djinn\.profiler\.profile` is in the package djinn-profiler.*`pip install (\S+)`"
    ) as raised:
        profile(ops=True)
    assert (ROOT / "plugins/profiler/pyproject.toml").exists()
    assert "./plugins/profiler" in str(raised.value)


@pytest.mark.usefixtures("without_package")
def test_command_without_profiler_package_names_it():
    result = CliRunner().invoke(main, ["explain", "--format", "html", str(ROOT / "examples" / "generate.py")])
    assert result.exit_code == 1
    assert (
        "needs the package djinn-profiler, which is not installed: run `pip install ./plugins/profiler`"
        in result.output
    )


@pytest.mark.usefixtures("without_package")
def test_class_without_profiler_package_names_it():
    missing = djinn.profiler.Timeline
    assert not isinstance(3, missing)
    with pytest.raises(PluginError, match=r"`djinn\.profiler\.Timeline` is in the package"):
        missing()


def test_profiler_package_installed_later_is_used(without_package):
    from djinn import profile

    without_package.undo()
    assert profile().__class__ is djinn.profiler.profile().__class__


def test_run_with_trace_needs_profiler_package(python, plain_environment, tmp_path):
    (tmp_path / "djinn_profiler.py").write_text("raise ModuleNotFoundError(name=__name__)")
    (tmp_path / "script.py").write_text("print('it ran')")
    environ = plain_environment | {"PYTHONPATH": str(tmp_path)}
    command = ("-m", "djinn_core.cli", "run", "--trace", str(tmp_path / "trace.json"), str(tmp_path / "script.py"))
    done = python.run(*command, env=environ)
    assert done.returncode == 1
    assert "it ran" not in done.stdout
    assert "pip install ./plugins/profiler" in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_profiler_names_raise_attribute_error():
    with pytest.raises(AttributeError, match=r"'djinn' has no attribute 'no_such_name'"):
        _ = djinn.no_such_name
    with pytest.raises(AttributeError, match=r"'djinn.profiler' has no attribute 'no_such_name'"):
        _ = djinn.profiler.no_such_name
    assert not hasattr(djinn, "__no_such_name__")
