"""Facts about the remote machine, and decisions that depend on these facts only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import attrs

from djinn_commands.connect.terminal_escapes import one_line

KIB: Final = 1024
GIB: Final = 1 << 30
OLDEST: Final = (3, 11)
# Unpacked bytes of an environment if the wheels do not tell: with PyTorch for CPUs, and for CUDA with its libraries.
_CPU_SIZE: Final = 2 * GIB
_CUDA_SIZE: Final = 9 * GIB
_OVERHEAD: Final = 1.3  # disk blocks, compiled modules, pip itself, logs


@attrs.frozen
class Python:
    """A remote Python interpreter: its version and absolute path."""

    version: tuple[int, int, int]
    path: str

    @property
    def minor(self) -> tuple[int, int]:
        """Return the major and minor version, such as (3, 12), for which wheels are built."""
        return self.version[:2]

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.version))} at {self.path}"


@attrs.frozen
class Survey:
    """Facts about the remote machine, from the script `survey.sh`. A text is empty if the fact is unknown.

    Attributes:
        system: operating system, such as `Linux`.
        machine: processor architecture, such as `x86_64`.
        release: name of the distribution.
        libc: C library and its version, such as `glibc 2.36`.
        folder: absolute path of Djinn's remote folder.
        free: free bytes on the disk of `folder`, or None if unknown.
        memory: bytes of main memory, or None if unknown.
        pythons: interpreters on the machine.
        gpus: name, memory and driver of each GPU, as nvidia-smi writes them.
        installed: stamp (`stamp_of`) of the environment that Djinn created, empty if it does not exist.
        unwritable: the folder without write permission that prevents the installation, or empty.
        torch: PyTorch's version and CUDA version in the environment, ending with `True` if CUDA works.
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
        """Return the facts as lines for the user."""
        facts = [f"{self.release or self.system} on {self.machine}"]
        facts.append("Python " + (", ".join(map(str, self.pythons)) or "none"))
        facts += [f"GPU {gpu}" for gpu in self.gpus] or ["no GPU that nvidia-smi shows"]
        sizes = [(self.memory, "memory"), (self.free, f"free at {self.folder}")]
        facts.append(", ".join(f"{size / GIB:.1f} GiB {what}" for size, what in sizes if size is not None))
        return facts


def read_survey(text: str) -> Survey:
    """Parse the output of `survey.sh`. All texts are escaped for a terminal."""
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


def choose_python(pythons: Iterable[Python], local_version: tuple[int, int]) -> Python | None:
    """Return the newest interpreter of the local minor version, for which local wheels fit, or else the newest of all.

    Return None if all interpreters are older than `OLDEST`. `local_version`: the local version, such as (3, 12).
    """
    fit = [one for one in pythons if one.minor >= OLDEST]
    same = [one for one in fit if one.minor == local_version]
    return max(same or fit, key=lambda one: one.version, default=None)


def must_ask_torch(survey: Survey, serve: Iterable[str] | None) -> bool:
    """Return True if a GPU is to be served and the remote PyTorch has not yet reported that CUDA works.

    Args:
        survey: facts about the machine.
        serve: options of `djinn serve`, or None for the options of its last start.
    """
    options = survey.options.split() if serve is None else serve
    return bool(survey.gpus) and not survey.torch.endswith(" True") and "cpu" not in options


def needed_bytes(gpus: bool, packed: int, unpacked: int, has_torch: bool) -> int:
    """Return the free bytes that the creation of the environment needs.

    Args:
        gpus: True if the machine has GPUs, so that pip installs PyTorch for CUDA.
        packed: bytes of the wheels to send.
        unpacked: bytes of the files in these wheels.
        has_torch: True if these wheels contain PyTorch. Then they contain nearly all packages.
    """
    if has_torch:
        return int((packed + unpacked) * _OVERHEAD)
    return _CUDA_SIZE if gpus else _CPU_SIZE


def objection(survey: Survey, local_version: tuple[int, int], needed: int) -> str:
    """Return why no environment can be created, with advice, or an empty string if it can.

    Args:
        survey: facts about the machine.
        local_version: the local version of Python, such as (3, 12).
        needed: free bytes that the creation needs.
    """
    if survey.system != "Linux":
        return f"it runs {survey.system or 'an unknown system'}, and `djinn serve` needs Linux: choose another machine"
    if choose_python(survey.pythons, local_version) is None:
        versions = ", ".join(map(str, survey.pythons)) or "none"
        return (
            f"it has no Python {OLDEST[0]}.{OLDEST[1]} or newer in the usual folders (found: {versions}). Install one, without root by uv "
            "(`uv python install`) or conda, or name its path with --python PATH"
        )
    if survey.unwritable:
        return f"you have no permission to write to its folder {survey.unwritable}: name another folder with --folder"
    if survey.free is not None and survey.free < needed and not survey.installed:
        return (
            f"the disk of its folder {survey.folder} has {survey.free / GIB:.1f} GiB free, and PyTorch with Djinn needs about "
            f"{needed / GIB:.1f} GiB: delete files, or name a folder on another disk with --folder"
        )
    return ""
