"""`djinn calibrate` and `djinn validate` on a real executor, with the cost model of the plugin guide."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import signal
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import djinn
import djinn_costs.roofline.model
from djinn.errors import ConfigurationError
from djinn.planning import Calibration, DeviceCapabilities
from djinn.testing import executor_figures, sample_graphs
from djinn_client.runtime import client
from djinn_client.runtime.planning.calibrations import calibration_file, calibration_of
from djinn_costs.roofline.calibrate_command import calibrate, progress
from djinn_costs.roofline.calibration.calibrate import Bench
from djinn_costs.roofline.calibration.measuring import DEVICE, measuring, processor_clock
from djinn_costs.roofline.calibration.plot import draw
from djinn_costs.roofline.calibration.validate import Comparison, Validation
from djinn_costs.roofline.model import MeasuredRoofline
from djinn_costs.roofline.quick import QUICK
from djinn_costs.roofline.validate_command import validate

GUIDE = (Path(__file__).parents[3] / "docs" / "plugins.md").read_text(encoding="utf-8")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def command(tmp_path, monkeypatch, cache, plain_environment):
    """Return a function that runs a command in this process, with the guide's cost model as the only plugin."""
    djinn.shut_down()  # earlier tests of this process may have left a session with tensors
    (source,) = re.findall(r"^```python\n(# my_costs.py.+?)^```", GUIDE, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "my_costs.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in plain_environment if n.startswith("DJINN_")]:
        monkeypatch.setenv(name, plain_environment[name])
    monkeypatch.setenv("DJINN_PLUGINS", "my_costs")

    def run(command, *arguments):
        done = CliRunner().invoke(command, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    yield run
    monkeypatch.undo()  # the configured executor reads the environment
    djinn.shut_down()
    djinn.configure()


def test_guide_cost_model_is_calibrated_and_validated(command, tmp_path):
    made = json.loads(command(calibrate, "--rounds", "2", "--json"))
    assert (made["models"], made["probes"], made["failed"], made["threads"]) == (["my_costs"], 2, 0, 1)
    kept = calibration_of(client.device())
    assert Path(made["file"]) == calibration_file(client.device())
    assert kept.models["my_costs"]["start"] > 0
    with djinn.capture() as captured:
        x = small_product()
    del x
    costs = djinn.plan(captured, until="estimate").costs
    (row,) = costs.by_device.values()
    assert [e.model for e in row] == ["my_costs"] * len(row)
    assert costs.seconds(client.device().id) == pytest.approx(2 * kept.models["my_costs"]["start"], rel=0.2)

    picture = tmp_path / "plot.svg"
    found = json.loads(
        command(validate, "--rounds", "1", "--only", "MLP, 128", "--only", "LSTM, 64", "--json", "--plot", str(picture))
    )
    assert [c["name"].split(",")[0] for c in found["programs"]] == ["LSTM", "training an MLP"]
    for program in found["programs"]:
        assert program["measured"] > 0
        assert program["predicted"] > 0
        assert program["flops"] > 0
    assert set(found) == {"median_error", "p90_error", "r2_log", "programs"}
    texts = {text.text for text in ET.fromstring(picture.read_text()).iter("{http://www.w3.org/2000/svg}text")}
    assert {"LSTM", "training an MLP", "measured", "predicted"} <= texts


def small_product():
    import torch

    x = torch.empty(4, 4)
    return torch.mm(x, x)


@pytest.fixture
def few_probes(monkeypatch):
    """Limit the quick probes to two fast products and two fast sums."""
    names = {"product 1 1 16 16", "product 1 8 16 16", "add 64", "add 4096", "view 4096", "sweep 262144"}
    monkeypatch.setattr(djinn_costs.roofline.model, "QUICK", names)
    monkeypatch.setenv("DJINN_PLUGINS", "roofline")
    return names


def test_background_calibration_runs_once_per_device(command, monkeypatch, few_probes, cache):
    monkeypatch.setenv("DJINN_PLUGINS", "roofline")  # `command` sets another plugin
    given_way = []
    monkeypatch.setattr("os.nice", given_way.append)
    command(calibrate, "--background")
    assert given_way == [19]
    (file,) = cache.glob("djinn/calibration/*.json")
    kept = calibration_of(client.device())
    assert set(kept.models["measured_roofline"]["operations"]) == {"add"}
    command(calibrate, "--background")
    assert calibration_of(client.device()) == kept, "it was measured already"
    file.unlink()
    with file.with_suffix(".lock").open("w") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        command(calibrate, "--background")
    assert not file.exists(), "another process is measuring it"


def test_lost_session_saves_no_calibration(command, monkeypatch, few_probes, cache):
    monkeypatch.setenv("DJINN_PLUGINS", "roofline")
    monkeypatch.setenv("DJINN_RECOVER", "0")
    monkeypatch.setattr("os.nice", lambda _: 0)
    take = Bench._time_probe

    def kill_executor_and_take(bench, model, probe):
        with contextlib.suppress(ProcessLookupError):
            os.kill(client.executor_process(), signal.SIGKILL)
        take(bench, model, probe)

    monkeypatch.setattr(Bench, "_time_probe", kill_executor_and_take)
    with pytest.raises(djinn.errors.SessionLost):
        command(calibrate, "--background")
    assert not list(cache.glob("djinn/calibration/*.json"))


def test_quick_probes_are_enough_for_every_op():
    """Ops without a measurement are predicted from other ops."""
    model = MeasuredRoofline()
    quick = {probe.name: 1e-5 for probe in model.probes() if probe.quick}
    assert quick.keys() == QUICK
    kept = Calibration("digest", models={model.name: model.fit(quick)})
    device = DeviceCapabilities("a", "cpu", calibration=kept)
    for graph in sample_graphs().values():
        for node in graph.nodes:
            assert 0 < model.estimate(graph, node, device).seconds < 1


def test_validation_errors_are_relative_to_measurement():
    pairs = [(1.0, 1.0), (1.1, 1.0), (1.5, 1.0), (20.0, 10.0), (100.0, 100.0)]
    found = Validation(tuple(Comparison(str(i), p, m, 1, 0.0) for i, (p, m) in enumerate(pairs)))
    assert found.median_error == pytest.approx(0.1)
    assert found.p90_error == pytest.approx(0.8)
    assert 0.9 < found.r2_log < 1.0
    perfect = Validation(tuple(Comparison("", t, t, 1, 0.0) for t in (1.0, 2.0)))
    assert perfect.r2_log == 1.0


def test_validation_plot_draws_one_point_per_program(tmp_path):
    compared = [Comparison(f"{kind}, {n}", 1e-3 * n, 1.1e-3 * n, 1, 0.0) for kind in ("a", "b") for n in (1, 10)]
    draw(Validation(tuple(compared)), tmp_path / "plot.svg")
    drawn = ET.fromstring((tmp_path / "plot.svg").read_text())
    marks = [mark for mark in drawn.iter("{http://www.w3.org/2000/svg}use") if float(mark.get("x", 0)) > 0]
    kinds = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")} & {"a", "b"}
    assert kinds == {"a", "b"}
    assert len([mark for mark in marks if "fill-opacity: 0.75" in mark.get("style", "")]) == len(compared) + len(kinds)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="Linux alone tells it")
def test_processor_time_needs_own_executor():
    assert processor_clock(os.getpid()) is None
    assert processor_clock(0) is None
    executor = processor_clock(os.getppid())
    assert executor is not None
    assert executor.read() >= 0


def test_unknown_processor_time_is_refused(monkeypatch):
    monkeypatch.setattr(client, "executor_process", os.getpid)
    with (
        pytest.raises(ConfigurationError, match="only for an executor process on this machine"),
        measuring(processor_time=True),
    ):
        pass


def test_processor_time_of_several_threads_is_refused(command):
    djinn.configure(threads=2)
    with pytest.raises(ConfigurationError, match="DJINN_THREADS=1"), measuring(processor_time=True):
        pass


def test_measuring_disables_running_ahead():
    with measuring() as clock:
        weight = torch.full((256, 256), 1 / 256, device=DEVICE)
        before, began = executor_figures(), clock.read()
        for _ in range(30):
            for _ in range(4):
                weight = weight @ weight
            assert weight[0, 0].item() == 1 / 256
        now = executor_figures()
        assert clock.read() > began
    counts = [(figures["runs_ahead"], figures["runs_ahead_dropped"]) for figures in (before, now)]
    assert counts[0] == counts[1]


def test_validation_plot_refuses_other_formats(tmp_path):
    done = CliRunner().invoke(validate, ["--plot", str(tmp_path / "plot.png")])
    assert done.exit_code == 2
    assert "only SVG" in done.output


def test_calibration_progress_is_removed_at_end(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    with progress(quiet=False) as told:
        told("matmul 512")
        assert "matmul 512" in shown.getvalue()
    assert shown.getvalue().endswith("\x1b[2K"), "the line is erased"
    with progress(quiet=True) as told:
        told("reduce")
    assert "reduce" not in shown.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True
