"""Decisions of `djinn connect`: the survey of a machine, the files to send, and messages."""

from __future__ import annotations

import io
import os
import re
import subprocess
import tarfile
import tomllib

import pytest

import djinn
from djinn_commands.connect.connecting import failure, platform_options, port_of
from djinn_commands.connect.job_commands import _paths_text
from djinn_commands.connect.job_runner import named_files
from djinn_commands.connect.jobs import read_jobs
from djinn_commands.connect.keeper import is_final, next_pause
from djinn_commands.connect.project_files import find_files, is_secret, project_requirements
from djinn_commands.connect.project_files import objection as too_much
from djinn_commands.connect.ssh import Destination, Script, ScriptResult, open_command, run_command
from djinn_commands.connect.survey import (
    GIB,
    Python,
    Survey,
    choose_python,
    must_ask_torch,
    needed_bytes,
    objection,
    read_survey,
)
from djinn_commands.connect.terminal_escapes import LogEscaper
from djinn_commands.connect.wheels import _projects, archive, find_wheels

FOUND = """os Linux
machine x86_64
release Debian GNU/Linux 12 (bookworm)
libc glibc 2.36
folder /data/alice/.local/share/djinn/connect
free_kib 8388608
memory_kib 16777216
python 3.13.1 /usr/bin/python3.13
python 3.11.2 /usr/bin/python3.11
python 3.11.2 /usr/bin/python3.11
python 3.9.2 /opt/my python/bin/python3
gpu NVIDIA L4, 23034 MiB, 550.54.15
"""


def test_survey_fields_are_parsed():
    found = read_survey(f"a word of the login shell\n{FOUND}")
    assert (found.system, found.machine, found.libc) == ("Linux", "x86_64", "glibc 2.36")
    assert (found.free, found.memory) == (8 * GIB, 16 * GIB)
    assert [one.path for one in found.pythons] == [
        "/usr/bin/python3.13",
        "/usr/bin/python3.11",
        "/opt/my python/bin/python3",
    ]
    assert found.gpus == ("NVIDIA L4, 23034 MiB, 550.54.15",)
    assert "8.0 GiB free at /data/alice" in found.lines()[-1]
    assert read_survey("") == Survey()


@pytest.mark.parametrize(
    ("versions", "here", "chosen"),
    [
        ([(3, 13, 1), (3, 11, 2), (3, 11, 9)], (3, 11), (3, 11, 9)),
        ([(3, 13, 1), (3, 12, 2)], (3, 11), (3, 13, 1)),
        ([(3, 10, 1), (3, 9, 2)], (3, 11), None),
    ],
)
def test_local_python_version_is_preferred(versions, here, chosen):
    found = choose_python([Python(version, f"/{version}") for version in versions], here)
    assert (found and found.version) == chosen


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("os Darwin", "needs Linux: choose another machine"),
        ("free_kib 1000000", "name a folder on another disk with --folder"),
        ("unwritable /data/alice", "name another folder with --folder"),
        ("python none", "--python PATH"),
    ],
)
def test_unsuitable_machine_names_remedy(changed, said):
    key = changed.partition(" ")[0]
    text = re.sub(rf"^{key} .*\n", "", FOUND, flags=re.MULTILINE) + changed
    assert said in objection(read_survey(text), (3, 11), 2 * GIB)
    assert objection(read_survey(FOUND), (3, 11), 2 * GIB) == ""


def test_torch_query_is_repeated_if_gpu_is_unknown():
    for said, asked in (("torch 2.13.0", True), ("torch 2.13.0 available: False", True), ("torch 2.13.0 True", False)):
        found = read_survey(FOUND + said)
        assert must_ask_torch(found, ()) == asked
        assert not must_ask_torch(found, ("--device", "cpu"))
    assert not must_ask_torch(read_survey(f"{FOUND}options --device cpu\n"), None)
    assert must_ask_torch(read_survey(f"{FOUND}options --device cpu\n"), ())
    assert not must_ask_torch(read_survey("os Linux\ntorch 2.13.0\n"), ())


def test_needed_disk_space_is_estimated_from_wheels():
    assert 1200 << 20 < needed_bytes(False, 200 << 20, 800 << 20, True) < 1400 << 20
    assert needed_bytes(True, 1 << 20, 1 << 20, False) > needed_bytes(False, 1 << 20, 1 << 20, False)


def test_script_arguments_are_quoted():
    script = Script(("survey",), {"folder": "/x/it's", "wanted": ""})
    assert "folder='/x/it'\"'\"'s'\n" in script.text()
    command = run_command(Destination("alice@box"), "/run/socket", 100)
    assert not any("it's" in word for word in command)
    assert command[-2] == "alice@box"
    opened = open_command(Destination("alice@box", ("-p", "2222")), "/run/socket", asks=False)
    assert opened[:3] == ["ssh", "-p", "2222"]
    assert "BatchMode=yes" in opened


def test_reconnect_pauses_grow_and_refusal_is_final():
    pauses = [0.5]
    while len(pauses) < 10:
        pauses.append(next_pause(pauses[-1], 0.0))
    assert pauses[-1] == 60.0
    assert next_pause(60.0, 3600.0) == 0.5
    assert is_final("alice@box: Permission denied (publickey).")
    assert not is_final("ssh: connect to host box port 22: No route to host")


def test_broken_connection_differs_from_failed_step():
    assert failure("looking", "box", ScriptResult(255, "", "")).code == "transport"
    told = failure("creating the environment", "box", ScriptResult(5, "", "one\n\nNo space left on device\n"))
    assert told.code == "startup"
    assert "No space left on device" in str(told)
    assert "--wheels DIR" in str(failure("creating the environment", "box", ScriptResult(6, "", "")))


def test_server_packages_are_sent_from_checkout():
    projects, _ = _projects()
    folders = {project.name: project.folder for project in projects}
    for name in ("djinn", "djinn-commands", "djinn-server", "djinn-tcp"):  # jobs may call `djinn run` there
        project = tomllib.loads((folders[name] / "pyproject.toml").read_text())["project"]
        assert project["name"] == name
    assert len(projects) == len(folders)


def test_folder_of_wheels_without_the_server_is_refused(tmp_path):
    for name in ("djinn", "djinn_tcp"):
        (tmp_path / f"{name}-26.11.0-py3-none-any.whl").touch()
    with pytest.raises(djinn.errors.ConfigurationError, match="none of djinn-server, which the server there needs"):
        find_wheels(tmp_path, tmp_path)
    (tmp_path / "djinn_server-26.11.0-py3-none-any.whl").touch()
    assert find_wheels(tmp_path, tmp_path).named("djinn-server")


def test_wheels_are_downloaded_for_remote_platform():
    options = platform_options(Survey(machine="aarch64", libc="glibc 2.28"), Python((3, 12, 1), "/p"))
    assert "--python-version=3.12" in options
    assert "--platform=manylinux_2_28_aarch64" in options
    assert "--platform=manylinux_2_29_aarch64" not in options


def test_job_list_fields_are_parsed():
    text = "b-1\trunning\t\t20\t\t50\ttrain.py --lr 1\na-1\tfailed\t3\t10\t15\t50\tt.py\nnoise\n"
    first, second = read_jobs(text)
    assert (first.id, first.code, first.ended - first.begun, first.is_over) == ("a-1", 3, 5, True)
    assert (second.id, second.code, second.ended - second.begun, second.is_over) == ("b-1", None, 30, False)
    assert second.exit_code == 1


def test_starting_job_is_tolerated_in_list(tmp_path):
    for job, state in (("a-1", ""), ("b-1", "running"), ("c-1", "")):
        folder = tmp_path / "jobs" / job
        folder.mkdir(parents=True)
        (folder / "state").write_text(state)
        (folder / "pid").write_text(str(os.getpid()))
        (folder / "begun").write_text("" if job == "c-1" else "10\n")
    script = Script(("jobs",), {"folder": str(tmp_path), "job": ""}).text().replace("grep -q", "true")
    listed = subprocess.run(["sh"], input=script, capture_output=True, text=True, check=True).stdout
    assert [(job.id, job.state) for job in read_jobs(listed)] == [("a-1", "preparing"), ("b-1", "running")]


def test_invalid_server_addresses_are_skipped():
    assert port_of(("unix:///s", "tcp://[", "tcp://box:99999999", "tcp://box", "tcp://127.0.0.1:77")) == 77
    assert port_of(("http://box:80",)) is None


@pytest.mark.parametrize(
    "line", ["a\tdone\tx\t1\t2\t3\tc", "a\tdone\t0\t1\t\t9" + 30 * "9" + "\tc", "a\x1b[2J\tdone\t0\t1\t2\t3\tc"]
)
def test_invalid_job_list_is_refused(line):
    with pytest.raises(ValueError, match="is not a valid line of the job list") as refused:
        read_jobs(line)
    assert str(refused.value).isprintable()


def test_remote_text_cannot_control_the_terminal():
    assert ScriptResult(1, "", "\x1b]0;title\x07gone\n").error_tail == r"\x1b]0;title\x07gone"
    (job,) = read_jobs("a\tdone\t0\t1\t2\t3\trm\x1b[2J")
    assert job.command == r"rm\x1b[2J"
    assert read_survey("os \x1b[2J\nmachine m").lines()[0] == r"\x1b[2J on m"
    text = LogEscaper()
    shown = [text.add(piece) for piece in (b"50 %\r\xc3", b"\xa9\x1b[3", b"1mred\x1b[0m\n\x1b", b"]52;c;\x07", b"\x1b")]
    assert "".join([*shown, text.add(b"", last=True)]) == "50 %\ré\x1b[31mred\x1b[0m\n\\x1b]52;c;\\x07\\x1b"


@pytest.mark.parametrize(
    "name",
    [".env", ".env.local", "server.pem", "ID_RSA", "id_ed25519", "my.key", ".netrc", ".aws", "client_secret_1.json"],
)
def test_secret_names_are_recognised(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["train.py", ".env.example", "id_ed25519.pub", "environment.yml", "keys.py", "tokenizer.json", "idea.md"]
)
def test_other_names_are_not_secret(name):
    assert not is_secret(name)


def make_files(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("x" * 10)


def test_project_files_are_selected(tmp_path):
    make_files(
        tmp_path,
        "train.py",
        "src/a/__init__.py",
        "data/big.bin",
        "data/keep.txt",
        "logs/run.log",
        "logs/deep/keep.log",
        ".env",
        "conf/db.pem",
    )
    make_files(
        tmp_path,
        ".git/config",
        "env/pyvenv.cfg",
        "env/bin/python",
        "src/__pycache__/a.pyc",
        ".ssh/id_rsa",
        "node_modules/x.js",
    )
    (tmp_path / ".gitignore").write_text("data/*\n!data/keep.txt\n*.log\n/build/\n")
    (tmp_path / "logs" / "deep" / ".gitignore").write_text("!keep.log\n")
    (tmp_path / "inside").symlink_to("train.py")
    (tmp_path / "outside").symlink_to("/etc/hostname")
    found = find_files(tmp_path)
    assert set(found.files) == {
        ".gitignore",
        "data/keep.txt",
        "inside",
        "logs/deep/.gitignore",
        "logs/deep/keep.log",
        "src/a/__init__.py",
        "train.py",
    }
    assert set(found.secrets) == {".env", ".ssh", "conf/db.pem"}
    assert found.links == ("outside",)
    assert found.ignored == 2
    assert found.files["train.py"] == 10
    assert {"data/big.bin", ".env"} <= set(find_files(tmp_path, ["/data/big.bin", ".env"]).files)


def test_oversized_project_names_largest_files(tmp_path):
    make_files(tmp_path, "train.py", "model.bin")
    assert too_much(find_files(tmp_path), 20) == ""
    assert "model.bin" in too_much(find_files(tmp_path), 19)
    assert "--limit-mib" in too_much(find_files(tmp_path), 19)


def test_home_directory_is_refused_as_project(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_files(tmp_path, "train.py")
    assert "is not a project" in too_much(find_files(tmp_path), 1000)


def test_project_requirements_are_found(tmp_path):
    assert project_requirements(tmp_path) == ()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["attrs>=23", "rich"]\n')
    assert project_requirements(tmp_path) == ("attrs>=23", "rich")
    (tmp_path / "requirements.txt").write_text("# for training\nnumpy<3\n\n")
    assert project_requirements(tmp_path) == ("numpy<3",)
    (tmp_path / "requirements.txt").unlink()
    (tmp_path / "pyproject.toml").write_text("[project\n")
    with pytest.raises(ValueError, match=r"pyproject\.toml"):
        project_requirements(tmp_path)


def test_project_with_unreadable_gitignore_is_sent(tmp_path):
    make_files(tmp_path, "train.py", ".git")  # in a worktree, `.git` is a file
    (tmp_path / ".gitignore").symlink_to("nowhere")
    assert list(find_files(tmp_path).files) == [".gitignore", "train.py"]


def test_archive_is_anonymous_and_ends_with_mark(tmp_path):
    make_files(tmp_path, "train.py")
    packed = io.BytesIO()
    archive({"files/train.py": tmp_path / "train.py"}, {"job.json": "{}"})(packed)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archived:
        members = archived.getmembers()
    assert [member.name for member in members] == ["job.json", "files/train.py", "whole"]
    assert {(member.uid, member.gid, member.uname) for member in members} == {(0, 0, "")}


def test_files_named_by_requirements(tmp_path, monkeypatch):
    make_files(tmp_path, "files/own.whl", "files/later/base.txt", "files/later/more.txt", "files/limits.txt")
    (tmp_path / "files/later/base.txt").write_text("-r more.txt\nattrs\n")
    (tmp_path / "files/later/more.txt").write_text("--requirement=base.txt\n-c ../limits.txt # versions\n")
    monkeypatch.chdir(tmp_path)
    found = named_files(["own.whl", "rich", "-r later/base.txt"])
    assert [path.name for path in found] == ["own.whl", "base.txt", "more.txt", "limits.txt"]


def test_file_names_are_escaped():
    assert _paths_text(["a\n\x1b[2J", "b\udcff"]) == "a\\n\\x1b[2J, b\\udcff"
