"""Plugin discovery: which plugins are loaded, in which order, and how unusable ones are reported."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from djinn_core.errors import PluginError
from djinn_core.hookspecs import API_VERSION, hookimpl
from djinn_core.registry.discovery import installed
from djinn_core.registry.registry import Registry, load_registry, survey
from djinn_core.registry.selection import Selection
from djinn_core.registry.version import core_version
from djinn_core.settings import resolve

Install = Callable[..., None]
Offered = Callable[[], list[importlib.metadata.EntryPoint]]
Make = Callable[[str, str], ModuleType]
Source = Callable[[str], str]
Logged = Callable[[], list[dict[str, Any]]]

HEAD = "from djinn_core.hookspecs import hookimpl\ndjinn_api_version = '2.0'\n"
BROKEN = {
    "raises": ("raise ImportError('no wings')", "importing it raised ImportError: no wings"),
    "exits": ("raise SystemExit(3)", "importing it raised SystemExit: 3"),
    "old": (
        "djinn_api_version = '1.7'",
        "plugin API version 1.7, and this Djinn has version 2.0. Install a newer version of",
    ),
    "new": (
        "djinn_api_version = '3.0'",
        "plugin API version 3.0, and this Djinn has version 2.0. Install a newer Djinn",
    ),
    "newer": (
        "djinn_api_version = '2.1'",
        "plugin API version 2.1, and this Djinn has version 2.0. Install a newer Djinn",
    ),
    "spelt": ("djinn_api_version = 2", 'its `djinn_api_version` is 2, but must be text such as "2.0"'),
    "silent": ("x = 1", 'Add `djinn_api_version = "2.0"`'),
    "hookless": ("djinn_api_version = '2.0'", "it implements no hook of Djinn. There are: djinn_register_integrations"),
    "unmarked": (
        "djinn_api_version = '2.0'\ndef djinn_register_devices(): return []",
        "Put `@djinn.hooks.hookimpl` above it",
    ),
    "misspelt": (
        HEAD + "@hookimpl\ndef djinn_register_paterns(): return []",
        "there is no hook djinn_register_paterns; did you mean djinn_register_patterns?",
    ),
    "demanding": (
        HEAD + "@hookimpl\ndef djinn_register_patterns(graph): return []",
        "a hook's signature differs from Djinn's",
    ),
    "wrapper": (
        HEAD + "@hookimpl(wrapper=True)\ndef djinn_register_patterns():\n    return (yield)",
        "is a wrapper",
    ),
    "bursts": (
        HEAD + "@hookimpl\ndef djinn_register_patterns(): return [1 / 0]",
        "its djinn_register_patterns raised ZeroDivisionError: division by zero",
    ),
    "generator": (
        HEAD + "@hookimpl\ndef djinn_register_patterns(): yield 1 / 0",
        "its djinn_register_patterns raised ZeroDivisionError: division by zero",
    ),
    "awaited": (
        HEAD + "@hookimpl\nasync def djinn_register_patterns(): return []",
        "but must return a list of Pattern objects",
    ),
    "nameless": (
        HEAD + "@hookimpl\ndef djinn_register_patterns(): return [object()]",
        "returned an instance of object, which is no Pattern: derive its class from djinn.hooks.Pattern",
    ),
    "single": (
        HEAD + "@hookimpl\ndef djinn_register_patterns(): return 7",
        "returned 7, but must return a list of Pattern objects",
    ),
}


def names(registry: Registry) -> list[str]:
    return [pattern.name for pattern in registry.patterns]


def status(registry: Registry) -> dict[str, str]:
    return {row.name: row.status for row in registry.rows}


def error(registry: Registry, name: str) -> str:
    return next(row.error or "" for row in registry.rows if row.name == name and row.status == "failed")


def test_installed_plugins_are_used_in_name_order(
    install: Install, installed_points: Offered, module: Make, pattern: Source
) -> None:
    for name in ("zebra", "ant", "mole"):
        install(name, pattern(name))
    registry = load_registry(
        Selection(), builtins={"own": module("own", pattern("own"))}, entry_points=installed_points()
    )
    assert names(registry) == ["ant", "mole", "own", "zebra"]
    assert [row.name for row in registry.rows] == ["own", "ant", "mole", "zebra"]
    assert registry.owner("patterns", "mole") == "plugin 'mole' (djinn-mole 1.0)"


def test_changed_installation_is_noticed(
    install: Install, site: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> dict[str, str]:
        return {plugin.name: plugin.origin[1] for plugin in installed() if plugin.name in {"ant", "bee"}}

    assert found() == {}
    install("ant", "")
    assert found() == {"ant": "1.0"}
    assert found() == {"ant": "1.0"}
    install("bee", "")
    assert found() == {"ant": "1.0", "bee": "1.0"}
    before = tmp_path_factory.mktemp("before")
    metadata = shutil.copytree(site / "djinn_bee-1.0.dist-info", before / "djinn_bee-2.0.dist-info") / "METADATA"
    metadata.write_text(metadata.read_text().replace("1.0", "2.0"))
    monkeypatch.syspath_prepend(str(before))
    assert found() == {"ant": "1.0", "bee": "2.0"}, "what comes first on the import path"
    shutil.rmtree(site / "djinn_ant-1.0.dist-info")
    assert found() == {"bee": "2.0"}


def test_plugins_are_imported_lazily(install: Install, installed_points: Offered, pattern: Source) -> None:
    install("ant", pattern("ant"))
    load_registry(Selection(plugins=()), builtins={}, entry_points=installed_points())
    load_registry(Selection(disable=frozenset({"ant"})), builtins={}, entry_points=installed_points())
    assert "plugin_djinn_ant" not in sys.modules
    load_registry(Selection(), builtins={}, entry_points=installed_points())
    assert "plugin_djinn_ant" in sys.modules


def test_selection_adds_named_plugins_to_built_in(
    install: Install, installed_points: Offered, module: Make, pattern: Source
) -> None:
    for name in ("ant", "mole", "zebra"):
        install(name, pattern(name))
    given = module("given", pattern("given"))
    selection = Selection(plugins=("zebra", "plugin_djinn_ant", given, given, "own"))
    registry = load_registry(
        selection, builtins={"own": module("own", pattern("own"))}, entry_points=installed_points()
    )
    assert names(registry) == ["ant", "given", "own", "zebra"]
    assert status(registry) == {
        "own": "active",
        "ant": "unselected",
        "given": "active",
        "mole": "unselected",
        "plugin_djinn_ant": "active",
        "zebra": "active",
    }


def test_plugin_instance_is_registered() -> None:
    from djinn.hooks import Observer, hookimpl

    class Watcher(Observer):
        name = "watcher"
        djinn_api_version = "2.0"

        @hookimpl
        def djinn_register_observers(self) -> list[object]:
            return [self]

        def observe(self, event: object) -> None: ...

    watcher = Watcher()
    registry = load_registry(Selection(plugins=(watcher,)), builtins={}, entry_points=[])
    assert registry.observers == (watcher,)
    assert registry.rows[0].label == "plugin 'watcher' (given as an object)"
    with pytest.raises(PluginError, match="it is the class Watcher; pass an instance"):
        load_registry(Selection(plugins=(Watcher,)), builtins={}, entry_points=[])


def test_unhashable_plugin_object_is_registered() -> None:
    class Equal:
        name = "equal"
        djinn_api_version = API_VERSION
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return type(self) is type(other)

        @hookimpl
        def djinn_register_observers(self) -> list[object]:
            return []

    with pytest.raises(TypeError):
        hash(Equal())
    registry = load_registry(Selection(plugins=(Equal(),)), builtins={}, entry_points=[])
    assert status(registry) == {"equal": "active"}


def test_unknown_plugin_name_lists_available(
    install: Install, installed_points: Offered, module: Make, pattern: Source
) -> None:
    install("attention", pattern("attention"))
    with pytest.raises(PluginError) as caught:
        load_registry(
            Selection(plugins=("atention",)),
            builtins={"own": module("own", pattern("own"))},
            entry_points=installed_points(),
        )
    assert "no plugin 'atention'; did you mean 'attention'? Installed: attention. Built in: own." in str(caught.value)


def test_module_named_like_missing_plugin_is_not_used() -> None:
    with pytest.raises(PluginError, match=r"no plugin is installed as 'http', and the module of that name"):
        load_registry(Selection(plugins=("http",)), builtins={}, entry_points=[])


@pytest.mark.parametrize("case", BROKEN)
def test_broken_plugin_warns_once(
    case: str, install: Install, installed_points: Offered, pattern: Source, plugin_events: Logged
) -> None:
    source, message = BROKEN[case]
    install("broken", source, version="2.5")
    install("sound", pattern("sound"))
    registry = load_registry(Selection(), builtins={}, entry_points=installed_points())
    assert names(registry) == ["sound"]
    assert status(registry) == {"broken": "failed", "sound": "active"}
    assert message in error(registry, "broken")
    assert error(registry, "broken").startswith("plugin 'broken' (djinn-broken 2.5) cannot be used: ")
    assert [(entry["level"], entry["plugin"]) for entry in plugin_events()] == [("WARNING", "broken")]


def test_error_of_broken_plugin_names_its_other_release(install: Install, installed_points: Offered) -> None:
    install("broken", "from djinn import what_comes_later", version="26.99.0")
    registry = load_registry(Selection(), builtins={}, entry_points=installed_points())
    assert "djinn-broken 26.99.0 belongs to another release than djinn 26." in error(registry, "broken")
    assert error(registry, "broken").endswith(": install both of one release")


@pytest.mark.parametrize("found_by", ["offered", "installed"])
def test_plugin_pinning_other_release_is_not_imported(
    found_by: str, install: Install, installed_points: Offered
) -> None:
    install("stale", "raise AssertionError('imported')", version="26.10.0", requires="djinn==26.10.0")
    points = installed_points() if found_by == "offered" else None
    registry = load_registry(Selection(), builtins={}, entry_points=points)
    assert error(registry, "stale") == (
        f"plugin 'stale' (djinn-stale 26.10.0) cannot be used: it requires djinn 26.10.0, and djinn {core_version()} is installed. "
        "Install both of one release, from one checkout or from one folder of wheels"
    )
    with pytest.raises(PluginError, match=r"requires djinn 26\.10\.0"):
        load_registry(Selection(plugins=("stale",)), builtins={}, entry_points=points)


@pytest.mark.parametrize("requires", ["djinn>=26", f"djinn=={core_version()}", "djinn-tcp==26.10.0", "djinn (>=26)"])
def test_plugin_that_accepts_this_release_is_loaded(
    requires: str, install: Install, installed_points: Offered, pattern: Source
) -> None:
    install("own", pattern("own"), version="26.10.0", requires=requires)
    assert names(load_registry(Selection(), builtins={}, entry_points=installed_points())) == ["own"]


def test_requested_broken_plugin_raises(install: Install, installed_points: Offered, module: Make) -> None:
    install("broken", "raise ImportError('no wings')")
    for selection in (Selection(plugins=("broken",)), Selection(strict=True)):
        with pytest.raises(PluginError, match="no wings"):
            load_registry(selection, builtins={}, entry_points=installed_points())
    with pytest.raises(PluginError, match="djinn_api_version"):
        load_registry(Selection(), builtins={"own": module("own", "")}, entry_points=[])


def test_duplicate_plugin_name_is_refused(
    install: Install, installed_points: Offered, pattern: Source, plugin_events: Logged
) -> None:
    install("attention", pattern("attention"), distribution="djinn-attention", version="26.11.0")
    install("attention", pattern("other"), distribution="strange-attention", version="0.1")
    registry = load_registry(Selection(), builtins={}, entry_points=installed_points())
    assert names(registry) == ["attention"]
    assert [row.status for row in registry.rows] == ["active", "failed"]
    assert "(djinn-attention 26.11.0) has it, plugin 'attention' (strange-attention 0.1) is refused" in error(
        registry, "attention"
    )
    assert len(plugin_events()) == 1
    with pytest.raises(PluginError, match=r"djinn-attention 26\.11\.0 and strange-attention 0\.1 both offer it"):
        load_registry(Selection(plugins=("attention",)), builtins={}, entry_points=installed_points())


def test_duplicate_pattern_name_is_refused(install: Install, installed_points: Offered, pattern: Source) -> None:
    install("ant", pattern("attention"))
    install("bee", pattern("attention"))
    registry = load_registry(Selection(), builtins={}, entry_points=installed_points())
    assert names(registry) == ["attention"]
    assert "the name 'attention' among patterns is taken twice: plugin 'ant' (djinn-ant 1.0) has it" in error(
        registry, "bee"
    )


def test_built_in_name_cannot_be_taken(
    install: Install, installed_points: Offered, module: Make, pattern: Source
) -> None:
    install("own", pattern("other"))
    registry = load_registry(
        Selection(), builtins={"own": module("own", pattern("own"))}, entry_points=installed_points()
    )
    assert names(registry) == ["own"]
    assert "(djinn-own 1.0) is refused" in error(registry, "own")


def test_disabled_plugins_and_unknown_names(
    install: Install, installed_points: Offered, module: Make, pattern: Source, plugin_events: Logged
) -> None:
    install("ant", pattern("ant"))
    own = {"own": module("own", pattern("own"))}
    selection = Selection(disable=frozenset({"ant", "own", "bee"}))
    registry = load_registry(selection, builtins=own, entry_points=installed_points())
    assert status(registry) == {"own": "disabled", "ant": "disabled"}
    assert [entry["plugin"] for entry in plugin_events()] == ["bee"]


def test_hooks_of_other_processes_are_not_called(module: Make, pattern: Source) -> None:
    both = pattern("both") + "@hookimpl\ndef djinn_register_devices(): raise OSError('this is no server')\n"
    own = {"own": module("own", both)}
    registry = load_registry(Selection(), builtins=own, entry_points=[], kinds={"patterns"})
    assert names(registry) == ["both"]
    assert registry.rows[0].kind == "patterns,devices"
    with pytest.raises(PluginError, match="this is no server"):
        load_registry(Selection(), builtins=own, entry_points=[])


def test_hook_calls_are_logged_on_request(module: Make, pattern: Source, plugin_events: Logged) -> None:
    own = {"own": module("own", pattern("own"))}
    load_registry(Selection(trace=True), builtins=own, entry_points=[])
    assert [(entry["plugin"], entry["hook"]) for entry in plugin_events()] == [("own", "djinn_register_patterns")]
    load_registry(Selection(), builtins=own, entry_points=[])
    assert plugin_events() == []


def test_settings_become_a_selection() -> None:
    environ = {"DJINN_PLUGINS": "a,b", "DJINN_DISABLE": "x", "DJINN_STRICT": "1", "DJINN_TRACE_PLUGINS": "1"}
    selected = Selection.from_settings(resolve({}, environ).settings)
    assert selected == Selection(("a", "b"), frozenset({"x"}), strict=True, trace=True)
    assert Selection.from_settings(resolve({}, {"DJINN_PLUGINS": ""}).settings).plugins == ()
    assert Selection.from_settings(resolve({}, {}).settings).plugins is None


def test_specific_cost_models_come_first(module: Make) -> None:
    source = (
        HEAD + "from djinn.hooks import CostModel\nclass Model(CostModel):\n"
        "    def __init__(self, name, *ops): self.name, self.operations = name, frozenset(ops)\n"
        "    def estimate(self, graph, node, device): return None\n"
        "@hookimpl\ndef djinn_register_cost_models(): return [{}]\n"
    )
    own = module("own", source.format("Model('a-general'), Model('a-mm', 'mm')"))
    given = module("given", source.format("Model('z-mm', 'mm'), Model('z-general')"))
    registry = load_registry(Selection(plugins=(given,)), builtins={"own": own}, entry_points=[])
    assert [model.name for model in registry.cost_models] == ["z-mm", "a-mm", "z-general", "a-general"]


def test_concurrent_loading_imports_plugins_once(
    install: Install, installed_points: Offered, module: Make, pattern: Source
) -> None:
    install("ant", pattern("ant"))
    nested = module(
        "nested",
        pattern("nested").replace(
            "    return [Example()]",
            "    from djinn_core.registry.registry import load_registry\n"
            "    from djinn_core.registry.selection import Selection\n"
            "    load_registry(Selection(plugins=()), builtins={}, entry_points=[])\n"
            "    return [Example()]",
        ),
    )
    points = installed_points()
    with ThreadPoolExecutor(16) as pool:
        loads = [
            pool.submit(load_registry, Selection(), builtins={"nested": nested}, entry_points=points) for _ in range(64)
        ]
    assert {tuple(names(load.result())) for load in loads} == {("ant", "nested")}


def test_survey_collects_failures(install: Install, installed_points: Offered) -> None:
    install("broken", "raise ImportError('no wings')")
    registry, failures = survey(
        Selection(plugins=("broken", "missing"), strict=True), builtins={}, entry_points=installed_points()
    )
    assert sorted(failure.row.name for failure in failures) == ["broken", "missing"]
    assert {row.status for row in registry.rows} == {"failed"}


def test_child_process_repeats_no_warning(install: Install, installed_points: Offered, plugin_events: Logged) -> None:
    install("broken", "raise ImportError('no wings')")
    install("bursts", BROKEN["bursts"][0])
    registry = load_registry(
        Selection(disable=frozenset({"nothing"})), builtins={}, entry_points=installed_points(), started=True
    )
    assert {row.name: row.status for row in registry.rows} == {"broken": "failed", "bursts": "failed"}
    assert [event["plugin"] for event in plugin_events()] == ["bursts"]  # only here has this hook been called
