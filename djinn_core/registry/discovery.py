"""Plugin discovery: built-in plugins, entry points, and plugins that the user names. Nothing here imports a plugin.

Each kind of plugin has an entry-point group, `djinn.patterns` for `patterns`. The name of an entry is the name of its plugin, and its
value the module, or another object, that implements the hook of the kind. A distribution may use one name in several groups. The groups of
integrations end with the library at whose import the plugin is loaded: `djinn.integrations.transformers`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

from djinn_core.errors import PluginError
from djinn_core.registry.kinds import EVERY_KIND, INTEGRATIONS, KINDS
from djinn_core.registry.report import PluginRow, Status
from djinn_core.registry.version import CORE_DISTRIBUTION, core_version, described

_PREFIX: Final = "djinn."  # of entry-point groups

EntryPoint = importlib.metadata.EntryPoint


class PluginCandidate(msgspec.Struct, frozen=True, eq=False):
    """A plugin that may be loaded.

    Attributes:
        name: name of the entry points, of the module or of the object.
        points: entry points of one distribution with that name, by kind.
        given: the plugin itself, or the name of its module, where it has no entry points.
        source: distribution that it came with; None if there is none, or it is part of Djinn.
        builtin: True if it is part of Djinn.
        advice: what to say where a module that was named is no plugin.
    """

    name: str
    points: Mapping[str, tuple[EntryPoint, ...]] = {}
    given: Any = None
    source: importlib.metadata.Distribution | None = None
    builtin: bool = False
    advice: str = ""

    @property
    def origin(self) -> tuple[str, str]:
        """Name and version of the distribution; empty where there is none."""
        if self.builtin:
            return CORE_DISTRIBUTION, core_version()
        return described(self.source)[:2] if self.source is not None else ("", "")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of its entry points, in pipeline order; none where it has no entry points."""
        return tuple(kind.name for kind in KINDS if kind.name in self.points)

    def row(self, status: Status, kinds: Iterable[str] = (), error: str | None = None) -> PluginRow:
        """The plugin's line in the report."""
        return PluginRow(self.name, ",".join(kinds), *self.origin, status, error)

    @property
    def label(self) -> str:
        """The plugin as messages name it."""
        return self.row("active").label


def installed(entry_points: Iterable[EntryPoint] | None = None) -> tuple[PluginCandidate, ...]:
    """The plugins that installed distributions offer (or that `entry_points` name), by name, then by distribution.

    A distribution that lies on the import path twice counts where it comes first.
    """
    offered: dict[tuple[str, int], dict[str, list[EntryPoint]]] = defaultdict(lambda: defaultdict(list))
    every: Iterable[EntryPoint] = _all_points() if entry_points is None else entry_points
    for point in every:
        if kind := _kind_of(point.group):
            offered[point.name, id(point.dist)][kind].append(point)
    candidates = []
    for (name, _), found in offered.items():
        points = {kind: tuple(some) for kind, some in found.items()}
        candidates.append(PluginCandidate(name, points, source=next(iter(points.values()))[0].dist))
    names: dict[str, int] = defaultdict(int)
    for candidate in candidates:
        names[candidate.name] += 1
    # Which distribution it is takes reading its metadata: that is done where it matters.
    return tuple(sorted(candidates, key=lambda one: (one.name, one.origin if names[one.name] > 1 else ("", ""))))


def _all_points() -> Iterator[EntryPoint]:
    """As `importlib.metadata.entry_points`, which compares each entry point with each group: files without a group are not parsed."""
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        name = distribution._normalized_name  # type: ignore[attr-defined]  # noqa: SLF001 - `name` parses METADATA
        if name not in seen and f"[{_PREFIX}" in (distribution.read_text("entry_points.txt") or ""):
            yield from distribution.entry_points
        seen.add(name)


def _kind_of(group: str) -> str:
    """The kind of an entry-point group; empty if it is none of Djinn's."""
    if not group.startswith(_PREFIX):
        return ""
    kind = group.removeprefix(_PREFIX)
    return INTEGRATIONS if kind.startswith(f"{INTEGRATIONS}.") else kind if kind in EVERY_KIND else ""


def release_conflict(candidate: PluginCandidate) -> str:
    """Reason why a plugin's distribution does not fit the installed release of Djinn, as the end of a sentence, or an empty string.

    Djinn that runs without being installed is not compared.
    """
    core = core_version()
    pinned = described(candidate.source)[2] if candidate.source is not None else ""
    if not pinned or not core or pinned == core:
        return ""
    return (
        f"it requires djinn {pinned}, and djinn {core} is installed. Install both of one "
        "release, from one checkout or from one folder of wheels"
    )


def of_another_release(distribution: str, version: str) -> str:
    """Advice, where a version is one of Djinn's calendar versions and another than that of Djinn here; otherwise empty."""
    core = core_version()
    if version == core or version.partition(".")[0] != core.partition(".")[0]:
        return ""
    return f"{distribution} {version} belongs to another release than djinn {core}: install both of one release"


def integrating() -> Mapping[str, tuple[PluginCandidate, ...]]:
    """The installed plugins with integrations, by the library at whose import each is loaded."""
    found: dict[str, list[PluginCandidate]] = defaultdict(list)
    for candidate in installed():
        libraries = {
            point.group.removeprefix(f"{_PREFIX}{INTEGRATIONS}.") for point in candidate.points.get(INTEGRATIONS, ())
        }
        for library in libraries:
            found[library].append(candidate)
    return {library: tuple(candidates) for library, candidates in found.items()}


def built_in(builtins: Mapping[str, object]) -> tuple[PluginCandidate, ...]:
    """The plugins that are part of Djinn, in the order in which they are given: entry points, or the plugins themselves."""
    return tuple(
        PluginCandidate(name, {_kind_of(plugin.group): (plugin,)}, builtin=True)
        if isinstance(plugin, EntryPoint)
        else PluginCandidate(name, given=plugin, builtin=True)
        for name, plugin in builtins.items()
    )


def named(request: object, available: Sequence[PluginCandidate]) -> PluginCandidate:
    """The plugin that `request` means: an available plugin or a module by name, or a module or object itself.

    Raises:
        PluginError: nothing of that name is available, or more than one distribution offers it.
    """
    if not isinstance(request, str):
        return _from_object(request)
    matches = [candidate for candidate in available if candidate.name == request]
    if len(matches) > 1:
        raise PluginError(
            f"the plugin name {request!r} is ambiguous: {' and '.join(map(_offered_by, matches))} both offer it. "
            "Uninstall one of them, or pass the module that you mean"
        )
    if matches:
        return matches[0]
    if not _importable(request):
        raise PluginError(f"there is no plugin {request!r}{choices(request, available)}")
    source = _distribution_of(request, available)
    return PluginCandidate(request, given=request, source=source, advice=choices(request, available))


def choices(request: str, available: Iterable[PluginCandidate]) -> str:
    """The end of a sentence about an unknown name: what it may have meant, and what there is."""
    names = {builtin: sorted({c.name for c in available if c.builtin is builtin}) for builtin in (False, True)}
    close = difflib.get_close_matches(request, names[False] + names[True], n=3)
    guess = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
    return (
        f"{guess} Installed: {', '.join(names[False]) or 'none'}. Built in: {', '.join(names[True]) or 'none'}. "
        "Any importable module, module or object that implements a hook of Djinn will do too"
    )


def _offered_by(candidate: PluginCandidate) -> str:
    return " ".join(part for part in candidate.origin if part) or candidate.name


def imported(plugin: object, alternatives: str) -> object:
    """Import a plugin that is given by the name of its module.

    Raises:
        PluginError: the module is no plugin. `alternatives`: the end of the message.
    """
    if not isinstance(plugin, str):
        return plugin
    module = importlib.import_module(plugin)
    if not hasattr(module, "djinn_api_version"):
        raise PluginError(
            f"no plugin is installed as {plugin!r}, and the module of that name has no `djinn_api_version`{alternatives}"
        )
    return module


def _from_object(plugin: object) -> PluginCandidate:
    if isinstance(plugin, ModuleType):
        return PluginCandidate(plugin.__name__, given=plugin, source=_distribution_of(plugin.__name__, installed()))
    name = getattr(plugin, "name", None)
    return PluginCandidate(name if isinstance(name, str) and name else type(plugin).__name__, given=plugin)


def _importable(name: str) -> bool:
    try:
        return bool(name) and not name.startswith(".") and importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # the parent package is missing, or the module is half made
        return False


def _distribution_of(module: str, available: Iterable[PluginCandidate]) -> importlib.metadata.Distribution | None:
    """The distribution that a module came with, if there is one."""
    package = module.partition(".")[0]
    for candidate in available:
        points = (point for some in candidate.points.values() for point in some)
        if any(point.module.partition(".")[0] == package for point in points):
            return candidate.source
    # `importlib.metadata.packages_distributions` reads what all distributions hold, in half a second; these are few.
    for distribution in importlib.metadata.distributions(path=_folder_of(package)):
        if any(file.parts[0] in {package, f"{package}.py"} for file in distribution.files or ()):
            return distribution
    return None


def _folder_of(package: str) -> list[str]:
    """The folder in which a package or module lies, as an import path; empty for one that was made in memory."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    origin = spec.origin if spec and spec.has_location else None
    return [str(Path(origin).parents[1 if spec and spec.submodule_search_locations else 0])] if origin else []
