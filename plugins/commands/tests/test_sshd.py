"""`djinn connect` and jobs with OpenSSH's server, without a package index: `python -m evaluation connect`."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from other_machine import SECONDS, other_machine, unavailable_reason

if reason := unavailable_reason():
    pytest.skip(reason, allow_module_level=True)

TRAIN = """
import pathlib, sys, time
import torch, djinn
device = torch.device("remote_accelerator:0")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(64, 8, device=device)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item(), flush=True)
    time.sleep(0.1)
pathlib.Path("out").mkdir(exist_ok=True)
torch.save({name: value.cpu() for name, value in model.state_dict().items()}, "out/model.pt")
"""


@pytest.fixture(scope="session")
def wheels():
    """Return a folder with wheels of all requirements: CONNECT_WHEELS, or downloaded by pip once."""
    given = os.environ.get("CONNECT_WHEELS")
    folder = Path(given or "build/connect-wheels").absolute()
    if not given and not (folder / "complete").exists():
        from djinn_core.registry.discovery import installed

        names = {"djinn", "djinn-server"} | {plugin.origin[0] for plugin in installed()}
        needed = {need for name in names for need in metadata.requires(name) or () if "extra ==" not in need}
        others = sorted(need for need in needed if not need.startswith("djinn"))
        torch = f"torch=={metadata.version('torch').partition('+')[0]}"
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder, torch, *others], check=True
        )
        (folder / "complete").touch()
    return folder


@pytest.fixture(scope="module")
def laptop(tmp_path_factory):
    with other_machine(tmp_path_factory.mktemp("laptop")) as found:
        yield found


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(TRAIN)
    (folder / ".env").write_text("SECRET=1")
    return folder


def command_lines():
    for process in psutil.process_iter(["cmdline"]):
        yield " ".join(process.info["cmdline"] or ())


def test_first_connection_runs_training_step(laptop, wheels, capsys):
    begun = time.monotonic()
    code, said, errors = laptop.run("connect", *laptop.destination, "--wheels", wheels)
    seconds = time.monotonic() - begun
    assert code == 0, errors
    assert "box is connected" in said
    assert "run a training step on the server" in errors
    assert " locally; " in errors
    begun = time.monotonic()
    code, said, errors = laptop.run("connect", "box")
    again = time.monotonic() - begun
    assert (code, errors) == (0, "")
    with capsys.disabled():
        print(
            f"\nfrom nothing to a trained step: {seconds:.1f} s; a second call: {again:.1f} s (load {os.getloadavg()[0]:.1f})"
        )


def test_secrets_are_not_readable_by_others(laptop):
    login = laptop.folder / "config" / "djinn" / "servers" / "box.json"
    token = json.loads(login.read_text())["token"]
    assert stat.S_IMODE(login.stat().st_mode) == 0o600
    assert not any(token in line for line in command_lines())
    there = laptop.machine.home / ".local/share/djinn/connect"
    assert (there / "server" / "token").read_text().strip() == token
    readable = [path for path in (there / "server").iterdir() if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert readable == []
    assert token not in (laptop.folder / "state/djinn/connect/box.json").read_text()


def test_program_survives_broken_connection(laptop, project):
    program = subprocess.Popen(
        [sys.executable, project / "train.py", "80"],
        env=laptop.variables | {"DJINN_SERVERS": "box"},
        stdout=subprocess.PIPE,
        text=True,
        cwd=project,
    )
    with program:
        steps = 0
        for line in program.stdout:
            steps += line.startswith("step")
            if steps == 10:
                assert laptop.machine.break_connections()
        assert program.wait(SECONDS) == 0
    assert steps == 80


def test_submitted_training_survives_its_submitter(laptop, project, tmp_path):
    client = laptop.start("submit", project / "train.py", "--server", "box", "-f", "--", "100")
    job = client.stdout.readline().strip()
    while "step 3 " not in client.stdout.readline():
        assert client.poll() is None, client.stderr.read()
    os.killpg(client.pid, signal.SIGKILL)
    client.communicate()
    laptop.machine.break_connections()  # the laptop sleeps
    code, said, errors = laptop.run("logs", "-f", job, "--server", "box")
    assert code == 0, (said, errors)
    assert [line.split()[1] for line in said.splitlines() if line.startswith("step")] == [
        str(step) for step in range(100)
    ]
    assert "done" in laptop.succeed("jobs")
    laptop.succeed("fetch", job, "out", tmp_path)
    assert (tmp_path / "out" / "model.pt").stat().st_size > 500
    assert not (laptop.machine.home / ".local/share/djinn/connect/jobs" / job / "files" / ".env").exists()


def test_job_stop_ends_its_processes(laptop, project):
    job = laptop.succeed("submit", project / "train.py", "--server", "box", "--", "100000").strip()
    assert "stopped" in laptop.succeed("stop", job)
    assert not [process for process in laptop.machine.processes() if job in " ".join(process.cmdline())]


def test_project_requirements_are_installed(laptop, project, wheels, tmp_path):
    (tmp_path / "train.py").write_text("import six, torch, djinn; print('six', six.__version__, torch.__version__)")
    built = "from hatchling.build import build_wheel; build_wheel('.')"
    (tmp_path / "six.py").write_text("__version__ = 'of this test'")
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n[project]\nname = "six"\nversion = "9"\n'
    )
    subprocess.run([sys.executable, "-c", built], cwd=tmp_path, check=True)
    (tmp_path / "six.py").unlink()
    (tmp_path / "pyproject.toml").unlink()
    (wheel,) = tmp_path.glob("*.whl")
    (tmp_path / "requirements.txt").write_text(f"./{wheel.name}\ntorch\n")
    code, said, errors = laptop.run("submit", tmp_path / "train.py", "--server", "box", "-f")
    assert code == 0, (said, errors)
    assert "six of this test" in said


def test_systemd_server_survives_disconnect(laptop):
    laptop.succeed("disconnect", "box", "--stop")
    assert not [process for process in laptop.machine.processes() if "djinn" in " ".join(process.cmdline())]
    # systemd is not available; these commands stand for it, and start what the unit file says
    for name, text in {
        "loginctl": "#!/bin/sh\necho yes\n",
        "systemctl": '#!/bin/sh\ncase "$*" in *enable*) setsid nohup "$(sed -n \'s/^ExecStart="\\(.*\\)"/\\1/p\' '
        '$HOME/.config/systemd/user/djinn-connect.service)" </dev/null >/dev/null 2>&1 & ;; esac\n',
    }.items():
        (laptop.machine.binaries / name).write_text(text)
        (laptop.machine.binaries / name).chmod(0o755)
    code, _, errors = laptop.run("connect", "box", "--no-check")
    assert code == 0, errors
    assert "under systemd" in errors
    assert "create an environment" not in errors


def test_rejected_ssh_key_error_names_remedy(laptop):
    arguments = [str(laptop.machine.folder / "wrong") if word.endswith("/key") else word for word in laptop.destination]
    arguments[arguments.index("box")] = "other"
    code, _, errors = laptop.run("connect", *arguments)
    assert code == 1
    assert "Permission denied (publickey)" in errors
    assert "ssh-copy-id" in errors


def test_connect_can_be_repeated_after_any_failed_step(tmp_path, wheels):
    with other_machine(tmp_path, size=2300) as laptop:
        machine = laptop.machine
        call = ("connect", *laptop.destination, "--wheels", wheels)
        machine.stop()
        code, _, errors = laptop.run(*call)
        assert code == 1
        assert "ssh cannot connect to" in errors
        machine.start()
        machine.fill()
        code, _, errors = laptop.run(*call)
        assert code == 1
        assert "--folder" in errors
        machine.make_room()
        for title, after in (
            ("check the machine", 0.0),
            ("send", 0.3),
            ("create an environment", 8.0),
            ("start the server", 2.0),
        ):
            code, _, errors = laptop.run(*call, on=(title, after, machine.break_connections))
            assert code == 1, errors
            assert "broke while" in errors
            assert "epeat the command" in errors
            if title == "send":
                code, _, errors = laptop.run(*call, on=("create an environment", 5.0, machine.fill))
                assert code == 1, errors
                assert "No space left" in errors or "the disk is full" in errors
                machine.make_room()
        code, _, errors = laptop.run(*call, on=("open the tunnel", 0.0, machine.break_connections))
        assert code == 0 or "epeat the command" in errors, errors
        assert "box is connected" in laptop.succeed("connect", "box")


def test_missing_wheels_are_downloaded_locally(tmp_path, wheels):
    folder = tmp_path / "fewer"
    folder.mkdir()
    for wheel in wheels.glob("*.whl"):
        if not wheel.name.startswith(("pluggy", "djinn")):
            (folder / wheel.name).symlink_to(wheel)
    with other_machine(tmp_path) as laptop:
        code, _, errors = laptop.run("connect", *laptop.destination, "--wheels", folder)
        assert code == 0, errors
        assert "this machine downloads and sends them" in errors
