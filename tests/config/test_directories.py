"""Paths of the user's files on Linux stay what they were: servers and programs find there what earlier versions wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from djinn_core.system.directories import cache_directory, configuration_directory, runtime_directory, state_directory

CASES = [
    (cache_directory, "XDG_CACHE_HOME", ".cache"),
    (state_directory, "XDG_STATE_HOME", ".local/state"),
    (configuration_directory, "XDG_CONFIG_HOME", ".config"),
    (runtime_directory, "XDG_RUNTIME_DIR", ".local/state"),
]


@pytest.mark.parametrize(("directory", "variable", "default"), CASES)
def test_directory_follows_variable_or_default(monkeypatch, tmp_path, directory, variable, default):
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "chosen"))
    assert directory() == tmp_path / "chosen" / "djinn"
    for unset in ("", None):
        monkeypatch.setenv(variable, unset) if unset is not None else monkeypatch.delenv(variable)
        assert directory() == Path.home() / default / "djinn"


def test_shared_runtime_directory_is_used(monkeypatch, tmp_path, recwarn):
    tmp_path.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_directory() == tmp_path / "djinn"
    assert not recwarn.list
