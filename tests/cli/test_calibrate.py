"""`djinn calibrate` and `djinn validate` on a real executor, with the cost model of the author's guide."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner

import djinn
from djinn_core.calibration.measuring import ProcessorClock
from djinn_core.calibration.validate import Comparison, Validation
from djinn_core.cli import main
from djinn_core.errors import ConfigurationError
from djinn_core.runtime import client
from djinn_core.runtime.planning.calibrations import calibration_file, calibration_of, keep_calibration
from djinn_core.runtime.planning.planning import topology_of
from djinn_core.wire.messages import DeviceInfo

GUIDE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
HERE = DeviceInfo("cpu:0", "cpu", "a processor", threads=1, torch="2.13.0")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def command(tmp_path, monkeypatch, cache, plain_environment):
    """Runs a command of `djinn` in this process, with the guide's cost model as its only plugin."""
    (source,) = re.findall(r"^```python\n(# my_costs.py.+?)^```", GUIDE, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "my_costs.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in plain_environment if n.startswith("DJINN_")]:
        monkeypatch.setenv(name, plain_environment[name])
    monkeypatch.setenv("DJINN_PLUGINS", "my_costs")

    def run(*arguments):
        done = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    yield run
    monkeypatch.undo()  # what is configured reads the environment
    djinn.shut_down()
    djinn.configure()


def test_a_cost_model_written_by_the_guide_is_measured_kept_and_validated(command, tmp_path):
    made = json.loads(command("calibrate", "--rounds", "2", "--json"))
    assert (made["models"], made["probes"], made["failed"], made["threads"]) == (["my_costs"], 2, 0, 1)
    kept = calibration_of(client.device())
    assert Path(made["file"]) == calibration_file(client.device())
    assert kept.models["my_costs"]["start"] > 0
    with djinn.capture() as captured:
        x = captured_product()
    del x
    costs = djinn.plan(captured, until="estimate").costs
    (row,) = costs.by_device.values()
    assert [e.model for e in row] == ["my_costs"] * len(row)
    assert costs.seconds(client.device().id) == pytest.approx(2 * kept.models["my_costs"]["start"], rel=0.2)

    picture = tmp_path / "plot.svg"
    found = json.loads(
        command(
            "validate", "--rounds", "1", "--only", "MLP, 128", "--only", "LSTM, 64", "--json", "--plot", str(picture)
        )
    )
    assert [c["name"].split(",")[0] for c in found["programs"]] == ["LSTM", "training an MLP"]
    for program in found["programs"]:
        assert program["measured"] > 0
        assert program["predicted"] > 0
        assert program["flops"] > 0
    assert set(found) == {"median_error", "p90_error", "r2_log", "programs"}
    points = ET.fromstring(picture.read_text()).findall("{*}circle/{*}title")
    assert len(points) == 2


def captured_product():
    import torch

    x = torch.empty(4, 4)
    return torch.mm(x, x)


def test_a_calibration_is_kept_for_the_device_its_pytorch_and_its_threads(cache):
    assert calibration_of(HERE) is None
    file = keep_calibration(HERE, {"a": {"x": 1}})
    assert file.is_relative_to(cache)
    keep_calibration(HERE, {"b": {"y": 2}})
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


def test_a_calibration_that_cannot_be_read_is_none_and_says_so(cache, caplog):
    file = keep_calibration(HERE, {"a": {}})
    file.write_text('{"format": 99}')
    assert calibration_of(HERE) is None
    assert "djinn calibrate" in caplog.text


def test_errors_are_shares_of_what_was_measured():
    pairs = [(1.0, 1.0), (1.1, 1.0), (1.5, 1.0), (20.0, 10.0), (100.0, 100.0)]
    found = Validation(tuple(Comparison(str(i), p, m, 1, 0.0) for i, (p, m) in enumerate(pairs)))
    assert found.median_error == pytest.approx(0.1)
    assert found.p90_error == pytest.approx(0.8)
    assert 0.9 < found.r2_log < 1.0
    perfect = Validation(tuple(Comparison("", t, t, 1, 0.0) for t in (1.0, 2.0)))
    assert perfect.r2_log == 1.0


def test_processor_time_is_for_executors_of_their_own():
    with pytest.raises(ConfigurationError, match="on this machine only"):
        ProcessorClock(0)


def test_only_svg_is_drawn(tmp_path):
    done = CliRunner().invoke(main, ["validate", "--plot", str(tmp_path / "plot.png")])
    assert done.exit_code == 2
    assert "only SVG" in done.output
