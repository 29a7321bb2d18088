"""Executors that run as system users of their tenants: what they can reach, and that sessions work as before. Needs root."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from configured import configured
from servers import wait_for

import djinn
import djinn_core
from djinn_core.errors import ConfigurationError, StartupError
from djinn_core.hookspecs.transports import Limits
from djinn_core.protocol.addresses import transport_for
from djinn_core.protocol.tls_transports import transports_trusting
from djinn_core.system import accounts
from djinn_core.system.accounts import missing_right
from djinn_core.wire.messages import PROTOCOL_VERSION, Attach, Hello, Welcome
from djinn_server.launch.system_users import open_users
from djinn_server.launch.token_table import change_table, create
from evaluation.chaos.disturbing import RestartedServer, executors, kill, resume_count
from evaluation.chaos.programs import PROGRAMS, REMOTE

USERS = {"alice": 70_001, "bob": 70_002}
VARIABLES = dict.fromkeys(
    ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NVIDIA_API_KEY", "DATABASE_URL", "PASSED_ON", "OMP_HARMLESS"), "x"
)
ROOM = 8192  # bytes of an answer of the op
# An op that runs code in the executor: what an attacker could do who has taken over the process.
INTRUDER = f"""
import contextlib, io, torch

@torch.library.custom_op("djinn_intruder::run", mutates_args=())
def run(code: torch.Tensor) -> torch.Tensor:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(bytes(code.tolist()).decode(), {{}})
    answer = said.getvalue().encode().ljust({ROOM})
    return torch.tensor(list(answer), dtype=torch.uint8)

run.register_fake(lambda code: code.new_empty({ROOM}))
"""
ATTEMPTS = """
import ctypes, errno, json, os
libc = ctypes.CDLL(None, use_errno=True)

def outcome(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"

def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")

def vm_read(process):
    memory = (ctypes.c_char * 8)()
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(memory), 8)
    checked(libc.process_vm_readv(process, vector, 1, vector, 1, 0))

actions = {f"read {path}": lambda path=path: open(path, "rb").read(1) for path in FILES}
actions |= {f"list {path}": lambda path=path: os.listdir(path) for path in FOLDERS}
for process in PROCESSES:
    actions[f"signal {process}"] = lambda process=process: os.kill(process, 0)
    actions[f"ptrace {process}"] = lambda process=process: checked(libc.ptrace(16, process, 0, 0))
    actions[f"memory {process}"] = lambda process=process: vm_read(process)
    actions[f"environment {process}"] = lambda process=process: open(f"/proc/{process}/environ", "rb").read(1)
print(json.dumps({name: outcome(action) for name, action in actions.items()}))
"""

PRIVATE = [
    p for start in (sys.prefix, djinn_core.__file__) for p in Path(start).parents if not p.stat().st_mode & 0o001
]
pytestmark = [
    pytest.mark.skipif(bool(missing_right()), reason=f"this process {missing_right()}"),
    pytest.mark.skipif(bool(PRIVATE), reason=f"other users may not enter {PRIVATE}"),
]


def reaching(folder):
    """Return a command prefix in whose mount namespace other users can run this Python, also if it lies in root's home folder."""
    python = Path(sys.executable).resolve()
    closed = [parent for parent in python.parents if not parent.stat().st_mode & 0o001]
    if not closed:
        return ()
    (home,) = closed
    there, held = home / python.relative_to(home).parts[0], folder / "held"
    held.mkdir()
    steps = [
        f"mount --bind {there} {held}", f"mount -t tmpfs -o mode=755 none {home}", f"mkdir {there}", f"mount --bind {held} {there}"
    ]  # fmt: skip
    return ("unshare", "--mount", "sh", "-ec", "; ".join([*steps, 'exec "$@"']), "sh")


@pytest.fixture(scope="module")
def tenant_server():
    """Return a server with two tenants that have system users, and the tenants' tokens."""
    folder = Path(
        tempfile.mkdtemp(prefix="djinn-users-", dir="/var/tmp")
    )  # other users may not enter the folders of pytest
    folder.chmod(0o711)
    (folder / "importable").mkdir(mode=0o755)
    module = folder / "importable" / "djinn_intruder.py"
    module.write_text(INTRUDER)
    specification = importlib.util.spec_from_file_location("djinn_intruder", module)
    specification.loader.exec_module(importlib.util.module_from_spec(specification))
    table, tokens = folder / "tokens.json", {}
    with change_table(table) as change:
        for tenant in (*USERS, "carol"):
            change.table, _, tokens[tenant] = create(change.table, tenant, 0.0)
    options = ["--token-file", str(table), "--tls-self-signed", "--operators", "module:djinn_intruder"]
    options += ["--tenant-dir", str(folder / "tenants"), "--lease-seconds", "600"]
    options += ["--pass-variable", "HF_TOKEN@alice", "--pass-variable", "PASSED_*"]
    options += [word for tenant, user in USERS.items() for word in ("--tenant-user", f"{tenant}={user}")]
    environment = {"PYTHONPATH": str(module.parent), "DJINN_TOKEN": "a secret of the operator, long enough"} | VARIABLES
    server = RestartedServer(folder / "server", options, environment, prefix=reaching(folder))
    server.start()
    yield server, tokens
    server.stop()
    shutil.rmtree(folder)


def connect_tenant(tenant_server, tenant):
    server, tokens = tenant_server
    given = {
        "servers": [server.server.urls["tcps"]],
        "tls_fingerprints": [server.server.connection.fingerprint],
        "disable": ("local",),
    }
    return configured(token=tokens[tenant], **given)


def run_inside(code):
    """Run code in the executor, and return what it printed."""
    data = torch.tensor(list(code.encode()), dtype=torch.uint8).to(REMOTE)
    return bytes(torch.ops.djinn_intruder.run(data).cpu().tolist()).decode().strip()


def attempt(files=(), folders=(), processes=()):
    given = f"FILES = {[*map(str, files)]}\nFOLDERS = {[*map(str, folders)]}\nPROCESSES = {[*processes]}\n"
    return json.loads(run_inside(given + ATTEMPTS))


def status_of(process):
    lines = [Path(task, "status").read_text().splitlines() for task in Path(f"/proc/{process}/task").iterdir()]
    return [dict(line.split(":\t", 1) for line in task if ":\t" in line) for task in lines]


def test_executor_runs_with_rights_of_its_tenant_user_only(tenant_server):
    with connect_tenant(tenant_server, "alice"):
        djinn.init()
        (process,) = executors()
        for task in status_of(process):
            assert set(task["Uid"].split()) == set(task["Gid"].split()) == {"70001"}
            assert not task["Groups"].split()
            assert int(task["CapEff"], 16) == int(task["CapPrm"], 16) == 0
            assert task["NoNewPrivs"] == "1"
            assert task["Seccomp"] == ("2" if importlib.util.find_spec("pyseccomp") else "0")


def test_executor_has_no_terminal_and_no_packages_of_its_user(tenant_server):
    with connect_tenant(tenant_server, "alice"):
        said = run_inside("import os, sys; print(os.getsid(0) == os.getpid(), sys.flags.no_user_site)")
        assert said == "True 1"


@pytest.mark.parametrize(("tenant", "more"), [("alice", {"HF_TOKEN"}), ("bob", set())])
def test_executor_gets_harmless_and_passed_variables_only(tenant_server, tenant, more):
    with connect_tenant(tenant_server, tenant):
        names = set(run_inside("import os; print(*os.environ)").split())
        assert names & VARIABLES.keys() == {"PASSED_ON", "OMP_HARMLESS"} | more
        assert {"PATH", "PYTHONPATH", "HOME", "USER"} <= names
        assert not [name for name in names if name.startswith("DJINN_")]


def test_executor_writes_to_a_pipe_that_the_gateway_logs(tenant_server):
    server, _ = tenant_server
    with connect_tenant(tenant_server, "bob"):
        written = "forged\x1b[2J line"
        said = run_inside(
            f"import os; os.write(2, {written!r}.encode() + bytes([10])); print(os.readlink('/proc/self/fd/2'))"
        )
        assert said.startswith("pipe:")
    wait_for(lambda: "forged" in server.server.log, "the line in the log of the gateway")
    (line,) = [line for line in server.server.log.splitlines() if "forged" in line]
    assert "an executor wrote" in line
    assert "tenant=bob" in line
    assert "\x1b" not in line


def test_relay_connects_to_no_socket_of_another_user(tenant_server, registry, ask):
    server, tokens = tenant_server
    place = server.folder.parent / "victim.sock"
    victim = socket.socket(socket.AF_UNIX)
    victim.bind(str(place))
    victim.listen()
    victim.setblocking(False)
    url, fingerprint = server.server.urls["tcps"], server.server.connection.fingerprint
    transport = transport_for(url, transports_trusting(registry.transports, fingerprint))

    def relayed():
        connection = transport.connect(url, Limits(), 60)
        assert isinstance(ask(connection, Hello(PROTOCOL_VERSION, tokens["alice"], "", "")), Welcome)
        answer = ask(connection, Attach("forged", ""))
        connection.close()
        return answer.reason

    try:
        with connect_tenant(tenant_server, "alice"):
            assert "ticket" in relayed(), "as the executor says"
            find = f"import glob, os; (at,) = [p for p in glob.glob('{tempfile.gettempdir()}/djinn-run-*/executor.sock') if os.stat(os.path.dirname(p)).st_uid == os.getuid()]; "
            run_inside(f"{find}os.rename(at, at + '.kept'); os.symlink({str(place)!r}, at)")
            assert "cannot be reached" in relayed()
            run_inside(f"{find.replace('stat(', 'lstat(')}os.replace(at + '.kept', at)")
            assert "ticket" in relayed()
        with pytest.raises(BlockingIOError):
            victim.accept()
    finally:
        victim.close()


def test_executor_reaches_nothing_of_other_tenants_or_of_the_gateway(tenant_server):
    server, _ = tenant_server
    tenants = server.folder.parent / "tenants"
    with connect_tenant(tenant_server, "bob"):
        kept = torch.arange(1000.0).to(REMOTE)
        djinn.synchronize()
        victims = [*executors(), server.server.process.pid]
        (journal,) = (tenants / "bob" / "journals").glob("*.journal")
        files = [journal, server.folder.parent / "tokens.json", server.state / "tls" / "key.pem", server.server.file]
        folders = [tenants / "bob", tenants / "bob" / "journals", server.state, tenants]
        assert set(attempt([journal], folders[:2], executors()).values()) <= {"done", "EPERM"}, (
            "bob's own files and process"
        )
        assert kept.sum().item() == 499500.0
    server_files = [path for path in files if path.exists()]
    with connect_tenant(tenant_server, "alice"):
        torch.ones(1, device=REMOTE).item()
        (own,) = (tenants / "alice" / "journals").glob("*.journal")
        assert attempt([own], [own.parent]) == {f"read {own}": "done", f"list {own.parent}": "done"}
        found = attempt(server_files, folders, [pid for pid in victims if Path(f"/proc/{pid}").exists()])
        assert len(found) == len(server_files) + len(folders) + 8
        assert set(found.values()) <= {"EACCES", "EPERM"}, found


def test_model_runs_and_survives_the_gateways_and_the_executors_end(tenant_server):
    server, _ = tenant_server
    with connect_tenant(tenant_server, "alice"):
        expected = PROGRAMS["train"](lambda _: None)
        before = resume_count()
        strikes = {5: server.restart, 25: lambda: kill(executors())}
        found = PROGRAMS["train"](lambda step: step in strikes and strikes[step]())
        server.join()
        assert found == expected
        assert resume_count() >= before + 2
        (process,) = executors()
        assert status_of(process)[0]["Uid"].split()[0] == "70001"


def test_tenant_without_a_user_is_refused(tenant_server):
    with (
        connect_tenant(tenant_server, "carol"),
        pytest.raises(djinn.errors.AccessRefused, match=r"no system user for the tenant 'carol'.*--tenant-user"),
    ):
        djinn.init()


def test_missing_right_is_refused_at_start(tmp_path, monkeypatch):
    monkeypatch.setattr(accounts, "_NEEDED", {"CAP_OF_THE_FUTURE": 63})
    with pytest.raises(ConfigurationError, match=r"the gateway lacks CAP_OF_THE_FUTURE\. Run `djinn serve` as root"):
        open_users(["alice=70001"], tmp_path)


def test_folder_that_the_user_cannot_enter_is_refused_at_the_start(tmp_path):
    tmp_path.chmod(0o700)
    with pytest.raises(StartupError, match=rf"user 70001 cannot reach .*chmod o\+x {tmp_path}"):
        open_users(["alice=70001"], tmp_path / "tenants")


@pytest.mark.parametrize("flag", ["--models", "--save-weights"])
def test_server_refuses_weight_folder_that_a_user_cannot_enter(tmp_path, flag):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        (folder / "weights").mkdir(mode=0o700)
        folder.chmod(0o711)
        options = f"--device cpu --port 0 --state-dir {tmp_path} --tenant-dir {name}/tenants --tenant-user alice=70001 {flag} {name}/weights"
        command = [*reaching(folder), sys.executable, "-m", "djinn", "serve", *options.split()]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
        assert ended.returncode
        assert f"user 70001 cannot reach {folder}/weights/any" in " ".join(ended.stderr.split())


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["alice"], "must be TENANT=USER"),
        (["alice=no-such-user"], "'no-such-user', which does not exist: create it with `useradd"),
        (["alice=root"], "must not give a tenant the user or group of root"),
        (["alice=4294967295"], "use a number below 4294967295"),
        (["alice=4294967296"], "use a number below 4294967295"),
        (["alice=70001", "bob=70001"], "each needs its own user"),
        (["alice=70001", "alice=70002"], "twice"),
    ],
)
def test_invalid_users_are_refused_at_start(tmp_path, entries, message):
    with pytest.raises(ConfigurationError, match=message):
        open_users(entries, tmp_path / "tenants")
