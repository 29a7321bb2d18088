"""Entry points and plugin modules made for one test."""

from __future__ import annotations

import importlib.metadata
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from djinn_core.registry.kinds import KINDS

PATTERN = """
from djinn.hooks import Pattern, hookimpl
djinn_api_version = "2.0"
class Example(Pattern):
    name = "{name}"
    operations = frozenset({{"mm"}})
    def match(self, graph, candidates):
        return []
@hookimpl
def djinn_register_patterns():
    return [Example()]
"""


@pytest.fixture
def pattern() -> Callable[[str], str]:
    """Return the source of a plugin with one pattern of the given name."""
    return lambda name: PATTERN.format(name=name)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder like site-packages that is on the path during the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def install(site: Path) -> Callable[..., None]:
    """Return a function that installs a plugin module and the metadata of a distribution with its entry point."""

    def install(name: str, source: str, distribution: str = "", version: str = "1.0", requires: str = "") -> None:
        distribution = distribution or f"djinn-{name}"
        module = f"plugin_{distribution.replace('-', '_')}"
        (site / f"{module}.py").write_text(textwrap.dedent(source))
        metadata = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        required = f"Requires-Dist: {requires}\n" if requires else ""
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{required}"
        )
        kinds = [kind.name for kind in KINDS if f"def {kind.hook}(" in source] or ["patterns"]
        groups = "".join(f"[djinn.{kind}]\n{name} = {module}\n" for kind in kinds)
        (metadata / "entry_points.txt").write_text(groups)

    return install


@pytest.fixture
def installed_points(site: Path) -> Callable[[], list[importlib.metadata.EntryPoint]]:
    """Return a function that returns the entry points of the plugins that the test installed."""

    def installed_points() -> list[importlib.metadata.EntryPoint]:
        found = importlib.metadata.distributions(path=[str(site)])
        return [point for distribution in found for point in distribution.entry_points]

    return installed_points


@pytest.fixture
def module() -> Callable[[str, str], ModuleType]:
    """Return a function that makes a module from source. The module cannot be imported by name."""

    def module(name: str, source: str) -> ModuleType:
        made = ModuleType(name)
        exec(textwrap.dedent(source), made.__dict__)
        return made

    return module


@pytest.fixture
def plugin_events(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that returns the structured events of the logger `plugins` since its last call."""

    def plugin_events() -> list[dict[str, Any]]:
        records = [record for record in caplog.records if record.name == "djinn.plugins"]
        caplog.clear()
        return [{"level": record.levelname, **record.djinn} for record in records]

    return plugin_events
