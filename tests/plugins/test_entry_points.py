"""Entry points that are kept on disk, by when folders of the import path changed."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from djinn_core.registry import entry_points
from djinn_core.registry.entry_points import core_version, installed_points
from djinn_core.system.directories import cache_directory

Install = Callable[..., None]
LONG_AGO = time.time_ns() - 3600 * 10**9


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path, with a distribution, which nothing was kept of."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "site"
    install(
        folder,
        "ant",
        "[djinn]\nant = plugin_ant\n[djinn.integrations]\ntorch = plugin_ant\n[djinnx]\nno = plugin_ant\n",
    )
    monkeypatch.syspath_prepend(str(folder))
    settle(folder)
    return folder


def install(folder: Path, name: str, points: str) -> None:
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(points)


def settle(folder: Path, changed: int = LONG_AGO) -> None:
    """Make the folder one that changed at that time, and nothing in this process remember it."""
    os.utime(folder, ns=(changed, changed))
    entry_points._points_of.cache_clear()


def found(folder: Path) -> list[tuple[str, str]]:
    return [(point.group, point.name) for point in dict(installed_points())[str(folder)]]


def test_a_later_process_opens_no_distribution(place, monkeypatch):
    assert found(place) == [("djinn", "ant"), ("djinn.integrations", "torch")]
    settle(place)
    monkeypatch.setattr(entry_points, "_points_in", lambda *_: pytest.fail("it looked again"))
    monkeypatch.setattr(entry_points.sys, "path", [str(place)])
    assert found(place) == [("djinn", "ant"), ("djinn.integrations", "torch")]


def test_a_folder_that_changes_is_read_again(place):
    found(place)
    install(place, "bee", "[djinn]\nbee = plugin_bee\n")
    settle(place, LONG_AGO + 1)
    assert ("djinn", "bee") in found(place)


def test_a_folder_that_has_just_changed_is_not_kept(place):
    settle(place, time.time_ns())
    found(place)
    settle(place, place.stat().st_mtime_ns)
    (place / "ant-1.0.dist-info" / "entry_points.txt").write_text("[djinn]\nother = plugin_ant\n")
    assert found(place) == [("djinn", "other")]


def test_metadata_that_is_written_in_place_is_not_kept(place):
    (place / "ant-1.0.dist-info").rename(place / "ant.egg-info")
    (place / "ant.egg-info" / "METADATA").rename(place / "ant.egg-info" / "PKG-INFO")
    settle(place)
    assert found(place)[0] == ("djinn", "ant")
    (place / "ant.egg-info" / "entry_points.txt").write_text("[djinn]\nother = plugin_ant\n")
    settle(place)
    assert found(place) == [("djinn", "other")]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": [1]}', b'{"a": [1, [["djinn"]]]}', b"\xff"])
def test_a_file_that_cannot_be_used_is_replaced(place, content):
    found(place)
    (file,) = cache_directory().glob("entry-points-*.json")
    file.write_bytes(content)
    settle(place)
    assert ("djinn", "ant") in found(place)
    assert str(place).encode() in file.read_bytes()


def test_the_version_is_that_of_the_installed_distribution(monkeypatch, tmp_path):
    assert core_version() == importlib.metadata.version("djinn") != ""
    (tmp_path / "djinn-9.9.dist-info").mkdir()
    (tmp_path / "djinn-9.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: djinn\nVersion: 9.9\n\nVersion: 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert core_version.__wrapped__() == "9.9"
    monkeypatch.setattr("sys.path", [])
    assert core_version.__wrapped__() == ""
