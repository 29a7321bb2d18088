"""Calibrations of devices on disk."""

from __future__ import annotations

import pytest

from djinn_client.runtime.planning.calibrations import calibration_of, store_calibration
from djinn_client.runtime.planning.run_pipeline import topology_of
from djinn_core.wire.messages import DeviceInfo

HERE = DeviceInfo("cpu:0", "cpu", "a processor", threads=1, torch="2.13.0")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_calibration_key_includes_device_and_versions(cache):
    assert calibration_of(HERE) is None
    file = store_calibration(HERE, {"a": {"x": 1}})
    assert file.is_relative_to(cache)
    store_calibration(HERE, {"b": {"y": 2}})
    assert calibration_of(HERE).models == {"a": {"x": 1}, "b": {"y": 2}}
    assert topology_of(HERE).devices[0].calibration == calibration_of(HERE)
    for other in (
        DeviceInfo("cpu:0", "cpu", "a processor", threads=2, torch="2.13.0"),
        DeviceInfo("cpu:0", "cpu", "a processor", threads=1, torch="2.14.0"),
        DeviceInfo("cpu:0", "cpu", "another processor", threads=1, torch="2.13.0"),
    ):
        assert calibration_of(other) is None
    # The same device behind another server is as fast, however full it is.
    assert calibration_of(DeviceInfo("cpu:1", "cpu", "a processor", 5, 3, threads=1, torch="2.13.0")) is not None


def test_unreadable_calibration_is_ignored_with_warning(cache, caplog):
    file = store_calibration(HERE, {"a": {}})
    file.write_text('{"format": 99}')
    assert calibration_of(HERE) is None
    assert "djinn calibrate" in caplog.text
