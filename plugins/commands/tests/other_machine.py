"""A remote machine with OpenSSH's server: another user in a network namespace, without compilers and index."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import psutil

SSHD = next((path for path in ("/usr/sbin/sshd", "/usr/local/sbin/sshd") if Path(path).exists()), None)
SECONDS = 900.0
_COMPILERS = (
    "cc",
    "gcc",
    "g++",
    "c++",
    "c89",
    "c99",
    "clang",
    "make",
    "ld",
    "as",
    "cpp",
    "rustc",
    "cargo",
    "tcc",
    "x86_64-linux-gnu-",
    "aarch64-linux-gnu-",
)


def unavailable_reason() -> str:
    """Return why this machine cannot simulate another one, or an empty string."""
    if not os.environ.get("TEST_CONNECT"):
        return "`python -m evaluation connect` runs it"
    if os.getuid() != 0:
        return "it needs root, to make a user and a network namespace"
    if SSHD is None:
        return "there is no sshd: install openssh-server"
    absent = [name for name in ("ssh", "ssh-keygen", "ip", "useradd") if shutil.which(name) is None]
    return f"there is no {', '.join(absent)}" if absent else ""


@attrs.define
class Network:
    """Two network namespaces, joined by a virtual cable. The second namespace has no other network."""

    name: str
    address: str

    def close(self) -> None:
        subprocess.run(["ip", "netns", "delete", self.name], check=False)


def make_network() -> Network:
    """Return a network namespace with an address that is reachable from this process."""
    name = f"djt{secrets.token_hex(3)}"
    number = secrets.randbelow(200) + 20
    here, there = f"10.213.{number}.1", f"10.213.{number}.2"
    for command in (
        f"ip netns add {name}",
        f"ip link add {name}a type veth peer name {name}b",
        f"ip link set {name}b netns {name}",
        f"ip address add {here}/30 dev {name}a",
        f"ip link set {name}a up",
        f"ip -n {name} address add {there}/30 dev {name}b",
        f"ip -n {name} link set {name}b up",
        f"ip -n {name} link set lo up",
    ):
        subprocess.run(command.split(), check=True)
    return Network(name, there)


class OtherMachine:
    """A user of a machine, with sshd. `size`: MiB of the home directory, which is then in memory."""

    def __init__(self, network: Network, size: int = 0) -> None:
        self.network = network
        self.folder = Path(tempfile.mkdtemp(prefix="djinn-connect-test-"))
        self.folder.chmod(0o755)
        self.user = network.name + secrets.token_hex(1)
        self.home = self.folder / "home"
        self.process: subprocess.Popen[bytes] | None = None
        if size:
            self.home.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m,mode=755", "tmpfs", self.home], check=True)
        self.size = size
        subprocess.run(
            [
                "useradd",
                "--no-create-home",
                "--home-dir",
                self.home,
                "--shell",
                "/bin/sh",
                "--password",
                "*",
                self.user,
            ],
            check=True,
        )
        self.home.mkdir(exist_ok=True)
        for name in ("host", "key", "wrong"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        (self.folder / "known_hosts").write_text(f"{network.address} {(self.folder / 'host.pub').read_text()}")
        (self.folder / "authorized").write_text((self.folder / "key.pub").read_text())
        self._own(self.home)
        self._make_binaries()
        self.start()

    def _own(self, path: Path) -> None:
        shutil.chown(path, self.user, self.user)

    def _make_binaries(self) -> None:
        """Make a search path with all programs but compilers. Tests can add commands to it."""
        self.binaries = self.folder / "bin"
        self.binaries.mkdir()
        for source in ("/usr/bin", "/bin", "/usr/sbin", "/sbin"):
            for path in Path(source).iterdir():
                left_out = path.name.startswith(_COMPILERS) or path.name in {"systemctl", "loginctl"}
                if not left_out and not (self.binaries / path.name).is_symlink():
                    (self.binaries / path.name).symlink_to(path)

    def start(self) -> None:
        """Start sshd in the machine's network namespace. It shares files with this machine, but no addresses."""
        config = self.folder / "config"
        config.write_text(
            f"ListenAddress {self.network.address}\nPort 22\nHostKey {self.folder}/host\nAuthorizedKeysFile {self.folder}/authorized\nUsePAM no\n"
            f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nStrictModes no\nPidFile none\nSetEnv PATH={self.binaries}\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.network.name, str(SSHD), "-D", "-e", "-f", config],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self.network.address, 22), timeout=5):
                return
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        """End sshd and all its connections. The user's background processes continue."""
        if self.process is not None:
            self.break_connections()
            self.process.terminate()
            self.process.wait()
            self.process = None

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the user."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.username() == self.user and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def break_connections(self) -> int:
        """Kill the processes of sshd that hold the user's connections."""
        count = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.name().startswith("sshd"):
                    process.kill()
                    count += 1
        return count

    def fill(self) -> None:
        """Fill the file system of the home directory."""
        with contextlib.suppress(OSError), (self.home / "filler").open("wb") as file:
            while True:
                file.write(bytes(1 << 20))

    def make_room(self) -> None:
        (self.home / "filler").unlink()

    def close(self) -> None:
        self.stop()
        for _ in range(3):
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.2)
        if self.size:
            subprocess.run(["umount", "-l", self.home], check=False)
        subprocess.run(["userdel", self.user], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


@attrs.frozen
class Laptop:
    """This machine, with its own configuration of Djinn. `machine`: the machine that is called `box`."""

    folder: Path
    machine: OtherMachine

    @property
    def variables(self) -> dict[str, str]:
        own = {f"XDG_{kind}_HOME": str(self.folder / kind.lower()) for kind in ("STATE", "CONFIG", "CACHE")}
        return {key: value for key, value in os.environ.items() if not key.startswith("DJINN_")} | own

    @property
    def destination(self) -> list[str]:
        """Return the arguments of `djinn connect`."""
        machine = self.machine
        known = f"UserKnownHostsFile={machine.folder / 'known_hosts'}"
        return [
            f"{machine.user}@{machine.network.address}",
            "--name",
            "box",
            "-i",
            str(machine.folder / "key"),
            "-o",
            known,
            "-o",
            "IdentitiesOnly=yes",
        ]

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        command = [str(Path(sysconfig.get_path("scripts"), "djinn")), *map(str, arguments)]
        return subprocess.Popen(
            command,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, *arguments: object, on: tuple[str, float, Callable[[], object]] | None = None
    ) -> tuple[int, str, str]:
        """Run a command. Return its exit status, output and errors. `on`: functions to call when a line with this beginning is printed."""
        process = self.start(*arguments)
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(process.stdout.read()))  # type: ignore[union-attr]
        reader.start()
        errors = []
        for line in process.stderr:  # type: ignore[union-attr]
            errors.append(line)
            if on is not None and line.startswith(on[0]):
                time.sleep(on[1])
                on[2]()
                on = None
        code = process.wait(SECONDS)
        reader.join()
        process.stdout.close()  # type: ignore[union-attr]
        process.stderr.close()  # type: ignore[union-attr]
        assert on is None, f"{on[0]} was not said: {''.join(errors)}"
        return code, said[0], "".join(errors)

    def succeed(self, *arguments: object) -> str:
        code, said, errors = self.run(*arguments)
        assert code == 0, (arguments, said, errors)
        return said


@contextlib.contextmanager
def other_machine(folder: Path, size: int = 0) -> Iterator[Laptop]:
    """Yield a remote machine, and this machine as its client."""
    network = make_network()
    try:
        machine = OtherMachine(network, size)
        laptop = Laptop(folder, machine)
        try:
            yield laptop
        finally:
            try:
                laptop.run("disconnect", "box")
            finally:
                machine.close()
    finally:
        network.close()
