"""Pools of devices that were never measured have them measured by another process, and plan with what it found."""

from __future__ import annotations

import subprocess
import threading
from types import SimpleNamespace

import attrs
import pytest
import torch
from configured import configured

import djinn
from djinn.hooks import CostModel, hookimpl
from djinn.planning import CostEstimate
from djinn.testing import open_session
from djinn_client.runtime import client
from djinn_client.runtime.planning.calibrations import store_calibration
from djinn_core.planning.builtins.costs import Roofline
from djinn_core.settings import Settings
from djinn_core.wire.messages import DeviceInfo
from djinn_pool import first_calibration
from djinn_pool.first_calibration import command_among, environment_for, never_measured

REMOTE = "remote_accelerator:0"
# What a process of its own does that measures: it finds the device by its environment, and keeps something.
MEASURING = """
import djinn
from djinn_client.runtime import client
from djinn_client.runtime.planning.calibrations import store_calibration
djinn.init()
store_calibration(client.device(), {"measured": {"seconds": 0.25}})
"""


class MeasuredDevices(CostModel):
    """A cost model that knows only devices that were measured."""

    name = "measured"
    tolerates_growth = True

    def estimate(self, graph, node, device):
        del graph, node
        known = device.calibration
        return None if known is None else CostEstimate(0, 0, 0, known.models["measured"]["seconds"])

    def background_command(self):
        return ("-c", MEASURING)


class Plugin:
    djinn_api_version = "2.0"

    @hookimpl
    def djinn_register_cost_models(self):
        return [MeasuredDevices()]


@pytest.fixture
def cache(tmp_path, monkeypatch, python):
    """Return an empty cache directory. Measuring processes are forked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(command, env, **_):
        ended = python.run(*command[1:], env=env)
        ended.stderr = ended.stderr.encode()
        return ended

    monkeypatch.setattr(first_calibration, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": run}))
    return tmp_path


def calibration_threads():
    """Return the threads that wait for a measuring process."""
    return [thread for thread in threading.enumerate() if thread.name == "djinn-calibration"]


def pool(**settings):
    return configured(
        **{"plugins": ["pool", "cost_based", Plugin()], "executors": 2, "threads": 1, "calibrate": True} | settings
    )


def predicted_seconds():
    """Return, by executor, the predicted time of an op in the plan of a known program."""
    x = torch.ones(3).to(REMOTE)
    with client.record_plans() as plans:
        assert (x + 1).sum().item() == 6
    return [plan.costs.by_device["0/cpu:0"][0].seconds for plan in plans]


def test_pool_is_calibrated_once_and_replans(cache):
    with pool():
        djinn.init()
        (waiting,) = calibration_threads()
        before = predicted_seconds()
        assert before != [0.25], "the program does not wait"
        assert predicted_seconds() == []
        waiting.join()
        assert all(device.calibration is not None for device in open_session().router.topology().devices)
        assert predicted_seconds() == [0.25]
        assert predicted_seconds() == []
    with pool():
        djinn.init()
        assert not calibration_threads(), "the next session has it at once"
        assert predicted_seconds() == [0.25]


@pytest.mark.parametrize("settings", [{"calibrate": False}, {"executors": 1}])
def test_calibration_is_skipped_if_not_needed(cache, settings):
    with pool(**settings):
        djinn.init()
        assert not calibration_threads()


def test_failed_calibration_changes_nothing(cache, monkeypatch):
    monkeypatch.setattr(MeasuredDevices, "background_command", lambda _: ("-c", "raise SystemExit('no')"))
    with pool():
        djinn.init()
        for waiting in calibration_threads():
            waiting.join()
        assert open_session().router.topology().devices[0].calibration is None
        assert predicted_seconds()


@attrs.frozen
class FakeAttached:
    """A fake of an executor's description of its device."""

    device: DeviceInfo


@attrs.frozen
class FakeSession:
    """A fake of an open session."""

    attached: FakeAttached
    server: str = "tcp://one:5556"
    executor: object = None


def session_on(name, device="cpu:0", **given):
    return FakeSession(FakeAttached(DeviceInfo(id=device, kind="cpu", name=name)), **given)


def test_each_device_model_is_calibrated_once(cache):
    alike, other = [session_on("old"), session_on("old", "cpu:1")], session_on("new")
    assert never_measured([*alike, other]) == [alike[1], other]
    store_calibration(other.attached.device, {"measured": {}})
    assert never_measured([*alike, other]) == [alike[1]]


def test_calibration_environment_for_server(tmp_path):
    settings = Settings(
        servers=["tcp://one:5556", "tcp://two:5556"], token="secret", tls_fingerprints=["sha256:" + "a" * 64]
    )
    found = environment_for(
        session_on("old", "cpu:1", server="tcp://two:5556"), settings, {"HOME": "/home/a", "DJINN_SERVERS": "x"}
    )
    assert found == {
        "HOME": "/home/a",
        "DJINN_EXECUTORS": "1",
        "DJINN_RECOVER": "0",
        "DJINN_CALIBRATE": "0",
        "DJINN_SERVERS": "tcp://two:5556",
        "DJINN_TOKEN": "secret",
        "DJINN_SERVER_DEVICES": "cpu:1",
        "DJINN_TLS_FINGERPRINTS": "sha256:" + "a" * 64,
    }


def test_calibration_environment_for_own_executor():
    found = environment_for(session_on("old", executor=object()), Settings(executors=2, threads=3, device="cuda"), {})
    assert (found["DJINN_EXECUTORS"], found["DJINN_THREADS"], found["DJINN_DEVICE"]) == ("1", "3", "cuda")
    assert "DJINN_TOKEN" not in found


def test_calibration_command_of_first_cost_model():
    assert command_among([Roofline(), MeasuredDevices()]) == ("-c", MEASURING)
    assert command_among([Roofline()]) == ()
