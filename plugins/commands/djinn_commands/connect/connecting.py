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
from djinn_commands.connect.shown import one_line
from djinn_commands.connect.ssh import (
    Destination,
    Done,
    Script,
    Source,
    SshConnection,
    control_command,
    forward_arguments,
    has_terminal,
    open_command,
    run_command,
)
from djinn_commands.connect.survey import (
    GIB,
    Python,
    Survey,
    choose_python,
    must_ask_torch,
    needed_room,
    objection,
    read_survey,
)
from djinn_commands.connect.wheels import Wheels, archive, find_wheels, missing, requirements, stamp_of, total, unpacked

if TYPE_CHECKING:
    from djinn import DjinnError
    from djinn.errors import ConfigurationError

_START_SECONDS: Final = 120
_NO_INDEX: Final = 6  # exit status of environment.sh
_HERE: Final = (sys.version_info.major, sys.version_info.minor)
_LOOK_AT_TORCH: Final = "import torch; print('torch', torch.__version__, 'for CUDA', torch.version.cuda, 'available:', torch.cuda.is_available())"
_VERSION_OF_TORCH: Final = "from importlib.metadata import version; print('torch', version('torch'))"

Say = Callable[[str], None]


@attrs.frozen
class Wish:
    """The request of the user.

    Attributes:
        record: the server, as named or as stored.
        python: its remote path; empty: searched.
        torch: the requirement.
        wheels: a folder of wheels.
        serve: further arguments of `djinn serve`; None: the present arguments.
        update: True to install the current wheels and restart the server.
        background: True to run without systemd.
        check: True to train a step at the end.
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


def connect(wish: Wish, say: Say) -> Record:
    """Do all missing steps until the server can be used under its name. Return its record.

    Raises:
        ConfigurationError: the user must change the request or the remote machine.
        StartupError: a step failed on the remote machine.
        TransportError: the connection failed or broke.
    """
    name = wish.record.name
    try:
        with filelock.FileLock(record_path(name, ".connect.lock"), timeout=0):
            if is_up(wish):
                return wish.record
            return _Connecting(wish, say).run()
    except filelock.Timeout:
        raise refused(f"another `djinn connect` is setting up {name!r}: wait for it") from None


def is_up(wish: Wish) -> bool:
    """Return True if the server runs, its tunnel is open and its log-in exists.

    Raises:
        ConfigurationError: the server runs with other options than the requested options.
    """
    record = wish.record
    state = tunnel_state(record.name)
    if wish.update or not record.login or not Path(record.login).exists() or state is None or not state.is_open:
        return False
    connection = SshConnection(record.destination, control_path(record.name))
    if not tunnel.is_kept(record.name):
        return False
    result = connection.run(Script(("server", "state"), record.place))
    facts = dict(line.partition(" ")[::2] for line in result.output.splitlines())
    if result.code or "server" not in facts:
        return False
    _check_options(wish, facts.get("options", ""))
    return True


def _check_options(wish: Wish, running: str) -> None:
    if wish.serve is not None and shlex.join(wish.serve) != running:
        raise refused(
            f"the server on {wish.record.host} runs with {running or 'no options'}, not with "
            f"{shlex.join(wish.serve) or 'none'}: stop it and its sessions with `djinn disconnect --stop "
            f"{wish.record.name}`, then repeat this command"
        )


class _Served(msgspec.Struct):
    """The fields of the remote connection file that this client reads."""

    urls: tuple[str, ...]
    token: str


class _Connecting:
    """A call of `djinn connect` with steps to do."""

    def __init__(self, wish: Wish, say: Say) -> None:
        self.wish = wish
        self.say: Say = lambda text: say(one_line(text))  # much of the text comes from the remote machine
        self.record = wish.record
        self.connection = SshConnection(wish.record.destination, control_path(wish.record.name))

    def run(self) -> Record:
        """Run the steps. Close the connection if no tunnel uses it."""
        try:
            return self._run_steps()
        finally:
            if not tunnel.is_kept(self.record.name):
                self.connection.close()

    def _run_steps(self) -> Record:
        self._open()
        survey = self._survey_machine()
        if not self.record.environment:
            install = self.wish.update or not survey.installed
            survey = self._install(survey) if install else self._ask_torch(survey)
            self._check_torch(survey)
        content = self._serve()
        self._tunnel(content.urls)
        self._log_in(content.token)
        save_record(self.record)
        if self.wish.check:
            with self._step("train a step there"):
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
            survey = read_survey(self._run("checking the machine", look_script(self.record, self.wish.python)))
            for line in survey.lines():
                self.say(f"    {line}")
        if survey.folder and not self.record.folder:
            self.record = msgspec.structs.replace(self.record, folder=survey.folder)
        return survey

    def _install(self, survey: Survey) -> Survey:
        torch = self.wish.torch or default_torch()
        with tempfile.TemporaryDirectory(prefix="djinn-wheels-") as folder:
            with self._step("find the wheels of Djinn"):
                wheels = find_wheels(self.wish.wheels, Path(folder))
                for reason in wheels.left_out:
                    self.say(f"    not sent: {reason}")
            has_torch = wheels.named("torch") is not None
            bytes_needed = needed_room(bool(survey.gpus), total(wheels.files), unpacked(wheels.files), has_torch)
            if reason := objection(survey, _HERE, bytes_needed):
                raise refused(f"{self.record.host} cannot serve: {reason}")
            python = choose_python(survey.pythons, _HERE)
            assert python is not None  # otherwise `objection` has returned a reason
            self._send(wheels)
            with self._step(f"make an environment with Python {python} and {torch}"):
                output = self._make(survey, python, wheels, torch, Path(folder))
                self.say(f"    PyTorch {output.partition(' ')[0]}")
        return attrs.evolve(survey, torch=output)

    def _send(self, wheels: Wheels) -> None:
        absent = missing(wheels, self._run("listing wheels", Script(("have",), self.record.place)))
        if not absent:
            return
        with self._step(f"send {len(absent)} wheels, {total(absent) / (1 << 20):.1f} MiB"):
            by_name = {file.name: file for file in sorted(absent, key=lambda file: file.stat().st_size)}
            self._run("sending wheels", Script(("receive",), self.record.place), archive(by_name))

    def _make(self, survey: Survey, python: Python, wheels: Wheels, torch: str, built: Path) -> str:
        # Import PyTorch meanwhile, because a later step needs it.
        threading.Thread(target=importlib.import_module, args=("torch",), daemon=True).start()
        gpus = bool(survey.gpus)
        result = self.connection.run(environment_script(self.record, python, wheels, torch, gpus=gpus))
        if result.code == _NO_INDEX:
            self.say("    no index there that has everything: the rest is downloaded here and sent")
            wheels = attrs.evolve(wheels, files=(*wheels.files, *download(survey, python, wheels, torch, built)))
            self._send(wheels)
            result = self.connection.run(environment_script(self.record, python, wheels, torch, gpus=gpus))
        if result.code:
            raise failure("creating the environment", self.record.host, result)
        return read_survey(result.output).torch

    def _ask_torch(self, survey: Survey) -> Survey:
        """Check the remote PyTorch again if no earlier check found a usable GPU to serve. Return the updated survey."""
        if not must_ask_torch(survey, self.wish.serve):
            return survey
        with self._step("ask PyTorch about the GPU"):
            output = self._run("asking PyTorch", Script(("torch",), {**self.record.place, "check": _LOOK_AT_TORCH}))
            survey = attrs.evolve(survey, torch=read_survey(output).torch)
            self.say(f"    PyTorch {survey.torch}")
            if not must_ask_torch(survey, self.wish.serve):
                self.say("    a running server keeps its options: --update restarts it")
        return survey

    def _check_torch(self, survey: Survey) -> None:
        """Raise `StartupError` if the remote PyTorch cannot use the remote GPU."""
        if must_ask_torch(survey, self.wish.serve):
            from djinn.errors import StartupError

            raise StartupError(
                f"{self.record.host} has a GPU ({survey.gpus[0]}: name, memory, driver), and its PyTorch cannot use it ({survey.torch}). "
                "Name a build that fits the driver: --update --torch REQUIREMENT, with its wheel in --wheels DIR or from an index that pip "
                "uses there. Or serve the CPU: `-- --device cpu`"
            )

    def _serve(self) -> _Served:
        with self._step("start the server, unless it runs"):
            script = serve_script(self.record, self.wish.serve, self.wish.update, self.wish.background)
            output = self._run("starting the server", script)
            head, _, content = output.partition("connection\n")
            self.say(f"    {'under systemd' if 'systemd' in head else 'in the background'}")
        try:
            return msgspec.json.decode(content, type=_Served)
        except msgspec.MsgspecError as error:
            from djinn.errors import StartupError

            raise StartupError(
                f"the server's connection file from {self.record.host} cannot be read: {error}"
            ) from error

    def _tunnel(self, urls: tuple[str, ...]) -> None:
        from djinn.errors import StartupError, TransportError

        remote = port_of(urls)
        if remote is None:
            raise StartupError(
                f"the server on {self.record.host} listens at {one_line(', '.join(urls))}, and not on a TCP port"
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
        raise TransportError(f"the tunnel to {self.record.host} cannot be opened: {reason}. Repeat this command")

    def _log_in(self, token: str) -> None:
        from djinn_client.runtime.connecting.logins import Login
        from djinn_commands.servers.logins import save_login
        from djinn_core.protocol.connection_file import ConnectionFile

        content = ConnectionFile((f"tcp://127.0.0.1:{self.record.local}",), token)
        path = save_login(Login(self.record.name, content))
        self.record = msgspec.structs.replace(self.record, login=str(path))


def open_or_raise(connection: SshConnection) -> None:
    """Open a connection unless it is open.

    Raises:
        TransportError: the connection cannot be opened.
    """
    host = connection.destination.host
    if reason := connection.open(asks=has_terminal()):
        from djinn.errors import TransportError

        raise TransportError(f"no connection to {host}: {reason}\n{_advice(reason, connection.destination)}")


def _advice(reason: str, destination: Destination) -> str:
    by_hand = shlex.join(["ssh", *destination.options, destination.host])
    if "Host key verification failed" in reason or "IDENTIFICATION" in reason:
        return f"Its host key is not known here, or it changed: `{by_hand}` shows it. Accept it there if it is right, and repeat this"
    if "Permission denied" in reason:
        return (
            f"It did not accept your key: name one with -i FILE or in ~/.ssh/config, put it there with `ssh-copy-id`, or add it to ssh-agent, "
            f"until `{by_hand}` works. Then repeat this"
        )
    return f"See if `{by_hand}` works, and repeat this"


def refused(text: str) -> ConfigurationError:
    """Return an error that the user can fix.

    Its class is imported late, because it imports PyTorch, which successful calls need not wait for.
    """
    from djinn.errors import ConfigurationError

    return ConfigurationError(text)


def failure(title: str, host: str, done: Done) -> DjinnError:
    """Return the error for a failed script."""
    from djinn.errors import StartupError, TransportError

    last_words = f"\n{done.last_words}" if done.last_words else ""
    if done.broken:
        return TransportError(f"the connection to {host} broke while {title}. Repeat the command{last_words}")
    if done.code == _NO_INDEX:
        return StartupError(
            f"{title} failed on {host}: pip reaches no index there, or it lacks a wheel. `pip download -d DIR` brings wheels for its Python, and "
            f"--wheels DIR sends them{last_words}"
        )
    return StartupError(
        f"{title} failed on {host} (exit status {done.code}); fix the reported error and repeat the command{last_words}"
    )


def download(survey: Survey, python: Python, wheels: Wheels, torch: str, built: Path) -> tuple[Path, ...]:
    """Download wheels that neither the remote machine nor `wheels` has, from the index that the local pip uses.

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
            f"pip finds no wheels for Python {python.version[0]}.{python.version[1]} on {survey.machine}, neither there nor here. Name a folder that "
            f"has them with --wheels DIR\n{process.stderr[-1500:]}"
        )
    own = {file.name for file in wheels.files}
    return tuple(sorted(file for file in into.glob("*.whl") if file.name not in own))


def platform_options(survey: Survey, python: Python) -> list[str]:
    """Return pip's options for the remote platform: its Python, and every manylinux tag that its C library allows."""
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
    """Return the port of a server's first TCP address; None if it has no TCP address."""
    for url in urls:
        with contextlib.suppress(ValueError):  # it is no URL
            parts = urlsplit(url)
            if parts.scheme == "tcp" and parts.port is not None:
                return parts.port
    return None


def look_script(record: Record, python: str) -> Script:
    """Return the script that surveys the remote machine."""
    return Script(("look",), {**record.place, "wanted": python})


def environment_script(record: Record, python: Python, wheels: Wheels, torch: str, *, gpus: bool = True) -> Script:
    """Return the script that creates the environment.

    `gpus`: True if the machine has GPUs, and the script must check that PyTorch can use them.
    """
    values = {
        "python": python.path,
        "version": ".".join(map(str, python.version)),
        "requirements": "\n".join(requirements(wheels, torch)),
        "stamp": stamp_of(wheels, torch),
        # All wheels may have been sent; then no distant index is needed.
        "offline": "yes" if wheels.named("torch") else "no",
        "check": _LOOK_AT_TORCH if gpus else _VERSION_OF_TORCH,
    }
    return Script(("environment",), {**record.place, **values})


def serve_script(record: Record, options: tuple[str, ...] | None, restart: bool, background: bool) -> Script:
    """Return the script that starts the server."""
    values = {
        "options": shlex.join(options or ()),
        "given": "no" if options is None else "yes",
        "restart": "yes" if restart else "no",
        "background": "yes" if background else "no",
        "seconds": str(_START_SECONDS),
    }
    return Script(("server", "serve"), {**record.place, **values})


def rehearse(wish: Wish) -> Iterator[str]:
    """Yield the commands of a first call, without running them. Results of earlier steps are in angle brackets."""
    record, control = wish.record, control_path(wish.record.name)
    python, wheels, torch = Python((0, 0, 0), "<the Python found>"), Wheels(()), wish.torch or default_torch()
    steps: list[tuple[str, Script]] = [("check the machine", look_script(record, wish.python))]
    if not record.environment:
        made = environment_script(record, python, wheels, torch)
        values = {
            "version": "<its version>",
            "requirements": f"{torch}\n<wheels of Djinn>",
            "stamp": "<digest of the wheels>",
        }
        steps += [
            ("which wheels are there", Script(("have",), record.place)),
            ("take the others, from standard input", Script(("receive",), record.place)),
            ("make an environment", attrs.evolve(made, values={**made.values, **values})),
        ]
    steps.append(("start the server", serve_script(record, wish.serve, wish.update, wish.background)))
    yield f"# connect, once\n{shlex.join(open_command(record.destination, control, asks=has_terminal()))}"
    for title, script in steps:
        command = shlex.join(run_command(record.destination, control, len(script.text())))
        yield f"# {title}\n{command} <<'END'\n{script.text()}END"
    forward = control_command(
        record.destination, control, "forward", *forward_arguments(record.local or 1, record.remote or 1)
    )
    yield f"# open the tunnel, between ports that are found out\n{shlex.join(forward)}"
    yield f"# keep it open\n{shlex.join([sys.executable, '-P', '-m', 'djinn_commands.connect.keeper', record.name])}"


def train_a_step(name: str) -> str:
    """Run one training step on the server and locally. Return a sentence about both.

    Raises:
        StartupError: the results differ.
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
            f"a step of training gives a loss of {there} there and {here} here: see `djinn doctor`"
        )
    device = torch.accelerator.current_accelerator()
    return f"loss {there:.6f} there, {here:.6f} here, on {device}, in {seconds:.1f} s with the first connection"


@contextlib.contextmanager
def connected(record: Record) -> Iterator[SshConnection]:
    """Yield a connection to a known machine: the tunnel's connection, or else a new connection for this block.

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
    """End the server.

    Raises:
        StartupError: the server does not end.
        TransportError: the connection failed or broke.
    """
    with connected(record) as connection:
        result = connection.run(Script(("server", "end"), record.place))
        if result.code:
            raise failure("ending the server", record.host, result)


def room(size: float) -> str:
    """Return a number of bytes as text for the user."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.1f} MiB"
