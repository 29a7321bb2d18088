"""Sources of settings and their precedence, and settings that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from djinn_core.errors import ConfigurationError
from djinn_core.settings import NAMES, config_file, resolve, unknown_variables
from djinn_core.system.directories import configuration_directory


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('servers = ["tcp://file:1"]\nthreads = 3\ntoken = "in-file"\n')
    return path


def test_setting_sources_have_documented_precedence(file):
    found = resolve({"servers": ["tcp://argument:1"]}, {"DJINN_SERVERS": "tcp://e:1", "DJINN_THREADS": "2"}, file)
    assert found.settings.servers == ("tcp://argument:1",)
    assert found.settings.threads == 2
    assert found.settings.token == "in-file"
    assert found.settings.scheduler == "sequential"
    assert found.origins["servers"] == "argument"
    assert found.origins["threads"] == "environment DJINN_THREADS"
    assert found.origins["token"] == f"file {file}"
    assert found.origins["scheduler"] == "default"
    assert found.file == file


def test_every_setting_has_an_origin_and_a_row():
    found = resolve({}, {})
    assert tuple(row.name for row in found.rows()) == NAMES
    assert set(found.origins.values()) == {"default"}


def test_setting_rows_are_readable():
    rows = resolve({"connection_file": "/srv/djinn.json", "threads": 2}, {}).rows()
    assert {("connection_file", "/srv/djinn.json"), ("threads", "2")} <= {(row.name, row.value) for row in rows}


def test_empty_plugins_differ_from_unset():
    assert resolve({}, {}).settings.plugins is None
    assert resolve({}, {"DJINN_PLUGINS": ""}).settings.plugins == ()
    assert resolve({}, {"DJINN_PLUGINS": "a, b"}).settings.plugins == ("a", "b")
    assert resolve({"plugins": [ConfigurationError]}, {}).settings.plugins == (ConfigurationError,)


def test_default_configuration_file_path():
    assert config_file({"DJINN_CONFIG": "~/x.toml"}) == Path("~/x.toml").expanduser()
    assert config_file({}) == configuration_directory() / "config.toml"


@pytest.mark.parametrize(
    ("overrides", "environ", "message"),
    [
        ({"servrs": "x"}, {}, r"no setting `servrs` \(argument\): did you mean `servers`\?"),
        ({"wholly_unlike": 1}, {}, "the settings are plugins, "),
        ({}, {"DJINN_THREADS": "many"}, "`threads` must be a whole number.*'many'.*environment DJINN_THREADS"),
        ({"threads": 0}, {}, "1 or more"),
        ({"parallel_connections": 17}, {}, "16 at most"),
        ({"threads": True}, {}, "whole number"),
        ({"connect_timeout": "nan"}, {}, "seconds above 0"),
        ({"start_timeout": 1e7}, {}, "at most 1,000,000"),
        ({"start_timeout": -1}, {}, "seconds above 0"),
        ({"strict": "perhaps"}, {}, "true or false"),
        ({"executor": "thread"}, {}, "'process' or 'inline'"),
        ({"servers": [1]}, {}, "list of names"),
        ({"plugins": 3}, {}, "list of names, modules or objects"),
        ({"device": 3}, {}, "must be text"),
        ({"connection_file": 3}, {}, "must be a path"),
        ({}, {"DJINN_CONFIG": "/nonexistent.toml"}, "no configuration file /nonexistent.toml"),
    ],
)
def test_invalid_setting_names_source(overrides, environ, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve(overrides, environ)


def test_unreadable_configuration_file_is_named(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("servers = [")
    with pytest.raises(ConfigurationError, match=f"{file} cannot be read"):
        resolve({}, {}, file)


def test_unknown_setting_in_file_raises(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("tokn = 'x'")
    with pytest.raises(ConfigurationError, match=f"no setting `tokn` .file {file}.: did you mean `token`"):
        resolve({}, {}, file)


def test_setting_rows_hide_token():
    found = resolve({"token": "hush"}, {})
    assert "hush" not in repr(found)
    assert "hush" not in str(found.rows())
    assert found.settings.token == "hush"
    with pytest.raises(ConfigurationError) as refusal:
        resolve({"token": b"hush"}, {})
    assert "hush" not in str(refusal.value)


def test_unknown_environment_variables_are_reported():
    environ = {"DJINN_TOKN": "x", "DJINN_CONFIG": "y", "DJINN_SERVERS": "z", "DJINN_XY": "", "PATH": ""}
    assert unknown_variables(environ) == {"DJINN_TOKN": "DJINN_TOKEN", "DJINN_XY": ""}


@pytest.mark.parametrize("pins", ["vision*=1, text=0", {"vision*": 1, "text": "0"}, ["vision*=1", "text=0"]])
def test_pins_are_parsed_in_order(pins):
    assert resolve({"pins": pins}, {}).settings.pins == (("vision*", "1"), ("text", "0"))
    with pytest.raises(ConfigurationError, match="pattern=device"):
        resolve({"pins": "vision*"}, {})
