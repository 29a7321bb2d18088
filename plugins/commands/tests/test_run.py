"""`djinn run`: CUDA scripts in separate processes, compared with the same scripts on the CPU."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from djinn_commands.run import cuda_module, cuda_names
from djinn_core.errors import StartupError

SCRIPTS = Path(__file__).parent / "scripts"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
SECONDS = 600.0
REMOTE = ["-m", "djinn_core.cli", "run"]


@pytest.fixture
def start(python, served_environment, plain_environment, tmp_path):
    """Return a function that starts a command in an empty folder; `runner` is `djinn run` or plain Python."""

    started = contextlib.ExitStack()

    def start(runner, *arguments, served=True):
        environ = (served_environment if served else plain_environment) | {"CUDA_VISIBLE_DEVICES": ""}
        command = [*(REMOTE if runner == "remote" else []), *arguments]
        return started.enter_context(python.start_captured(*command, env=environ, cwd=tmp_path))

    with started:
        yield start


def finish(process, status=0):
    """Return the output of a command with the expected exit status."""
    said, complaints = process.communicate(timeout=SECONDS)
    assert process.returncode == status, complaints
    return said, complaints


@pytest.fixture
def run_on_both(start):
    """Return a function that runs a script remotely and on the CPU and returns both printed results.

    Lines about the machine begin with `#`.
    """

    def run_on_both(script, *arguments, remote=(), local=()):
        processes = [start("remote", SCRIPTS / script, *arguments, *remote)]
        processes.append(start("local", SCRIPTS / script, *arguments, *local))
        return [results(finish(process)[0]) for process in processes]

    return run_on_both


def results(said):
    return [line for line in said.splitlines() if not line.startswith("#")]


def assert_numbers_close(remote, local, tolerance):
    assert len(remote) == len(local) > 1
    for ours, theirs in zip(remote, local, strict=True):
        assert NUMBER.sub("_", ours) == NUMBER.sub("_", theirs)
        assert [float(n) for n in NUMBER.findall(ours)] == pytest.approx(
            [float(n) for n in NUMBER.findall(theirs)], rel=tolerance, abs=tolerance
        )


@pytest.mark.long
def test_mixed_precision_training_and_checkpoint_equal_local(run_on_both, tmp_path):
    files = {"remote": ("--checkpoint", "remote.pt"), "local": ("--checkpoint", "local.pt")}
    # bfloat16 has three digits, and autocast casts other ops for CUDA than for the CPU
    assert_numbers_close(*run_on_both("train_cnn.py", "--epochs", "1", "--amp", **files), 0.02)
    with (tmp_path / "remote.pt").open("rb") as file:
        locations = set()
        torch.load(file, map_location=lambda storage, location: locations.add(location) or storage)
    assert locations == {"cpu", "cuda:0"}  # the optimizer counts its steps on the CPU
    remote, local = (torch.load(tmp_path / name, map_location="cpu") for name in ("remote.pt", "local.pt"))
    assert remote["model"].keys() == local["model"].keys()
    for name, weight in local["model"].items():
        torch.testing.assert_close(remote["model"][name], weight, rtol=0.02, atol=0.02)
    assert remote["scaler"]["scale"] == 2.0**16


@pytest.mark.long
def test_gpt2_generation_equals_local(run_on_both):
    remote, local = run_on_both("generate_gpt2.py")
    assert len(remote) == 4
    assert remote == local


def test_gpt_training_with_scaler_workers_and_resume_equals_local(run_on_both, tmp_path):
    saved = {"remote": ("--checkpoint", "remote.pt"), "local": ("--device", "cpu", "--checkpoint", "local.pt")}
    assert_numbers_close(*run_on_both("train_gpt.py", **saved), 0.02)
    again = {"remote": ("--resume", "remote.pt"), "local": ("--device", "cpu", "--resume", "local.pt")}
    remote, local = run_on_both("train_gpt.py", **again)
    assert_numbers_close(remote, local, 0.02)
    assert remote[0].startswith("step 3 ")


@pytest.mark.long
def test_trainer_with_workers_equals_local(run_on_both):
    assert_numbers_close(*run_on_both("trainer.py", local=("--cpu",)), 0.01)


def test_streaming_pipeline_equals_local(run_on_both):
    remote, local = run_on_both("stream_text.py", local=("--device", "cpu"))
    assert remote == local
    assert len(remote) == 2


@pytest.mark.long
def test_compiled_models_equal_local(run_on_both):
    assert_numbers_close(*run_on_both("compiled.py", local=("--device", "cpu")), 1e-3)


def test_run_refuses_wrong_token_before_script_starts(python, served_environment, tmp_path):
    (tmp_path / "script.py").write_text("print('it ran')\n")
    environ = served_environment | {"DJINN_TOKEN": "x" * 43}
    with python.start_captured(*REMOTE, "script.py", env=environ, cwd=tmp_path) as process:
        said, told = finish(process, 1)
    assert said == ""
    assert "token" in told
    assert "Traceback" not in told


def test_benchmark_with_events_and_streams_runs(start, tmp_path):
    options = ("--stats", "--verbose", "--trace", "trace.json.gz")
    remote = start("remote", *options, SCRIPTS / "benchmark_matmul.py", served=False)
    local = start("local", SCRIPTS / "benchmark_matmul.py")
    said, told = finish(remote)
    assert_numbers_close(results(said), results(finish(local)[0]), 1e-5)
    assert re.match(r"djinn: cuda:0 is cpu:0 of the executor \(.*\)\n", told)
    assert re.search(r"^djinn: round_trips [1-9]", told, re.MULTILINE)
    assert "where the time went, by cause" in told
    assert "djinn: the trace is in trace.json.gz" in told
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    (nvtx,) = [event for event in events if event.get("cat") == "range" and event["name"] == "benchmark"]
    assert nvtx["args"]["instructions"] > 0
    assert any("benchmark" in event["args"].get("ranges", "") for event in events if event.get("cat") == "execute")


def test_cuda_calls_work_under_djinn_run(start):
    said, told = finish(start("remote", SCRIPTS / "cuda_calls.py"))
    report = json.loads(said.splitlines()[-1])
    assert report["checked"] >= 30
    assert not report["wrong"], "\n".join(f"{name}: {trace}" for name, trace in report["wrong"].items())
    assert "Failed to record CUDA event" not in told  # PyTorch's profiler prints this a thousand times without a GPU
    assert "compiled without cuDNN" not in told


def test_script_runs_as_under_python(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import atexit, json, signal, sys
            atexit.register(print, "tidied")
            def fail():
                raise ValueError("mine")
            main = sys.modules["__main__"]
            print(json.dumps([__name__, __file__, sys.argv, sys.path[0], main.fail is fail, __spec__ is None]), flush=True)
            if "--interrupt" in sys.argv:
                signal.raise_signal(signal.SIGINT)  # as Ctrl-C does, always on the same line
            fail()
        """)
    )
    for how, status in (("--fail", 1), ("--interrupt", -signal.SIGINT)):
        remote, command = start("remote", "script.py", how, served=False), [sys.executable, "script.py", how]
        local = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert finish(remote, status) == (local.stdout, local.stderr)
        assert local.returncode == status
        assert local.stdout.endswith("tidied\n")
        assert "script.py" in local.stderr


def test_run_executes_modules_and_refuses_invalid_options(start, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys\nprint(__name__, __spec__.name, sys.argv[1:])\nsys.exit(7)\n"
    )
    module = start("remote", "-m", "package", "-m", "--stats")
    nowhere = start("remote", "--server", "tcp://127.0.0.1:9", "--verbose", "-m", "package")
    quiet = start("remote", "--server", "tcp://127.0.0.1:9", "-m", "package")
    missing = start("remote", "nothing.py")
    assert finish(module, 7) == ("__main__ package.__main__ ['-m', '--stats']\n", "")
    assert "tcp://127.0.0.1:9" in finish(nowhere, 1)[1]
    said, told = finish(quiet, 1)
    assert said == "", "the script has not run"
    assert "tcp://127.0.0.1:9" in told
    assert "There is no file 'nothing.py'" in finish(missing, 2)[1]


def test_every_torch_cuda_function_is_classified():
    import djinn  # noqa: F401 - registers the device

    offered = {name for name in cuda_module.functions() if hasattr(torch.remote_accelerator, name)}
    groups = {
        "own": set(cuda_module.OWN),
        "kept": cuda_module.KEPT,
        "refused": set(cuda_module.REFUSED_BECAUSE),
        "remote": offered,
    }
    homes = {name: [group for group, names in groups.items() if name in names] for name in cuda_module.functions()}
    # Functions of Djinn and of PyTorch precede those of the remote device.
    clear = [["own"], ["kept"], ["refused"], ["remote"], ["own", "remote"], ["kept", "remote"]]
    assert {name: home for name, home in homes.items() if home not in clear} == {}


def test_run_names_incompatible_pytorch_version(monkeypatch):
    def fails():
        raise AttributeError("no tail")

    monkeypatch.setattr(cuda_names, "_replace", fails)
    with pytest.raises(StartupError, match=f"{re.escape(torch.__version__)} \\(AttributeError: no tail\\)"):
        cuda_names.install()


def test_cuda_is_absent_outside_djinn_run():
    import djinn  # noqa: F401 - registers the device

    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    assert not torch.cuda.is_available()
    assert str(torch.ones(1, device="remote_accelerator").device) == "remote_accelerator:0"
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        torch.ones(1, device="cuda")
