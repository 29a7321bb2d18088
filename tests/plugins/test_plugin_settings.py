"""Settings that plugins have of their own: where values come from, what is refused, and that executors have them, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import attrs
import pytest
from click.testing import CliRunner

from djinn_client.runtime.reconfiguring import executor_plugins_differ
from djinn_core.cli import main
from djinn_core.errors import ConfigurationError, PluginError
from djinn_core.hookspecs import hookimpl
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_core.settings import HIDDEN, PluginSetting, Settings, resolve
from djinn_server.launch.executor_config import ExecutorConfig
from djinn_server.launch.process import ExecutorProcess

SETTINGS_PLUGIN = """
import attrs
from pathlib import Path
from djinn import hooks
from djinn.hooks import hookimpl

djinn_api_version = "2.0"

@attrs.frozen
class Settings:
    rows: int = attrs.field(default=4, validator=attrs.validators.ge(1))
    names: tuple[str, ...] = ()
    key: str = attrs.field(default="", repr=False)

djinn_settings = Settings

@attrs.frozen
class Pattern(hooks.Pattern):
    rows: int
    name: str = "with_settings"
    operations: frozenset = frozenset({"mm"})
    def match(self, graph, candidates):
        return []

@hookimpl
def djinn_register_patterns(settings):
    return [Pattern(settings.rows)]
"""


@pytest.fixture
def registry_of(install, installed_points):
    """Return a function that opens the registry with the plugin `kv_rows` and with these settings."""
    install("kv_rows", SETTINGS_PLUGIN)

    def registry_of(environ=None, file=None, **overrides):
        settings = resolve(overrides, environ or {}, file).settings
        return load_registry(
            Selection.from_settings(settings),
            builtins=builtin_plugins(),
            entry_points=installed_points(),
            kinds={"patterns"},
        )

    return registry_of


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "config.toml"
        path.write_text(text)
        return path

    return write


def rows_of(registry):
    (pattern,) = [p for p in registry.patterns if p.name == "with_settings"]
    return pattern.rows, {row.name: (row.value, row.origin) for row in registry.plugin_settings}["plugins.kv_rows.rows"]


def test_plugin_setting_sources_have_documented_precedence(registry_of, file):
    path = file("[plugins.kv_rows]\nrows = 5\n")
    environ = {"DJINN_PLUGIN_KV_ROWS_ROWS": "6"}
    given = {"kv_rows": {"rows": 7}}
    assert rows_of(registry_of()) == (4, ("4", "default"))
    assert rows_of(registry_of(file=path)) == (5, ("5", f"file {path}"))
    assert rows_of(registry_of(environ, path)) == (6, ("6", "environment DJINN_PLUGIN_KV_ROWS_ROWS"))
    assert rows_of(registry_of(environ, path, plugin_settings=given)) == (7, ("7", "argument"))


def test_plugins_table_may_have_names_and_setting_tables(registry_of, file):
    path = file('[plugins]\nnames = ["kv_rows"]\n[plugins.kv_rows]\nrows = 5\n')
    assert resolve({}, {}, path).settings.plugins == ("kv_rows",)
    assert rows_of(registry_of(file=path))[0] == 5
    with pytest.raises(ConfigurationError, match=r"`plugins.rows` \(file .*\[plugins.NAME\]"):
        resolve({}, {}, file("[plugins]\nrows = 5\n"))
    with pytest.raises(ConfigurationError, match=r"in a table \[plugins.NAME\]"):
        resolve({}, {}, file("plugin_settings = 5\n"))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"rwos": 5}, r"has no setting `rwos` \(argument\): did you mean `rows`\?"),
        ({"rows": "many"}, r"`plugins.kv_rows.rows` must be a whole number, and not 'many' \(argument\)"),
        ({"rows": 0}, r"`plugins.kv_rows.rows` is refused: 'rows' must be >= 1: 0, and not 0"),
        ({"names": 3}, r"`plugins.kv_rows.names` must be a list of names"),
    ],
)
def test_invalid_plugin_settings_are_refused(registry_of, table, said):
    with pytest.raises(ConfigurationError, match=said):
        registry_of(plugin_settings={"kv_rows": table})


def test_invalid_variable_is_named(registry_of):
    with pytest.raises(ConfigurationError, match=r"\(environment DJINN_PLUGIN_KV_ROWS_ROWS\)"):
        registry_of({"DJINN_PLUGIN_KV_ROWS_ROWS": "x"})


def test_secret_settings_are_hidden(registry_of):
    registry = registry_of(plugin_settings={"kv_rows": {"key": "very secret"}})
    assert {row.name: row.value for row in registry.plugin_settings}["plugins.kv_rows.key"] == HIDDEN
    with pytest.raises(ConfigurationError) as error:
        registry_of(plugin_settings={"kv_rows": {"key": 12345}})
    assert "12345" not in str(error.value)
    assert "secret" not in repr(resolve({"plugin_settings": {"kv_rows": {"key": "secret"}}}, {}).settings)


def test_unknown_plugin_settings_warn(registry_of, plugin_events):
    registry_of({"DJINN_PLUGIN_KV_ROWS_RWOS": "5"}, plugin_settings={"kv_row": {"rows": 1}})
    said = {event["setting"]: event["meant"] for event in plugin_events()}
    assert said == {
        "DJINN_PLUGIN_KV_ROWS_RWOS": "DJINN_PLUGIN_KV_ROWS_ROWS",
        "[plugins.kv_row] (argument)": "[plugins.kv_rows]",
    }


def test_settings_of_disabled_plugin_are_accepted(registry_of, plugin_events):
    registry_of({"DJINN_PLUGIN_KV_ROWS_ANYTHING": "5"}, disable="kv_rows", plugin_settings={"kv_rows": {"x": 1}})
    assert not plugin_events()


def test_plugin_without_settings_refuses_values():
    with pytest.raises(ConfigurationError, match="'cpu' has no settings"):
        load_registry(
            Selection(plugins=(), plugin_settings=(PluginSetting("cpu", "x", 1, "argument"),)),
            builtins=builtin_plugins(),
        )


class DeclaringPlugin:
    """A plugin whose settings class is `declared`."""

    name = "declaring"
    djinn_api_version = "2.0"

    def __init__(self, declared):
        self.djinn_settings = declared
        self.seen = None

    @hookimpl
    def djinn_register_patterns(self, settings):
        self.seen = settings
        return []


def load_settings(declared, **given):
    plugin = DeclaringPlugin(declared)
    settings = Settings(plugin_settings={"declaring": given})
    chosen = Selection((plugin,), plugin_settings=settings.plugin_settings)
    load_registry(chosen, builtins={}, kinds={"patterns"})
    return plugin.seen


@attrs.frozen
class EveryType:
    """A settings class with one setting of each type."""

    flag: bool = False
    share: float = 0.5
    file: Path | None = None
    names: tuple[str, ...] = ()
    way: Literal["fast", "small"] = "fast"
    even: int = attrs.field(default=2, converter=int)


def test_setting_types_are_parsed():
    text = load_settings(EveryType, flag="yes", share="0.25", file="~/x", names="a,b", way="small", even="4")
    assert text == EveryType(True, 0.25, Path("~/x").expanduser(), ("a", "b"), "small", 4)
    assert load_settings(EveryType, flag=True, share=1, file="", names=["a"]) == EveryType(True, 1.0, None, ("a",))
    with pytest.raises(ConfigurationError, match="must be 'fast' or 'small', and not 'slow'"):
        load_settings(EveryType, way="slow")


@attrs.frozen
class WithoutDefault:
    """A settings class that cannot be constructed without arguments."""

    rows: int


@attrs.frozen
class OfAnOddType:
    """A settings class with a type that cannot be parsed from text."""

    rows: complex = 1j


@pytest.mark.parametrize(
    ("declared", "said"),
    [(WithoutDefault, "has no default"), (OfAnOddType, "has the type .*complex"), (dict, "must be an attrs class")],
)
def test_unsupported_settings_class_raises(declared, said):
    with pytest.raises(PluginError, match=said):
        load_settings(declared)


def test_doctor_shows_plugin_settings(tmp_path):
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "DJINN_PLUGIN_ADAPTIVE_LEAST": "0.1"}
    found = json.loads(CliRunner().invoke(main, ["doctor", "--json"], env=environ).output)
    row = {"name": "plugins.adaptive.least", "value": "0.1", "origin": "environment DJINN_PLUGIN_ADAPTIVE_LEAST"}
    assert row in found["settings"]


CLUSTER = '[[machines]]\nname = "node"\ndevices = 2\nmemory_gib = 1\ntflops = 1\ngbs = 100\nlink = { gbs = 100 }\n'


def test_executor_receives_plugin_settings(tmp_path):
    (tmp_path / "cluster.toml").write_text("network = { gbs = 10 }\n" + CLUSTER)
    given = Settings(plugin_settings={"simulated": {"cluster": tmp_path / "cluster.toml"}}).plugin_settings
    with ExecutorProcess(ExecutorConfig("simulated:1", plugins=Selection(plugin_settings=given))) as executor:
        assert executor.wait_ready(60).device.id == "simulated:1"


def test_non_json_values_are_sent_as_text():
    assert PluginSetting("a", "b", Path("/x"), "argument").sendable().value == "/x"
    for plain in (1, 0.5, True, None, "x", ["a"], ("a", "b")):
        assert PluginSetting("a", "b", plain, "argument").sendable().value == plain


@pytest.mark.parametrize(
    ("kind", "used"), [("compilers", Settings(compilers="inductor")), ("operators", Settings(operators="some"))]
)
def test_changed_executor_plugin_settings_need_new_session(install, registry_of, kind, used):
    install(
        "speedy",
        f"{SETTINGS_PLUGIN}\n@hookimpl\ndef djinn_register_{kind}():\n    return []\n".replace("with_settings", "fast"),
    )
    before, after = registry_of(), registry_of(plugin_settings={"kv_rows": {"rows": 9}})
    assert before.plugin_settings != after.plugin_settings
    assert not executor_plugins_differ(before, after, used)  # it has patterns only
    other = registry_of(plugin_settings={"speedy": {"rows": 9}})
    assert executor_plugins_differ(before, other, used)
    assert not executor_plugins_differ(before, other, Settings())
