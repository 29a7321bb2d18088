"""The benchmarks work, in their shortest form; what they count, and does not depend on time, is within its bar."""

from __future__ import annotations

import importlib
import json
import os
import threading
from contextlib import contextmanager

import pytest
import torch
from servers import start_server

from djinn_core.protocol.connection_file import read_connection_file
from evaluation.served import Server


@pytest.fixture
def module():
    """Import a script of `evaluation/benchmarks`."""
    return lambda name: importlib.import_module(f"evaluation.benchmarks.{name}")


@pytest.fixture
def run_benchmark(module, connect, url_of, capsys, monkeypatch):
    """Return a function that runs a short benchmark against the tests' server and returns the printed JSON."""

    @contextmanager
    def connected(*_, **__):
        with connect(url_of("tcp")):
            yield

    def run_benchmark(name, *cases):
        script, measuring = module(name), module("measuring")
        if hasattr(script, "connected"):
            monkeypatch.setattr(script, "connected", connected)
        wanted = ["--case", ",".join(cases)] if cases else []
        # A thread of its own records a program of its own: what others have recorded stays as it is.
        thread = threading.Thread(target=measuring.main, args=(name, script.CASES, ["--small", "--json", *wanted]))
        thread.start()
        thread.join()
        printed = capsys.readouterr().out.splitlines()
        found = json.loads(printed[-1])
        assert set(found) == set(cases or [case.name for case in script.CASES]), "\n".join(printed)
        bars = {case.name: case.bar for case in script.CASES}
        return {name: (value, bars[name]) for name, value in found.items()}

    return run_benchmark


def assert_within_limits(found, *names):
    for name in names:
        value, bar = found[name]
        assert value <= bar, f"{name}: {value}, at most {bar}"


def test_capture_benchmark_meets_limits(run_benchmark, embedded):
    assert_within_limits(run_benchmark("bench_capture", "instruction_bytes", "capture_add"), "instruction_bytes")


def test_bytes_benchmark_meets_limits(run_benchmark):
    names = ("decode_bytes_sent", "element_bytes_received")
    assert_within_limits(run_benchmark("bench_bytes", *names), *names)


def test_tensors_benchmark_meets_limits(run_benchmark):
    assert_within_limits(run_benchmark("bench_tensors"), "copies")


def test_transports_benchmark_meets_limits(run_benchmark):
    run_benchmark(
        "bench_transports", "tcp_64_mib", "http_64_mib", "local_64_mib", "submission", "submission_with_an_op"
    )


def test_server_weights_benchmark_meets_limits(run_benchmark, module, python, tmp_path, monkeypatch):
    @contextmanager
    def forked(*arguments, threads=1, environment=None):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        options = ["--threads", str(threads), "--drain-seconds", "1", *arguments]
        started = start_server(python.start, folder, *options, env=os.environ | (environment or {}))
        yield Server(started.process, folder, read_connection_file(started.file))
        started.stop()

    monkeypatch.setattr(module("serving"), "served", forked)
    assert_within_limits(run_benchmark("bench_weights", "second_session", "bytes"), "bytes")


def test_models_benchmark_meets_limits(run_benchmark):
    run_benchmark("bench_models", "toy_decode", "toy_own_loop")


def test_varying_sizes_benchmark_meets_limits(run_benchmark, module):
    run_benchmark("bench_varying", "convolution_new_over_known", "convolution_plans", "convolution_fixed_over_local")
    found = module("bench_varying").varied
    assert found.cache_info().misses == 1, "the cases of one program share its run"


def test_plugin_skeleton_is_installed_like_by_pip(module):
    from djinn_core.registry.discovery import installed

    varying = module("bench_varying")
    with varying.installed("placement_policies") as environment:
        assert "bench_placement_policies" in {plugin.name for plugin in installed()}
        assert environment["PYTHONPATH"]
    assert "bench_placement_policies" not in {plugin.name for plugin in installed()}


def test_pool_benchmark_runs_programs_twice(module):
    script = module("bench_pool_defaults")
    names = [case.name for case in script.CASES]
    assert len(names) == len(set(names)) == 60
    programs = {program.name: program for program in script.programs()}
    for name in ("towers, 512 wide", "elementwise, tiny", "multimodal, 64 wide"):
        assert programs[name].build(torch.device("cpu"))().isfinite().all()


def test_varying_sizes_benchmark_uses_new_sizes(module):
    programs = module("varying_programs")
    for program in programs.PROGRAMS:
        known, unseen = program.halves(40)
        assert known
        assert len(unseen) >= 20
        assert not {*known} & {*unseen}


def test_name_prefix_selects_cases(module, capsys):
    measuring = module("measuring")
    cases = [
        measuring.Case(name, 1, lambda _: measuring.Outcome(1.0)) for name in ("one_a", "one_b", "two_a", "oneself")
    ]
    assert set(measuring.main("title", cases, ["--case", "one"])) == {"one_a", "one_b"}
    with pytest.raises(SystemExit):
        measuring.main("title", cases, ["--case", "three"])
    assert "no case has the name three" in capsys.readouterr().err


def test_relay_delays_frames(module):
    links = module("links")
    with links.ExitStack() as stack:
        way = links.partial(links.start_relay, stack, links.Conditions(round_trip=0.01))
        with links.measured([], "127.0.0.1", way) as seconds:
            assert seconds >= 0.01


def test_namespace_bridge_delays_frames(module):
    links = module("links")
    if not links.permitted():
        pytest.skip("network namespaces are not permitted here")
    with (
        links.namespace(links.Conditions(round_trip=0.01, bits_per_second=1e9)) as inside,
        links.measured(inside, links.SERVER, lambda port: (links.SERVER, port)) as seconds,
    ):
        assert seconds >= 0.01


def test_failing_case_does_not_stop_others(module, capsys):
    measuring = module("measuring")

    def raise_broken(_):
        raise ValueError("broken on purpose")

    def raise_cannot_measure(_):
        raise measuring.CannotMeasureError("no such thing here")

    cases = (
        measuring.Case("one", 1, raise_broken),
        measuring.Case("two", 1, raise_cannot_measure),
        measuring.Case("three", 1, lambda _: measuring.Outcome(2.0)),
    )
    with pytest.raises(SystemExit):
        measuring.main("title", cases, ["--json"])
    printed = capsys.readouterr()
    assert "broken on purpose" in printed.err
    assert "no such thing here" in printed.out
    assert "missed" in printed.out
    why = {"one": "ValueError: broken on purpose", "two": "no such thing here"}
    said = json.loads(printed.out.splitlines()[-1])
    assert said == {"three": 2.0, **dict.fromkeys(why), measuring.NOT_MEASURED: why}


def test_report_has_plot_and_table(module, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    measuring, plot = module("measuring"), module("plot")
    monkeypatch.setattr("sys.argv", ["bench_things.py"])
    case = measuring.Case("some_thing", 2.0, lambda _: measuring.Outcome(1.0, {"alone ms": 3.0}))
    measuring.main("title", [case], ["--save", str(tmp_path)])
    page, picture = tmp_path / "page.md", tmp_path / "picture.svg"
    page.write_text(f"before\n{plot.BEGIN}\nold\n{plot.END}\nafter\n")
    monkeypatch.setattr(
        "sys.argv", ["plot.py", "--results", str(tmp_path), "--picture", str(picture), "--page", str(page)]
    )
    plot.main()
    text = page.read_text()
    assert "| things | some thing | 1 | 2 | met | alone ms 3 |" in text
    assert "old" not in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "<svg" in picture.read_text()
