"""Facts about the remote machine, and pure decisions based on them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import attrs

from djinn_commands.connect.shown import one_line

KIB: Final = 1024
GIB: Final = 1 << 30
OLDEST: Final = (3, 11)
# Unpacked bytes of an environment if the wheels do not tell: with PyTorch for CPUs, and for CUDA with its libraries.
_CPU_SIZE: Final = 2 * GIB
_CUDA_SIZE: Final = 9 * GIB
_FURTHER: Final = 1.3  # disk blocks, compiled modules, pip itself, logs


@attrs.frozen
class Python:
    """A remote Python interpreter."""

    version: tuple[int, int, int]
    path: str

    @property
    def minor(self) -> tuple[int, int]:
        """Return its minor version, such as (3, 12). Wheels are built for a minor version."""
        return self.version[:2]

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.version))} at {self.path}"


@attrs.frozen
class Survey:
    """Findings of the script `look.sh` about the remote machine.

    Attributes:
        free: free bytes on the disk; None if unknown.
        memory: bytes of memory; None if unknown.
        gpus: name, memory and driver of each GPU, as nvidia-smi writes them.
        installed: stamp of an existing environment; empty without an environment.
        unwritable: a folder without write permission.
        torch: PyTorch's version and CUDA version in that environment, ending with `True` if CUDA works.
        options: options of the server's last start, as words of sh.
    """

    system: str = ""
    machine: str = ""
    release: str = ""
    libc: str = ""
    folder: str = ""
    free: int | None = None
    memory: int | None = None
    pythons: tuple[Python, ...] = ()
    gpus: tuple[str, ...] = ()
    installed: str = ""
    unwritable: str = ""
    torch: str = ""
    options: str = ""

    def lines(self) -> list[str]:
        """Return the findings, for the user."""
        facts = [f"{self.release or self.system} on {self.machine}"]
        facts.append("Python " + (", ".join(map(str, self.pythons)) or "none"))
        facts += [f"GPU {gpu}" for gpu in self.gpus] or ["no GPU that nvidia-smi shows"]
        sizes = [(self.memory, "memory"), (self.free, f"free at {self.folder}")]
        facts.append(", ".join(f"{size / GIB:.1f} GiB {what}" for size, what in sizes if size is not None))
        return facts


def read_survey(text: str) -> Survey:
    """Parse the output of `look.sh`, and escape it for a terminal."""
    facts: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        facts.setdefault(key, []).append(one_line(value.strip()))

    def one(key: str) -> str:
        return facts.get(key, [""])[0]

    return Survey(
        one("os"),
        one("machine"),
        one("release"),
        one("libc"),
        one("folder"),
        int(one("free_kib")) * KIB if one("free_kib").isdecimal() else None,
        int(one("memory_kib")) * KIB if one("memory_kib").isdecimal() else None,
        tuple(_pythons(facts.get("python", ()))),
        tuple(facts.get("gpu", ())),
        one("installed"),
        one("unwritable"),
        one("torch"),
        one("options"),
    )


def _pythons(lines: Iterable[str]) -> Iterable[Python]:
    paths: set[str] = set()
    for line in lines:
        match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+) (/.+)", line)
        if match is not None and match[4] not in paths:
            paths.add(match[4])
            yield Python((int(match[1]), int(match[2]), int(match[3])), match[4])


def choose_python(pythons: Iterable[Python], here: tuple[int, int]) -> Python | None:
    """Return the interpreter for the environment: the local minor version, which local wheels fit, or else the newest."""
    fit = [one for one in pythons if one.minor >= OLDEST]
    same = [one for one in fit if one.minor == here]
    return max(same or fit, key=lambda one: one.version, default=None)


def must_ask_torch(survey: Survey, serve: Iterable[str] | None) -> bool:
    """Return True if a GPU is to be served and the remote PyTorch has not reported that it can use one.

    Args:
        survey: the findings.
        serve: options of `djinn serve`; None: the options of its last start.
    """
    options = survey.options.split() if serve is None else serve
    return bool(survey.gpus) and not survey.torch.endswith(" True") and "cpu" not in options


def needed_room(gpus: bool, packed: int, unpacked: int, has_torch: bool) -> int:
    """Return the bytes that the environment takes while it is created.

    Args:
        gpus: True if the machine has GPUs, so that pip installs PyTorch for CUDA.
        packed: bytes of the sent wheels.
        unpacked: bytes of the files in them.
        has_torch: True if PyTorch is among them, so that nearly all packages are.
    """
    if has_torch:
        return int((packed + unpacked) * _FURTHER)
    return _CUDA_SIZE if gpus else _CPU_SIZE


def objection(survey: Survey, here: tuple[int, int], needed: int) -> str:
    """Return the reason why no environment can be created, with advice; empty if it can."""
    if survey.system != "Linux":
        return f"the machine runs {survey.system or 'an unknown system'}, and `djinn serve` was tried on Linux only"
    if choose_python(survey.pythons, here) is None:
        versions = ", ".join(map(str, survey.pythons)) or "none"
        return (
            f"no Python {OLDEST[0]}.{OLDEST[1]} or newer was found on the machine (found: {versions}). Install one, which needs no root with uv "
            "(`uv python install`) or conda, and name it with --python PATH if it is not found then"
        )
    if survey.unwritable:
        return f"you cannot write to {survey.unwritable} there: name another folder with --folder"
    if survey.free is not None and survey.free < needed and not survey.installed:
        return (
            f"{survey.folder} there has {survey.free / GIB:.1f} GiB free, and PyTorch with Djinn takes about {needed / GIB:.1f}: make room, or "
            "name a folder on another disk with --folder"
        )
    return ""
