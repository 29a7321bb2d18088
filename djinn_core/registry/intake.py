"""Taking in one plugin after the other: what is disabled, broken or clashes with an earlier one stays outside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from djinn_core.errors import PluginError
from djinn_core.registry.discovery import PluginCandidate, check_release
from djinn_core.registry.kinds import INTEGRATIONS, KINDS
from djinn_core.registry.kinds_cache import KindsCache
from djinn_core.registry.loading import HookError, LoadedPlugin, load
from djinn_core.registry.report import PluginRow, log
from djinn_core.registry.settings import DeclaredSettings
from djinn_core.settings import PluginSetting


class PluginFailure(msgspec.Struct, frozen=True):
    """A plugin that cannot be used. `fatal` where the person asked for it by name, or where it is built in."""

    row: PluginRow
    error: PluginError
    fatal: bool

    def warn(self) -> None:
        """Say once, in the log, that the rest goes on without it."""
        log().warning("a plugin cannot be used", plugin=self.row.name, error=str(self.error))


def warn_of_hooks(failures: Iterable[PluginFailure]) -> None:
    """Warn of hooks that failed, and of nothing that a process which loads all plugins says, too."""
    for failure in failures:
        if isinstance(failure.error, HookError):
            failure.warn()


class PluginLoader(msgspec.Struct):
    """Takes in one plugin after the other and refuses what clashes with those before it."""

    disable: frozenset[str]
    kinds: Collection[str]
    trace: bool
    given: Sequence[PluginSetting] = ()
    rows: list[PluginRow] = msgspec.field(default_factory=list)
    failures: list[PluginFailure] = msgspec.field(default_factory=list)
    names: dict[str, PluginCandidate] = msgspec.field(default_factory=dict)
    claims: dict[tuple[str, str], PluginCandidate] = msgspec.field(default_factory=dict)
    objects: dict[str, list[Any]] = msgspec.field(default_factory=lambda: defaultdict(list))
    owners: dict[tuple[str, str], PluginRow] = msgspec.field(default_factory=dict)
    settings: list[DeclaredSettings] = msgspec.field(default_factory=list)
    kinds_cache: KindsCache | None = None  # with it, plugins without a hook of `kinds` are not imported

    def take(self, candidate: PluginCandidate, requested: bool = False) -> None:
        """Load a plugin, unless it is disabled, and keep its objects."""
        if candidate.name in self.disable:
            self.rows.append(candidate.row("disabled"))
            return
        try:
            self._claim_name(candidate)
            check_release(candidate)
            known = (
                self.kinds_cache.of(candidate)
                if self.kinds_cache is not None and candidate.module and not requested
                else None
            )
            if known is not None and not self._asks(candidate, known):
                self.rows.append(candidate.row("active", kind=",".join(known)))
                return
            loaded = load(candidate, self.kinds, self.trace, self.given)
            self._claim_objects(loaded)
        except PluginError as error:
            self.refuse(candidate, error, fatal=requested or candidate.builtin)
            return
        self._keep(loaded)

    def _asks(self, candidate: PluginCandidate, kinds: Iterable[str]) -> bool:
        """True if hooks of these kinds are called now. Integrations are not that come with the import of their library."""
        return any(kind in self.kinds for kind in kinds if not (candidate.integrating and kind == INTEGRATIONS))

    def refuse(self, candidate: PluginCandidate, error: PluginError, fatal: bool) -> None:
        """Note that a plugin cannot be used."""
        row = candidate.row("failed", error=str(error))
        self.rows.append(row)
        self.failures.append(PluginFailure(row, error, fatal))

    def ordered(self) -> dict[str, tuple[Any, ...]]:
        """By field of the registry the objects that were taken in, in the order in which the core asks them."""
        return {kind.name: tuple(self._ordered(kind.name)) for kind in KINDS}

    def _claim_name(self, candidate: PluginCandidate) -> None:
        first = self.names.setdefault(candidate.name, candidate)
        if first is not candidate:
            raise PluginError(_clash("plugin", candidate.name, first, candidate))

    def _claim_objects(self, loaded: LoadedPlugin) -> None:
        fresh: set[tuple[str, str]] = set()
        for objects, item in _pairs(loaded):
            for key in _claims(objects, item):
                if key in fresh or key in self.claims:
                    raise HookError(_clash(*key, self.claims.get(key, loaded.candidate), loaded.candidate))
                fresh.add(key)
        self.claims.update(dict.fromkeys(fresh, loaded.candidate))

    def _keep(self, loaded: LoadedPlugin) -> None:
        row = loaded.candidate.row("active", kind=",".join(loaded.kinds))
        self.rows.append(row)
        self.settings.append(loaded.settings)
        for objects, item in _pairs(loaded):
            self.objects[objects].append(item)
            self.owners[objects, item.name] = row

    def _ordered(self, objects: str) -> list[Any]:
        if objects == "cost_models":
            return sorted(
                self.objects[objects],
                key=lambda model: (bool(not model.operations), self._own("cost model", model), model.name),
            )
        if objects == "transports":
            return sorted(self.objects[objects], key=lambda transport: (-transport.capabilities.speed, transport.name))
        if objects == "weight_formats":
            return sorted(self.objects[objects], key=lambda one: (not self._own("weight format", one), one.name))
        return sorted(self.objects[objects], key=lambda item: item.name)

    def _own(self, what: str, item: Any) -> bool:
        return self.claims[what, item.name].builtin


def _claims(objects: str, item: Any) -> Iterator[tuple[str, str]]:
    yield objects.replace("_", " ").removesuffix("s").replace("policie", "policy"), item.name
    if objects == "transports":
        for scheme in item.schemes:
            yield "URL scheme", scheme
    if objects == "renderers":
        for suffix in item.suffixes:
            yield "file ending", suffix
    if objects == "weight_formats":
        for suffix in item.suffixes:
            yield "ending of files with weights", suffix


def _pairs(loaded: LoadedPlugin) -> Iterator[tuple[str, Any]]:
    for objects, items in loaded.objects.items():
        for item in items:
            yield objects, item


def _clash(what: str, name: str, first: PluginCandidate, second: PluginCandidate) -> str:
    return (
        f"the {what} {name!r} is taken twice: {first.label} has it, {second.label} is refused. "
        "Uninstall or disable one of them, or rename what it offers"
    )
