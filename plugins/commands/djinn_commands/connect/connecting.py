"""The steps of `djinn connect`. Each step checks the present state first, so the command can be repeated after a failure."""

from __future__ import annotations

import contextlib
import importlib
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import attrs
import filelock
import msgspec

from djinn_commands.connect import tunnel
from djinn_commands.connect.records import Record, control_path, record_path, save_record, tunnel_state
from djinn_commands.connect.ssh import (
    Destination,
    Script,
    ScriptResult,
    Source,
    SshConnection,
    control_command,
    forward_arguments,
    has_terminal,
    open_command,
    run_command,
)
from djinn_commands.connect.survey import (
    Python,
    Survey,
    choose_python,
    must_ask_torch,
    needed_bytes,
    objection,
    read_survey,
)
from djinn_commands.connect.terminal_escapes import one_line
from djinn_commands.connect.wheels import (
    Wheels,
    archive,
    find_wheels,
    missing_wheels,
    requirements,
    stamp_of,
    total_bytes,
    unpacked_bytes,
)

if TYPE_CHECKING:
    from djinn import DjinnError
    from djinn.errors import ConfigurationError

_START_SECONDS: Final = 120
_NO_INDEX: Final = 6  # exit status of environment.sh
_LOCAL_PYTHON: Final = (sys.version_info.major, sys.version_info.minor)
_CHECK_TORCH: Final = "import torch; print('torch', torch.__version__, 'for CUDA', torch.version.cuda, 'available:', torch.cuda.is_available())"
_PRINT_TORCH_VERSION: Final = "from importlib.metadata import version; print('torch', version('torch'))"

Say = Callable[[str], None]


@attrs.frozen
class ConnectRequest:
    """The arguments of one `djinn connect`.

    Attributes:
        record: the stored record of the server, or a new record.
        python: path of the remote Python for a new environment. If it is empty, the survey script searches one.
        torch: pip requirement for the remote PyTorch. If it is empty, the local version is required.
        wheels: local folder of wheels, or None to build Djinn's wheels from the checkout.
        serve: options for `djinn serve`, or None to keep the options of its last start.
        update: True to install the current wheels and restart the server.
        background: True to start the server without systemd.
        check: True to run a training step at the end.
    """

    record: Record
    python: str = ""
    torch: str = ""
    wheels: Path | None = None
    serve: tuple[str, ...] | None = None
    update: bool = False
    background: bool = False
    check: bool = True


def default_torch() -> str:
    """Return the requirement for the locally installed version of PyTorch, of any build."""
    return f"torch=={metadata.version('torch').partition('+')[0]}"


def connect(request: ConnectRequest, say: Say) -> Record:
    """Run the missing steps until programs can use the server by its name. Return the server's record.

    Raises:
        ConfigurationError: the user must change the request or the remote machine.
        StartupError: a step failed on the remote machine.
        TransportError: the connection failed or broke.
    """
    name = request.record.name
    try:
        with filelock.FileLock(record_path(name, ".connect.lock"), timeout=0):
            if is_up(request):
                return request.record
            return _Connecting(request, say).run()
    except filelock.Timeout:
        raise configuration_error(
            f"another `djinn connect` is setting up {name!r}: wait until it ends, then repeat this command"
        ) from None


def is_up(request: ConnectRequest) -> bool:
    """Return True if the server runs, its tunnel is open and its log-in exists.

    Raises:
        ConfigurationError: the server runs, and its options differ from the requested options.
    """
    record = request.record
    state = tunnel_state(record.name)
    if request.update or not record.login or not Path(record.login).exists() or state is None or not state.is_open:
        return False
    connection = SshConnection(record.destination, control_path(record.name))
    if not tunnel.is_kept(record.name):
        return False
    result = connection.run(Script(("server", "state"), record.script_variables))
    facts = dict(line.partition(" ")[::2] for line in result.output.splitlines())
    if result.code or "server" not in facts:
        return False
    _check_options(request, facts.get("options", ""))
    return True


def _check_options(request: ConnectRequest, running: str) -> None:
    if request.serve is not None and shlex.join(request.serve) != running:
        raise configuration_error(
            f"the server on {request.record.host} runs with {running or 'no options'}, and you asked for {shlex.join(request.serve)}: end the server "
            f"and its sessions with `djinn disconnect --stop {request.record.name}`, then repeat this command"
        )


class _RemoteConnectionFile(msgspec.Struct):
    """The fields that `djinn connect` reads from the server's connection file.

    Attributes:
        urls: addresses at which the server listens.
        token: token of the tenant.
    """

    urls: tuple[str, ...]
    token: str


class _Connecting:
    """Runs the steps of one `djinn connect`."""

    def __init__(self, request: ConnectRequest, say: Say) -> None:
        self.request = request
        self.say: Say = lambda text: say(one_line(text))  # much of the text comes from the remote machine
        self.record = request.record
        self.connection = SshConnection(request.record.destination, control_path(request.record.name))

    def run(self) -> Record:
        """Run the steps and return the server's record. Close the connection if no tunnel uses it."""
        try:
            return self._run_steps()
        finally:
            if not tunnel.is_kept(self.record.name):
                self.connection.close()

    def _run_steps(self) -> Record:
        self._open()
        survey = self._survey_machine()
        if not self.record.environment:
            install = self.request.update or not survey.installed
            survey = self._install(survey) if install else self._ask_torch(survey)
            self._check_torch(survey)
        content = self._serve()
        self._tunnel(content.urls)
        self._log_in(content.token)
        save_record(self.record)
        if self.request.check:
            with self._step("run a training step on the server"):
                self.say(f"    {train_a_step(self.record.name)}")
        return self.record

    @contextlib.contextmanager
    def _step(self, title: str) -> Iterator[None]:
        self.say(title)
        begun = time.monotonic()
        yield
        self.say(f"    {time.monotonic() - begun:.1f} s")

    def _run(self, title: str, script: Script, data: Source | None = None) -> str:
        result = self.connection.run(script, data)
        if result.code:
            raise failure(title, self.record.host, result)
        return result.output

    def _open(self) -> None:
        with self._step(f"connect to {self.record.host}"):
            open_or_raise(self.connection)

    def _survey_machine(self) -> Survey:
        with self._step("check the machine"):
            survey = read_survey(self._run("checking the machine", survey_script(self.record, self.request.python)))
            for line in survey.lines():
                self.say(f"    {line}")
        if survey.folder and not self.record.folder:
            self.record = msgspec.structs.replace(self.record, folder=survey.folder)
        return survey

    def _install(self, survey: Survey) -> Survey:
        torch = self.request.torch or default_torch()
        with tempfile.TemporaryDirectory(prefix="djinn-wheels-") as folder:
            with self._step("find the wheels of Djinn"):
                wheels = find_wheels(self.request.wheels, Path(folder))
                for reason in wheels.left_out:
                    self.say(f"    not sent: {reason}")
            has_torch = wheels.named("torch") is not None
            bytes_needed = needed_bytes(
                bool(survey.gpus), total_bytes(wheels.files), unpacked_bytes(wheels.files), has_torch
            )
            if reason := objection(survey, _LOCAL_PYTHON, bytes_needed):
                raise configuration_error(f"{self.record.host} cannot run a server: {reason}")
            python = choose_python(survey.pythons, _LOCAL_PYTHON)
            assert python is not None  # otherwise `objection` has returned a reason
            self._send(wheels)
            with self._step(f"create an environment with Python {python} and {torch}"):
                output = self._make(survey, python, wheels, torch, Path(folder))
                self.say(f"    PyTorch {output.partition(' ')[0]}")
        return attrs.evolve(survey, torch=output)

    def _send(self, wheels: Wheels) -> None:
        absent = missing_wheels(wheels, self._run("listing wheels", Script(("have",), self.record.script_variables)))
        if not absent:
            return
        with self._step(f"send {len(absent)} wheels, {total_bytes(absent) / (1 << 20):.1f} MiB"):
            by_name = {file.name: file for file in sorted(absent, key=lambda file: file.stat().st_size)}
            self._run("sending wheels", Script(("receive",), self.record.script_variables), archive(by_name))

    def _make(self, survey: Survey, python: Python, wheels: Wheels, torch: str, built: Path) -> str:
        # Import PyTorch meanwhile, because a later step needs it.
        threading.Thread(target=importlib.import_module, args=("torch",), daemon=True).start()
        gpus = bool(survey.gpus)
        result = self.connection.run(environment_script(self.record, python, wheels, torch, gpus=gpus))
        if result.code == _NO_INDEX:
            self.say("    pip's index there lacks wheels: this machine downloads and sends them")
            wheels = attrs.evolve(wheels, files=(*wheels.files, *download(survey, python, wheels, torch, built)))
            self._send(wheels)
            result = self.connection.run(environment_script(self.record, python, wheels, torch, gpus=gpus))
        if result.code:
            raise failure("creating the environment", self.record.host, result)
        return read_survey(result.output).torch

    def _ask_torch(self, survey: Survey) -> Survey:
        """Ask the remote PyTorch about the GPU if a GPU is to be served and no earlier check found it usable.

        Return the survey, updated by the answer.
        """
        if not must_ask_torch(survey, self.request.serve):
            return survey
        with self._step("ask PyTorch about the GPU"):
            output = self._run(
                "asking PyTorch", Script(("torch",), {**self.record.script_variables, "check": _CHECK_TORCH})
            )
            survey = attrs.evolve(survey, torch=read_survey(output).torch)
            self.say(f"    PyTorch {survey.torch}")
            if not must_ask_torch(survey, self.request.serve):
                self.say("    a running server keeps its options until --update restarts it")
        return survey

    def _check_torch(self, survey: Survey) -> None:
        """Raise `StartupError` if a GPU is to be served and the remote PyTorch cannot use it."""
        if must_ask_torch(survey, self.request.serve):
            from djinn.errors import StartupError

            raise StartupError(
                f"PyTorch on {self.record.host} ({survey.torch}) cannot use the GPU (name, memory, driver: {survey.gpus[0]}). Repeat the command "
                "with `--update --torch REQUIREMENT` for a build that fits the driver; add `--wheels DIR` if pip's index there lacks it. Or "
                "serve the CPU with `-- --device cpu`"
            )

    def _serve(self) -> _RemoteConnectionFile:
        with self._step("start the server if it does not run"):
            script = serve_script(self.record, self.request.serve, self.request.update, self.request.background)
            output = self._run("starting the server", script)
            head, _, content = output.partition("connection\n")
            self.say(f"    {'under systemd' if 'systemd' in head else 'in the background'}")
        try:
            return msgspec.json.decode(content, type=_RemoteConnectionFile)
        except msgspec.MsgspecError as error:
            from djinn.errors import StartupError

            raise StartupError(
                f"the server's connection file on {self.record.host} is invalid ({error}): repeat the command with --update"
            ) from error

    def _tunnel(self, urls: tuple[str, ...]) -> None:
        from djinn.errors import StartupError, TransportError

        remote = port_of(urls)
        if remote is None:
            raise StartupError(
                f"the server on {self.record.host} listens at {one_line(', '.join(urls))}, which a tunnel cannot reach: remove the "
                "options after `--` that change its address or transport, then repeat the command with --update"
            )
        state = tunnel_state(self.record.name)
        if tunnel.is_kept(self.record.name) and state and state.is_open and state.remote == remote:
            return
        with self._step("open the tunnel"):
            reason = ""
            for local in (self.record.local or tunnel.free_port(), tunnel.free_port()):
                self.record = msgspec.structs.replace(self.record, local=local, remote=remote)
                save_record(self.record)
                open_or_raise(self.connection)
                begun = tunnel.start_keeper(self.record)
                if begun.is_open:
                    return
                reason = begun.reason
        raise TransportError(f"the tunnel to {self.record.host} cannot be opened: {reason}. Repeat the command")

    def _log_in(self, token: str) -> None:
        from djinn_client.runtime.connecting.logins import Login
        from djinn_commands.servers.logins import save_login
        from djinn_core.protocol.connection_file import ConnectionFile

        content = ConnectionFile((f"tcp://127.0.0.1:{self.record.local}",), token)
        path = save_login(Login(self.record.name, content))
        self.record = msgspec.structs.replace(self.record, login=str(path))


def open_or_raise(connection: SshConnection) -> None:
    """Open the connection if it is closed.

    Raises:
        TransportError: the connection cannot be opened.
    """
    host = connection.destination.host
    if reason := connection.open(asks=has_terminal()):
        from djinn.errors import TransportError

        raise TransportError(
            f"ssh cannot connect to {host}: {reason}\n{_connection_advice(reason, connection.destination)}"
        )


def _connection_advice(reason: str, destination: Destination) -> str:
    by_hand = shlex.join(["ssh", *destination.options, destination.host])
    if "Host key verification failed" in reason or "IDENTIFICATION" in reason:
        return f"The host key is unknown or has changed. Run `{by_hand}`, accept the key if it is right, and repeat the command"
    if "Permission denied" in reason:
        return (
            f"The host did not accept your key. Name a key with -i FILE or in ~/.ssh/config, install it with `ssh-copy-id`, or add it to "
            f"ssh-agent. When `{by_hand}` works, repeat the command"
        )
    return f"When `{by_hand}` works, repeat the command"


def configuration_error(text: str) -> ConfigurationError:
    """Return a `ConfigurationError`. Importing its class imports PyTorch, so successful calls do not import it."""
    from djinn.errors import ConfigurationError

    return ConfigurationError(text)


def failure(title: str, host: str, result: ScriptResult) -> DjinnError:
    """Return the error for a script that failed on `host`, with the end of the script's error output.

    `title`: the step as a gerund, such as "sending wheels".
    """
    from djinn.errors import StartupError, TransportError

    error_tail = f". The remote script wrote:\n{result.error_tail}" if result.error_tail else ""
    if result.broken:
        return TransportError(f"the connection to {host} broke while {title}: repeat the command{error_tail}")
    if result.code == _NO_INDEX:
        return StartupError(
            f"{title} on {host} failed: pip there reaches no index, or the index lacks a wheel. Download wheels for that machine with "
            f"`pip download -d DIR`, and repeat the command with `--wheels DIR`{error_tail}"
        )
    return StartupError(
        f"{title} on {host} failed with exit status {result.code}: fix the cause and repeat the command{error_tail}"
    )


def download(survey: Survey, python: Python, wheels: Wheels, torch: str, built: Path) -> tuple[Path, ...]:
    """Download PyTorch and the dependencies of Djinn's wheels for the remote machine, from the local pip's index.

    Args:
        survey: the remote machine.
        python: its Python.
        wheels: wheels that need not be downloaded.
        torch: pip requirement for PyTorch.
        built: the folder for the downloaded files.

    Returns:
        The files that `wheels` does not have.

    Raises:
        StartupError: pip does not find a wheel.
    """
    from djinn.errors import StartupError

    into = built / "downloaded"
    links = [f"--find-links={folder}" for folder in {file.parent for file in wheels.files}]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(into), "--only-binary=:all:", *links]
    command += [*platform_options(survey, python), torch, *(str(file) for file in wheels.own)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise StartupError(
            f"neither this machine's pip nor the remote pip finds all wheels for Python {python.version[0]}.{python.version[1]} on {survey.machine}. "
            f"Put the missing wheels into a folder and repeat the command with `--wheels DIR`. pip wrote:\n{process.stderr[-1500:]}"
        )
    own = {file.name for file in wheels.files}
    return tuple(sorted(file for file in into.glob("*.whl") if file.name not in own))


def platform_options(survey: Survey, python: Python) -> list[str]:
    """Return pip's options for the remote Python and for every manylinux tag that the remote C library supports."""
    major, minor = python.minor
    libc = survey.libc.rpartition(".")[2]
    newest = int(libc) if survey.libc.startswith("glibc 2.") and libc.isdecimal() else 17
    tags = [f"manylinux_2_{number}_{survey.machine}" for number in range(newest, 4, -1)]
    tags += [f"manylinux2014_{survey.machine}", f"manylinux1_{survey.machine}"]
    return [
        f"--python-version={major}.{minor}",
        "--implementation=cp",
        f"--abi=cp{major}{minor}",
        "--abi=abi3",
        "--abi=none",
        *(f"--platform={tag}" for tag in tags),
    ]


def port_of(urls: tuple[str, ...]) -> int | None:
    """Return the port of a server's first TCP address, or None if it has no TCP address."""
    for url in urls:
        with contextlib.suppress(ValueError):  # it is no URL
            parts = urlsplit(url)
            if parts.scheme == "tcp" and parts.port is not None:
                return parts.port
    return None


def survey_script(record: Record, python: str) -> Script:
    """Return the script that surveys the remote machine. If `python` is empty, the script searches interpreters."""
    return Script(("survey",), {**record.script_variables, "wanted": python})


def environment_script(record: Record, python: Python, wheels: Wheels, torch: str, *, gpus: bool = True) -> Script:
    """Return the script that creates the environment.

    Args:
        record: the server.
        python: the interpreter for the environment.
        wheels: wheels that were sent.
        torch: pip requirement for PyTorch.
        gpus: True if the machine has GPUs. The script then also reports whether PyTorch can use them.
    """
    values = {
        "python": python.path,
        "version": ".".join(map(str, python.version)),
        "requirements": "\n".join(requirements(wheels, torch)),
        "stamp": stamp_of(wheels, torch),
        # If PyTorch's wheel was sent, all other wheels probably were, and pip needs no index.
        "offline": "yes" if wheels.named("torch") else "no",
        "check": _CHECK_TORCH if gpus else _PRINT_TORCH_VERSION,
    }
    return Script(("environment",), {**record.script_variables, **values})


def serve_script(record: Record, options: tuple[str, ...] | None, restart: bool, background: bool) -> Script:
    """Return the script that starts the server if it does not run.

    Args:
        record: the server.
        options: options for `djinn serve`, or None for the options of its last start.
        restart: True to end a running server first.
        background: True to start the server without systemd.
    """
    values = {
        "options": shlex.join(options or ()),
        "given": "no" if options is None else "yes",
        "restart": "yes" if restart else "no",
        "background": "yes" if background else "no",
        "seconds": str(_START_SECONDS),
    }
    return Script(("server", "serve"), {**record.script_variables, **values})


def dry_run_commands(request: ConnectRequest) -> Iterator[str]:
    """Yield the commands of a first `djinn connect`. Angle brackets stand for results of earlier commands."""
    record, control = request.record, control_path(request.record.name)
    python, wheels, torch = Python((0, 0, 0), "<the Python found>"), Wheels(()), request.torch or default_torch()
    steps: list[tuple[str, Script]] = [("check the machine", survey_script(record, request.python))]
    if not record.environment:
        environment = environment_script(record, python, wheels, torch)
        values = {
            "version": "<its version>",
            "requirements": f"{torch}\n<wheels of Djinn>",
            "stamp": "<digest of the wheels>",
        }
        steps += [
            ("list the wheels that the machine has", Script(("have",), record.script_variables)),
            ("receive the other wheels on standard input", Script(("receive",), record.script_variables)),
            ("create an environment", attrs.evolve(environment, values={**environment.values, **values})),
        ]
    steps.append(("start the server", serve_script(record, request.serve, request.update, request.background)))
    yield f"# open one connection for all commands\n{shlex.join(open_command(record.destination, control, asks=has_terminal()))}"
    for title, script in steps:
        command = shlex.join(run_command(record.destination, control, len(script.text())))
        yield f"# {title}\n{command} <<'END'\n{script.text()}END"
    forward = control_command(
        record.destination, control, "forward", *forward_arguments(record.local or 1, record.remote or 1)
    )
    yield f"# open the tunnel (ports are chosen at run time)\n{shlex.join(forward)}"
    yield f"# keep the tunnel open\n{shlex.join([sys.executable, '-P', '-m', 'djinn_commands.connect.keeper', record.name])}"


def train_a_step(name: str) -> str:
    """Run one training step on the server and locally. Return a line with both losses and the time.

    Raises:
        StartupError: the losses differ by more than one part in a thousand.
    """
    import torch

    import djinn

    def trained(device: str) -> float:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
        inputs = torch.randn(8, 16)
        model, inputs = model.to(device), inputs.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(inputs).square().mean().backward()
        optimizer.step()
        return float(model(inputs).detach().square().mean())

    djinn.configure(servers=name)
    begun = time.monotonic()
    there, here = trained("remote_accelerator:0"), trained("cpu")
    seconds = time.monotonic() - begun
    if not torch.allclose(torch.tensor(there), torch.tensor(here), rtol=1e-3):
        raise djinn.errors.StartupError(
            f"the server {name!r} is connected, but a training step has the loss {there} on it and {here} locally: run `djinn doctor`"
        )
    device = torch.accelerator.current_accelerator()
    return f"loss {there:.6f} on {device}, {here:.6f} locally; {seconds:.1f} s with connection setup"


@contextlib.contextmanager
def connected(record: Record) -> Iterator[SshConnection]:
    """Yield the tunnel's connection to the machine, or open a connection for the block if no tunnel is open.

    Raises:
        TransportError: the connection cannot be opened.
    """
    connection = SshConnection(record.destination, control_path(record.name))
    was_open = connection.is_open()
    if not was_open:
        open_or_raise(connection)
    try:
        yield connection
    finally:
        if not was_open and not tunnel.is_kept(record.name):
            connection.close()


def end_server(record: Record) -> None:
    """End the server and its sessions.

    Raises:
        StartupError: the server does not end.
        TransportError: the connection failed or broke.
    """
    with connected(record) as connection:
        result = connection.run(Script(("server", "end"), record.script_variables))
        if result.code:
            raise failure("ending the server", record.host, result)
