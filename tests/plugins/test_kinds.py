"""Kinds are entry-point groups, each loaded when it is asked for; the contract may grow under plugins that were built before."""

from __future__ import annotations

import ast
import importlib
import io
import sys
import tokenize
from pathlib import Path

import pytest

from djinn_core.errors import PluginError
from djinn_core.hookspecs import API_VERSION
from djinn_core.registry import contract, discovery
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.kinds import CLIENT_KINDS, EVERY_KIND, KINDS
from djinn_core.registry.registry import load_registry, open_registry
from djinn_core.registry.selection import Selection

BOTH = """
from djinn.hooks import Event, Observer, Pattern, hookimpl

djinn_api_version = "2.0"


class Watcher(Observer):
    name = "both_watcher"

    def observe(self, event: Event) -> None:
        pass


class Nothing(Pattern):
    name = "both_pattern"
    operations = frozenset({"mm"})

    def match(self, graph, candidates):
        return []


@hookimpl
def djinn_register_observers():
    return [Watcher()]


@hookimpl
def djinn_register_patterns():
    return [Nothing()]
"""
TEMPLATE = Path(__file__).parents[2] / "templates" / "plugin"


def open_installed(installed_points, kinds=CLIENT_KINDS, **selection):
    return open_registry(
        Selection(**selection), builtins=builtin_plugins(), kinds=kinds, entry_points=installed_points()
    )


def names(objects):
    return {one.name for one in objects}


def test_plugin_kinds_are_loaded_lazily(install, installed_points, pattern):
    install("late", pattern("late"))
    install("watching", BOTH.replace("both", "watching"))
    registry = open_installed(installed_points)
    assert "plugin_djinn_late" not in sys.modules
    assert names(registry.observers) == {"watching_watcher"}
    assert "plugin_djinn_watching" in sys.modules
    assert "plugin_djinn_late" not in sys.modules
    assert {row.name: row.status for row in registry.rows if row.name == "late"} == {"late": "active"}
    assert names(registry.patterns) == {"late", "watching_pattern"}
    assert "plugin_djinn_late" in sys.modules
    assert registry.owner("patterns", "late") == "plugin 'late' (djinn-late 1.0)"
    assert registry.patterns is registry.patterns


def test_failure_in_lazily_loaded_kind_warns_once(install, installed_points, pattern, plugin_events):
    install("both", BOTH.replace("return [Nothing()]", "raise ValueError('no patterns today')"))
    install("sound", pattern("sound"))
    registry = open_installed(installed_points)
    assert names(registry.observers) == {"both_watcher"}
    assert plugin_events() == []
    assert names(registry.patterns) == {"sound"}
    assert names(registry.patterns) == {"sound"}
    assert [entry["plugin"] for entry in plugin_events()] == ["both"]
    assert names(registry.observers) == {"both_watcher"}, "what it registered before is in use"
    assert {row.name: row.status for row in registry.rows if row.name in {"both", "sound"}} == {
        "both": "failed",
        "sound": "active",
    }


@pytest.mark.parametrize("selection", [{"plugins": ("both",)}, {"strict": True}], ids=str)
def test_requested_plugin_fails_at_once(install, installed_points, selection):
    install("both", BOTH.replace("return [Nothing()]", "raise ValueError('no patterns today')"))
    with pytest.raises(PluginError, match="no patterns today"):
        open_installed(installed_points, **selection)


def test_plugin_name_selects_all_its_kinds(install, installed_points, pattern):
    install("both", BOTH)
    install("other", pattern("other"))
    chosen = open_installed(installed_points, plugins=("both",))
    assert (names(chosen.observers), names(chosen.patterns)) == ({"both_watcher"}, {"both_pattern"})
    left = open_installed(installed_points, disable=frozenset({"both"}))
    assert (names(left.observers), names(left.patterns)) == (set(), {"other"})
    assert {row.name: row.status for row in left.rows if row.name == "both"} == {"both": "disabled"}


def test_name_of_two_distributions_is_refused(install, installed_points, pattern):
    install("twice", pattern("twice"), distribution="ant")
    install("twice", BOTH.replace("djinn_register_patterns", "nothing"), distribution="bee")
    registry = open_installed(installed_points)
    assert names(registry.patterns) == {"twice"}
    assert registry.observers == ()
    (error,) = [row.error for row in registry.rows if row.status == "failed"]
    assert "'twice' is taken twice: plugin 'twice' (ant 1.0) has it, plugin 'twice' (bee 1.0) is refused" in error
    with pytest.raises(PluginError, match=r"ant 1\.0 and bee 1\.0 both offer it"):
        open_installed(installed_points, plugins=("twice",))


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ("[djinn.observers]\nboth = plugin_djinn_both\n", "no entry point in the group `djinn.patterns`. Add one"),
        (
            "[djinn.devices]\nboth = plugin_djinn_both\n",
            "its entry point in the group `djinn.devices` is plugin_djinn_both, which has no djinn_register_devices",
        ),
    ],
)
def test_entry_point_groups_must_match_hooks(install, installed_points, site, groups, said):
    install("both", BOTH)
    (site / "djinn_both-1.0.dist-info" / "entry_points.txt").write_text(groups)
    registry = load_registry(Selection(), builtins={}, entry_points=installed_points())
    (error,) = [row.error for row in registry.rows if row.status == "failed"]
    assert said in error


def test_other_entry_point_groups_are_ignored(install, installed_points, site):
    install("both", BOTH)
    (site / "djinn_both-1.0.dist-info" / "entry_points.txt").write_text(
        "[djinn]\nboth = x\n[djinn.unknown]\nboth = x\n[djinning.patterns]\nboth = x\n"
    )
    assert discovery.installed(installed_points()) == ()


@pytest.fixture(params=sorted(EVERY_KIND))
def example(request, monkeypatch):
    """Return the plugin that `djinn plugins new` writes for a kind, and the kind."""
    kind = next(one for one in KINDS if one.name == request.param)
    own = TEMPLATE / "kinds" / kind.name
    monkeypatch.syspath_prepend(own if (own / "djinn_example").exists() else TEMPLATE)
    for name in [name for name in sys.modules if name.partition(".")[0] == "djinn_example"]:
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module("djinn_example"), kind
    for name in [name for name in sys.modules if name.partition(".")[0] == "djinn_example"]:
        del sys.modules[name]


def load_kind(module, kind):
    registry = load_registry(Selection(plugins=(module,)), builtins={}, entry_points=[], kinds={kind.name})
    return getattr(registry, kind.name)


def test_new_member_with_default_keeps_plugins_valid(example, monkeypatch):
    module, kind = example
    monkeypatch.setattr(kind.base, "came_later", 3, raising=False)
    monkeypatch.setattr(
        kind.base, "__annotations__", {**vars(kind.base).get("__annotations__", {}), "came_later": "int"}
    )
    monkeypatch.setattr(kind.base, "asked_later", lambda self: "as before", raising=False)
    (one,) = load_kind(module, kind)
    assert (one.came_later, one.asked_later()) == (3, "as before")


def test_plugins_of_compatible_api_versions_load(example, monkeypatch):
    module, kind = example
    major, minor = map(int, API_VERSION.split("."))
    monkeypatch.setattr(contract, "API_VERSION", f"{major}.{minor + 1}")
    assert load_kind(module, kind)
    monkeypatch.setattr(contract, "API_VERSION", f"{major + 1}.0")
    with pytest.raises(
        PluginError,
        match=rf"version {major}\.{minor}, and this Djinn has version {major + 1}\.0\. Install a newer version of the plugin",
    ):
        load_kind(module, kind)
    monkeypatch.setattr(contract, "API_VERSION", API_VERSION)
    monkeypatch.setattr(module, "djinn_api_version", f"{major}.{minor + 1}")
    with pytest.raises(
        PluginError,
        match=rf"version {major}\.{minor + 1}, and this Djinn has version {major}\.{minor}\. Install a newer Djinn",
    ):
        load_kind(module, kind)


def lines_of_code(text):
    """Return the number of lines that are neither blank nor comments nor docstrings."""
    outside = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for one in tokens if one.type not in outside for line in range(one.start[0], one.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_templates_have_at_most_twenty_lines(example):
    module, _ = example
    assert lines_of_code(Path(module.__file__).read_text()) <= 20
