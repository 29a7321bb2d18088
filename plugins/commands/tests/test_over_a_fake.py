"""Scripts, jobs and the keeper over a fake ssh, which runs remote commands locally. `test_sshd` uses OpenSSH."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from servers import wait_for

import djinn_commands.connect
from djinn.testing.commands import CommandConformance
from djinn_commands.connect.connect_commands import connect, disconnect
from djinn_commands.connect.connecting import environment_script, survey_script
from djinn_commands.connect.job_commands import fetch, jobs, logs, stop, submit
from djinn_commands.connect.records import Record, control_path, find_record, save_record, tunnel_state
from djinn_commands.connect.ssh import Script, SshConnection
from djinn_commands.connect.survey import Python, read_survey
from djinn_commands.connect.tunnel import is_kept, start_keeper, stop_keeper
from djinn_commands.connect.wheels import Wheels, archive


class TestConnectAsACommand(CommandConformance):
    @pytest.fixture
    def command(self):
        return connect

    @pytest.fixture
    def plugin(self):
        return djinn_commands.connect


@pytest.mark.parametrize("command", [disconnect, submit, jobs, logs, stop, fetch], ids=lambda one: one.name)
def test_commands_have_help(command):
    assert command.get_short_help_str()
    assert CliRunner().invoke(command, ["--help"]).exit_code == 0


def run(command, *arguments, code=0):
    done = CliRunner().invoke(command, [str(one) for one in arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_dry_run_prints_commands_only(machine):
    said = run(connect, "alice@gpu-box", "-p", "2222", "--dry-run", "--", "--device", "cuda:0").output
    for part in (
        "ssh -p 2222",
        "-O forward",
        "djinn serve",
        "venv",
        "--device cuda:0",
        "djinn_commands.connect.keeper gpu-box",
    ):
        assert part in said
    assert machine.commands == []
    assert find_record("gpu-box") is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", "-oProxyCommand=x"], "is not an SSH destination"),
        (["alice@gpu box"], "is not an SSH destination"),
        (["alice@[::1]"], "choose one with --name"),
        (["alice@box", "--folder", "relative"], "must begin with / or ~/"),
    ],
)
def test_invalid_destinations_are_refused(machine, arguments, said):
    done = CliRunner().invoke(connect, arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_ssh_refusal_names_remedy(machine):
    machine.refusal.write_text("alice@box: Permission denied (publickey).\n")
    done = CliRunner().invoke(connect, ["alice@box"])
    assert "Permission denied (publickey)" in str(done.exception)
    assert "ssh-copy-id" in str(done.exception)


def test_connect_surveys_machine_and_uploads_wheels(machine, tmp_path):
    connection = SshConnection(Record("box", "alice@box").destination, control_path("box"))
    assert connection.open(asks=False) == ""
    place = {"folder": "~/a folder", "environment": ""}
    survey = read_survey(
        connection.run(survey_script(Record("box", "alice@box", folder="~/a folder"), sys.executable)).output
    )
    assert survey.folder == str(machine.home / "a folder")
    assert survey.pythons
    assert survey.free
    wheel = tmp_path / "x-1-py3-none-any.whl"
    wheel.write_bytes(bytes(100_000))
    assert connection.run(Script(("receive",), place), archive({wheel.name: wheel})).code == 0
    assert wheel.name in connection.run(Script(("have",), place)).output
    connection.close()
    assert connection.run(Script(("have",), place)).broken


def test_uv_installs_wheels_if_available(machine):
    connection, record = (
        SshConnection(Record("box", "alice@box").destination, control_path("box")),
        Record("box", "alice@box"),
    )
    assert connection.open(asks=False) == ""
    uv = machine.home / ".local/bin/uv"  # stands for the real uv
    uv.parent.mkdir(parents=True)
    uv.write_text('#!/bin/sh\necho "$*" >"$HOME/said"\ngrep -q "^torch==2.13.0$" requirements.txt\n')
    uv.chmod(0o755)
    (machine.home / ".local/share/djinn/connect/wheels").mkdir(parents=True)
    python = Python(sys.version_info[:3], sys.executable)
    script = environment_script(record, python, Wheels((Path("torch-2.13.0-x.whl"),)), "torch==2.13.0")
    script = Script(script.names, {**script.values, "stamp": "digest", "check": "print('torch', 2.13)"})
    done = connection.run(script)
    connection.close()
    assert (done.code, done.output) == (0, "index not asked, by uv\ntorch 2.13\n")
    assert "--offline --no-index --find-links wheels" in (machine.home / "said").read_text()


def test_torch_is_queried_again_after_gpu_appears(machine):
    environment = machine.home / ".local/share/djinn/connect/env"
    python, smi = environment / "bin" / "python", machine.log.parent / "bin" / "nvidia-smi"
    python.parent.mkdir(parents=True)
    (environment / "installed").write_text("digest")
    (environment / "torch").write_text("torch 2.13.0\n")  # the script did not ask PyTorch, because there was no GPU
    for usable, said in (("False", "(2.13.0 False) cannot use the GPU"), ("True", "the server did not start")):
        for program, line in ((python, f"torch 2.13.0 {usable}"), (smi, "L4, 23034 MiB, 550")):
            program.write_text(f"#!/bin/sh\necho '{line}'\n")
            program.chmod(0o755)
        done = CliRunner().invoke(connect, ["alice@box", "--python", str(python)])
        assert "ask PyTorch about the GPU" in done.stderr
        assert said in str(done.exception)
        assert (environment / "torch").read_text() == f"torch 2.13.0 {usable}\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    (folder / "src" / "mine").mkdir(parents=True)
    (folder / "src" / "mine" / "__init__.py").write_text("answer = 42\n")
    (folder / ".env").write_text("PASSWORD=1\n")
    (folder / "train.py").write_text(
        "import os, pathlib, sys, time\nimport mine\n"
        "print('args', sys.argv[1:], mine.answer, sorted(os.listdir('.')), os.environ['DJINN_CONNECTION_FILE'])\n"
        "pathlib.Path('out').mkdir()\npathlib.Path('out/model').write_text('trained')\n"
        "while 'forever' in sys.argv: print('step'); time.sleep(0.05)\n"
        "sys.exit(3 if 'fail' in sys.argv else 0)\n"
    )
    monkeypatch.chdir(folder)
    return folder


def job_state(job):
    return {row["id"]: row["state"] for row in json.loads(run(jobs, "--json").stdout)}[job]


def test_job_runs_and_its_results_are_fetched(box, machine, project, tmp_path):
    told = run(submit, "train.py", "--", "--lr", "it's")
    job = told.stdout.strip()
    assert ".env" in told.stderr
    assert "no server runs" in told.stderr
    shown = run(logs, "-f", job)
    folder = machine.home / ".local/share/djinn/connect"
    assert f"args ['--lr', \"it's\"] 42 ['src', 'train.py'] {folder}/server/connection.json" in shown.stdout
    assert job_state(job) == "done"
    run(fetch, job, "out", tmp_path / "got")
    assert (tmp_path / "got" / "out" / "model").read_text() == "trained"
    assert "broke" not in str(CliRunner().invoke(fetch, [job, "none"]).exception)
    assert (machine.home / ".config/djinn/servers/box.json").is_symlink()
    run(jobs, "--remove", job)
    assert "no jobs" in run(jobs).output
    assert CliRunner().invoke(submit, ["train.py", "-f", "--", "fail"]).exit_code == 3


def test_job_survives_its_submitter_and_is_stopped(box, project):
    client = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from djinn_commands.connect.job_commands import submit; submit()",
            "train.py",
            "-f",
            "--",
            "forever",
        ],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with client:
        job = client.stdout.readline().strip()
        while client.stdout.readline() != "step\n":
            assert client.poll() is None
        os.killpg(client.pid, signal.SIGKILL)
    assert job_state(job) == "running"
    before = run(logs, job).stdout.count("step\n")
    wait_for(lambda: run(logs, job).stdout.count("step\n") > before, "further steps")
    assert "stopped" in run(stop, job[:-2]).output
    assert job_state(job) == "stopped"


def test_submit_to_server_without_ssh_is_refused(machine, project):
    done = CliRunner().invoke(submit, ["train.py", "--server", "elsewhere"])
    assert "jobs need a server that `djinn connect` set up" in str(done.exception)
    assert "ray job submit" in str(done.exception)


def test_oversized_project_is_refused_before_upload(box, machine, project):
    with (project / "big").open("wb") as file:
        file.truncate(2 << 20)
    assert "--limit-mib" in run(submit, "train.py", "--limit-mib", "1", code=1).output
    assert machine.commands == []


def test_keeper_reopens_broken_connection(box, machine):
    save_record(box)
    state = start_keeper(box)
    assert state.is_open, state.reason
    assert is_kept("box")
    socket = control_path("box")
    opened = sum(" -M " in line for line in machine.commands)
    socket.unlink()  # the connection breaks
    wait_for(
        lambda: sum(" -M " in line for line in machine.commands) > opened and socket.exists(), "another connection"
    )
    assert sum("-O forward" in line for line in machine.commands) >= 1
    machine.refusal.write_text("Permission denied (publickey).\n")
    socket.unlink()
    wait_for(lambda: tunnel_state("box").ended, "its end")
    assert "Permission denied" in tunnel_state("box").reason
    wait_for(lambda: not is_kept("box"), "the end of the process")
    assert not stop_keeper("box")


def test_disconnect_closes_tunnel_and_removes_record(box, machine):
    start_keeper(box)
    assert "closed the tunnel" in run(disconnect, "box").output
    assert not Path(control_path("box")).exists()
    assert "removed box" in run(disconnect, "box", "--forget").output
    assert find_record("box") is None


def make_ended_job(machine, name="train-1"):
    """Return the folder of a job that has ended."""
    folder = machine.home / ".local/share/djinn/connect/jobs" / name
    (folder / "files").mkdir(parents=True)
    for file, text in (("begun", "10"), ("ended", "20 0"), ("state", "running"), ("shown", "train.py")):
        (folder / file).write_text(f"{text}\n")
    return folder / "files"


def test_fetched_links_stay_inside_folder(box, machine, tmp_path):
    out = make_ended_job(machine) / "out"
    (out / "step-1").mkdir(parents=True)
    (out / "step-1" / "model").write_text("trained")
    (out / "hard").hardlink_to(out / "step-1" / "model")
    (out / "latest").symlink_to("step-1")
    (out / "data").symlink_to("/scratch/data")
    said = run(fetch, "train-1", "out", tmp_path / "got")
    got = tmp_path / "got" / "out"
    assert (got / "hard").read_text() == (got / "latest" / "model").read_text() == "trained"
    assert not (got / "data").is_symlink()
    assert "not copied, special files and links out of out: out/data" in said.stderr
    run(fetch, "train-1", "out/step-1/model", tmp_path / "one")
    assert (tmp_path / "one" / "out" / "step-1" / "model").read_text() == "trained"


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        ([("train.py", "")], "out"),
        ([("out/../train.py", "")], "out"),
        ([("out/model/x", "")], "out/model/y"),
        ([("out", ".hooks"), ("out/x", "")], "out"),
        ([("out/a", "../.hooks"), ("out/a/x", "")], "out"),
        ([("out/model", "../.hooks/x")], "out/model"),
    ],
)
def test_fetch_writes_requested_files_only(box, machine, tmp_path, monkeypatch, sent, wanted):
    make_ended_job(machine)
    with tarfile.open(tmp_path / "sent.tar", "w") as archived:
        for name, target in sent:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = (tarfile.SYMTYPE, target) if target else (tarfile.REGTYPE, "")
            archived.addfile(member)
    tar = tmp_path / "bin" / "tar"
    tar.write_text(f"#!/bin/sh\ncat '{tmp_path / 'sent.tar'}'\n")
    tar.chmod(0o755)
    (machine.home / ".local/share/djinn/connect/jobs/train-1/files" / wanted).mkdir(parents=True)
    here = tmp_path / "here"
    (here / ".hooks").mkdir(parents=True)
    monkeypatch.chdir(here)
    CliRunner().invoke(fetch, ["train-1", wanted])
    assert not (here / "train.py").exists()
    assert list((here / ".hooks").iterdir()) == []
    assert not any(path.is_symlink() or path.is_file() for path in here.rglob("*") if path.name != "x")


def test_job_with_incomplete_files_does_not_start(box, machine, project):
    def fail_upload(to):
        with tarfile.open(fileobj=to, mode="w|") as archived:
            archived.add("train.py", "files/train.py")

    connection = SshConnection(box.destination, control_path("box"))
    assert connection.open(asks=False) == ""
    values = {**box.script_variables, "job": "train-1"}
    assert connection.run(Script(("submit",), values), fail_upload).code == 3
    assert connection.run(Script(("receive",), box.script_variables), fail_upload).code == 3
    assert "no jobs" in run(jobs).output


def test_tunnel_start_ignores_earlier_output(box, machine):
    other = Record("box.tunnel", "alice@other")
    save_record(other)
    start_keeper(box)
    assert stop_keeper("box")
    assert find_record("box.tunnel") == other
