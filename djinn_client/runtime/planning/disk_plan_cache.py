"""Plans on disk: a process finds those of the processes before it, and plans nothing that they have planned.

A file holds the plans that were made with the same versions, plugins, settings and device; `plans_file` names it by these. In
it plans stand under the content of their programs: ops, data flow, deaths and the classes of scalars, as they are looked up within a
process, and beside each the sizes that it was made for. What is read is data: positions in the program that is to be run. A plan is used
where the template that comes of them is the one that was planned, by its digest; otherwise the program is planned.

Files are replaced as a whole, have a checksum, and lie in a directory of the user alone. A directory that cannot be used, and a file
that cannot be read, mean that nothing is kept.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import time
from array import array
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from djinn_client.runtime.planning.calibrations import calibration_of
from djinn_client.runtime.planning.plan_cache import PlanLookup
from djinn_client.runtime.planning.size_range import SizeRange
from djinn_client.runtime.sending.template import PreparedTemplate, make_template
from djinn_core.errors import DjinnError
from djinn_core.ir.handles import storages_of
from djinn_core.ir.program import Call, Program, Slot, interchangeable
from djinn_core.ir.values import TensorMeta, tensor_meta
from djinn_core.logs import get_logger
from djinn_core.registry.registry import Registry
from djinn_core.registry.version import djinn_version
from djinn_core.settings import Settings
from djinn_core.system.directories import cache_directory
from djinn_core.system.files import CLOEXEC, NOFOLLOW, mode_of, user_id
from djinn_core.system.shared_files import locked, replace_file
from djinn_core.wire.messages import DeviceInfo
from djinn_core.wire.tensors import dtype_from_name, dtype_name

FORMAT: Final = 1
PLANS_LIMIT: Final = 1024  # plans in a file; the least recently used go first
BYTES_LIMIT: Final = 8 << 20  # of a file; the same
FILES_LIMIT: Final = 32  # in the directory; the same
VARIANTS_LIMIT: Final = 8  # plans of one content, for other sizes and scalars
SAVE_SECONDS: Final = 30.0  # between two writes, at least, while a session goes on
LOCK_SECONDS: Final = 0.2  # that a save waits for another process: the recorders' lock is held meanwhile
_MAGIC: Final = b"DJNP"
_CHECKSUM_BYTES: Final = 16
_KINDS_LIMIT: Final = 65536
# Settings that plans depend on. With `memory_limits` they depend on what else is in memory, and are not kept.
_SETTINGS: Final = ("disable", "exact", "latency_target", "pins", "placement_policy", "plugins", "scheduler")
_log = get_logger("djinn.runtime")


class DiskMeta(msgspec.Struct, frozen=True, array_like=True):
    """A `TensorMeta`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    device: int
    conj: bool
    neg: bool


class DiskPlan(msgspec.Struct, frozen=True, array_like=True):
    """A plan. Values are named by their positions among those of the program, by first appearance.

    Attributes:
        digest: of the template that it comes to.
        metas, sizes: those of its `SizeRange`.
        nodes, replace, equal_slots: as `make_template` takes them; no nodes: all, in order.
        relied: instructions whose operands have to be what they were, with these; fixed: the same for slots.
        substituted: as in `PreparedTemplate`.
        phase, letters, decisions: as in `ValueHints`, with a letter for each value.
    """

    digest: bytes
    metas: tuple[DiskMeta, ...]
    sizes: tuple[Slot, ...]
    nodes: tuple[int, ...]
    replace: tuple[tuple[int, int], ...]
    equal_slots: tuple[tuple[int, int], ...]
    relied: tuple[tuple[int, tuple[DiskMeta, ...]], ...]
    fixed: tuple[tuple[int, Slot], ...]
    substituted: tuple[str, ...]
    phase: str
    letters: str
    decisions: tuple[str, ...]


class _File(msgspec.Struct, frozen=True, array_like=True):
    """Content of a file: plans by the content of their programs, the least recently used first."""

    format: int
    plans: list[tuple[bytes, tuple[DiskPlan, ...]]]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_File)


class DiskPlanCache:
    """The plans of one file. Not thread-safe: the recorders' lock is held around it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._plans: dict[bytes, tuple[DiskPlan, ...]] | None = None
        self._own: dict[bytes, list[DiskPlan]] = {}  # that were made or used here, the latest last
        self._new = False
        self._saved = time.monotonic()
        self._content = ProgramContent()

    def find(self, program: Program, found: PlanLookup[PreparedTemplate]) -> tuple[PreparedTemplate, DiskPlan] | None:
        """A plan for `program`, whose structure and scalars are `found`; its range of sizes becomes the plan's."""
        if self._plans is None:
            self._plans = dict(_read(self._path))
        if not self._plans:
            return None
        key = self._content.of(program, found.classes)
        for kept in self._plans.get(key, ()):
            prepared = _restored(kept, program, found)
            if prepared is not None:
                self._note(key, kept)
                return prepared, kept
        return None

    def keep(self, program: Program, found: PlanLookup[PreparedTemplate], kept: DiskPlan) -> None:
        """Keep a plan that was made for `program`."""
        self._note(self._content.of(program, found.classes), kept)
        self._new = True
        if time.monotonic() - self._saved > SAVE_SECONDS:  # a process may end without a word
            self.save()

    def _note(self, key: bytes, kept: DiskPlan) -> None:
        plans = self._own.pop(key, [])
        self._own[key] = [*[one for one in plans if one != kept], kept][-VARIANTS_LIMIT:]
        if len(self._own) > PLANS_LIMIT:  # of a process that goes on and on
            del self._own[next(iter(self._own))]

    def save(self) -> None:
        """Write what is new, with what other processes have written meanwhile. Where it cannot be written, it is not kept."""
        self._saved = time.monotonic()
        try:
            if self._new:
                _make_directory(self._path.parent)
                with locked(self._path, LOCK_SECONDS):
                    self._write()
                _remove_oldest(self._path.parent)
                self._new = False
            elif self._own:
                os.utime(self._path)
        except BlockingIOError:  # the program goes on, and the next save has these plans, too
            _log.debug("plans are not kept yet", file=str(self._path), error="another process is writing them")
        except (OSError, OverflowError) as error:  # numbers of more than 64 bits are not encoded
            _log.debug("plans are not kept", file=str(self._path), error=str(error))
            self._new = False

    def _write(self) -> None:
        plans = dict(_read(self._path))
        for key, own in self._own.items():
            others = [one for one in plans.pop(key, ()) if one not in own]
            plans[key] = tuple([*others, *own][-VARIANTS_LIMIT:])
        latest = list(plans.items())[-PLANS_LIMIT:]
        content = _encoder.encode(_File(FORMAT, latest))
        while len(content) > BYTES_LIMIT and latest:
            del latest[: len(latest) // 4 + 1]
            content = _encoder.encode(_File(FORMAT, latest))
        replace_file(self._path, _MAGIC + _checksum(content) + content)


class ProgramContent:
    """Keys of programs by their content, which are the same in every process."""

    def __init__(self) -> None:
        self._kinds: dict[int, bytes] = {}

    def of(self, program: Program, classes: Hashable) -> bytes:
        """The key of a program whose scalars have these classes."""
        numbers: dict[int, int] = {}
        flow = array("q", [numbers.setdefault(value, len(numbers)) for value in program.operands])
        storages: dict[int, int] = {}
        memory = array("q", [storages.setdefault(storage, len(storages)) for storage in storages_of(numbers)])
        dead = array("q", sorted(numbers[value] for value in program.dead))
        digest = hashlib.blake2b(digest_size=16)
        for part in (b"".join(map(self._kind, program.calls)), flow, memory, dead, repr(classes).encode()):
            digest.update(memoryview(part).nbytes.to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()

    def _kind(self, call: Call) -> bytes:
        found = self._kinds.get(call.kind)
        if found is None:
            if len(self._kinds) >= _KINDS_LIMIT:
                self._kinds.clear()
            results = [m and (m.dtype, len(m.shape), m.device, m.conj, m.neg) for m in call.results]
            form = call.signature.form, call.signature.operand_classes, [m.tensor_class for m in call.operands]
            effects = results, call.random, call.inplace, call.aliases, call.writes
            found = self._kinds[call.kind] = hashlib.blake2b(repr((form, effects)).encode(), digest_size=16).digest()
        return found


def disk_plan(
    program: Program, found: PlanLookup[PreparedTemplate], prepared: PreparedTemplate, schedule: Any, letters: str
) -> DiskPlan | None:
    """The content to keep of a plan of `program`; None where it holds another program, which is not kept.

    `schedule`: the `ExecutionSchedule`. `letters`: as in `DiskPlan`.
    """
    if prepared.rewrite is not None or schedule.program is not program or prepared.hints is None:
        return None
    positions = {value: i for i, value in enumerate(dict.fromkeys(program.operands))}
    nodes = prepared.nodes
    return DiskPlan(
        digest=prepared.digest,
        metas=tuple(map(_kept_meta, found.range.sizes.metas)),
        sizes=found.range.sizes.sizes,
        nodes=() if nodes == tuple(range(len(program))) else nodes,
        replace=tuple([(positions[old], positions[new]) for old, new in schedule.replace.items()]),
        equal_slots=prepared.equal_slots,
        relied=tuple([(node, tuple(map(_kept_meta, call.operands))) for node, call in prepared.relied]),
        fixed=prepared.fixed,
        substituted=prepared.substituted,
        phase=prepared.hints.phase,
        letters=letters,
        decisions=prepared.hints.decisions,
    )


def _restored(kept: DiskPlan, program: Program, found: PlanLookup[PreparedTemplate]) -> PreparedTemplate | None:
    """The plan for `program`; None if it does not hold for it, or is not one."""
    sizes = found.range.sizes
    if len(kept.metas) != len(sizes.metas) or len(kept.sizes) != len(sizes.sizes):
        return None
    try:
        metas = tuple(map(_meta, kept.metas))
        theirs = SizeRange(sizes.places, sizes.weights, metas, sizes.numbers, kept.sizes, sizes.factor)
        if not theirs.covers(program):
            return None
        relied = tuple([(node, program.calls[node], tuple(map(_meta, operands))) for node, operands in kept.relied])
        if any(call.operands != operands for _, call, operands in relied):
            return None
        if not all(interchangeable(program.slots[position], slot) for position, slot in kept.fixed):
            return None
        values = list(dict.fromkeys(program.operands))
        if len(kept.letters) != len(values):
            return None
        replace = {values[old]: values[new] for old, new in kept.replace}
        nodes = kept.nodes or range(len(program))
        if min((*kept.nodes, *(p for pair in kept.replace for p in pair)), default=0) < 0:
            return None
        prepared = make_template(program, nodes, replace, kept.equal_slots)
        if prepared.digest != kept.digest or not prepared.holds_for(program):
            return None
    except (DjinnError, IndexError, KeyError, ValueError, TypeError) as error:  # no file of ours says such things
        _log.debug("a plan on disk cannot be used", error=repr(error))
        return None
    prepared.relied = tuple([(node, call) for node, call, _ in relied])
    prepared.fixed, prepared.substituted = kept.fixed, kept.substituted
    found.range.sizes = theirs
    return prepared


def _kept_meta(meta: TensorMeta) -> DiskMeta:
    return DiskMeta(meta.shape, meta.stride, meta.offset, dtype_name(meta.dtype), meta.device, meta.conj, meta.neg)


def _meta(kept: DiskMeta) -> TensorMeta:
    dtype = dtype_from_name(kept.dtype)
    return tensor_meta(kept.shape, kept.stride, kept.offset, dtype, kept.device, kept.conj, kept.neg)


# --- files ---------------------------------------------------------------------------------------------------------


def plans_file(registry: Registry, settings: Settings, device: DeviceInfo, factor: int) -> Path | None:
    """File of the plans that are made with these plugins and settings for this device.

    None where plans are not kept: the setting says so, or a plugin is an object of this process, which has no version.
    """
    if not settings.keep_plans or settings.memory_limits or any(not isinstance(p, str) for p in settings.plugins or ()):
        return None
    calibration = calibration_of(device)
    used = [(row.name, row.distribution, row.version, row.status) for row in registry.rows]
    own = [(one.plugin, one.name, repr(one.value)) for one in settings.plugin_settings]
    known = (
        (FORMAT, djinn_version(), str(torch.__version__), sys.version_info[:2], factor),
        used,
        list(_sources(registry)),
        [(name, repr(getattr(settings, name))) for name in _SETTINGS],
        own,
        (
            device.id,
            device.kind,
            device.name,
            device.memory,
            device.flops,
            device.bandwidth,
            device.torch,
            device.threads,
        ),
        (sorted(device.dtypes), sorted(device.unsupported), device.spill),
        calibration.digest if calibration is not None else "",
    )
    name = hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest()
    return cache_directory() / "plans" / f"{name}.plans"


def _sources(registry: Registry) -> Iterator[tuple[str, int, int]]:
    """Files of the packages that plan and were not installed, such as those of a working copy: they change without a version."""
    parts = (
        registry.patterns, registry.cost_models, registry.optimizations, registry.placement_policies, registry.schedulers
    )  # fmt: skip
    modules = {type(one).__module__.partition(".")[0] for objects in parts for one in objects}
    modules |= {"djinn_core", "djinn_client"}
    for name in sorted(modules):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or {"site-packages", "dist-packages"} & set(Path(file).parts):
            continue
        if Path(file).name == "__init__.py":
            yield from _times(str(Path(file).parent))
        else:
            status = Path(file).stat()
            yield file, status.st_mtime_ns, status.st_size


def _times(folder: str) -> Iterator[tuple[str, int, int]]:
    """The files of Python in a folder and those below it; `os.scandir`, because this is done at the first program."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.endswith(".py"):
                status = entry.stat()
                yield entry.path, status.st_mtime_ns, status.st_size
            elif entry.is_dir() and entry.name != "__pycache__":
                yield from _times(entry.path)


def _read(path: Path) -> list[tuple[bytes, tuple[DiskPlan, ...]]]:
    """The plans of a file; none where it is not there, is not the user's alone, or is damaged."""
    try:
        descriptor = os.open(path, os.O_RDONLY | NOFOLLOW | CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not _is_private(status) or status.st_size > 2 * BYTES_LIMIT:
                raise ValueError("it is not a file of this user alone, or too large")
            content = file.read(2 * BYTES_LIMIT)
        start = len(_MAGIC) + _CHECKSUM_BYTES
        if content[:start] != _MAGIC + _checksum(content[start:]):
            raise ValueError("it is damaged")
        read = _decoder.decode(content[start:])
        if read.format != FORMAT:
            raise ValueError(f"it has format {read.format}")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        _log.debug("plans on disk cannot be read", file=str(path), error=str(error))
        return []
    return read.plans


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest()


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == user_id() and not mode_of(status) & (stat.S_IWGRP | stat.S_IWOTH)


def _make_directory(folder: Path) -> None:
    """Make the directory of plans, for this user alone.

    Raises:
        OSError: it cannot be made, or others may write there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder.lstat()):
        raise PermissionError(f"others may write to {folder}")


def _remove_oldest(folder: Path) -> None:
    """Remove the files that were used least recently, beyond `FILES_LIMIT`."""
    files: list[tuple[float, Path]] = []
    for path in folder.glob("*.plans"):
        try:
            files.append((path.stat().st_mtime, path))
        except FileNotFoundError:  # another process was here
            continue
    files.sort(key=lambda one: one[0])
    for _, path in files[:-FILES_LIMIT]:
        path.unlink(missing_ok=True)
        (folder / f".{path.name}.lock").unlink(missing_ok=True)
