"""Plugin discovery: built-in plugins, entry points, and plugins that the user names. Nothing here imports a plugin.

Each kind of plugin has an entry-point group, `djinn.patterns` for `patterns`. The name of an entry is the name of its
plugin. The value of an entry is the module, or another object, that implements the hook of the kind. A distribution may
use one name in several groups. The groups of integrations end with the name of a library, such as
`djinn.integrations.transformers`. The import of that library loads the plugin.
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
from djinn_core.registry.version import CORE_DISTRIBUTION, core_version, name_and_versions

_PREFIX: Final = "djinn."  # prefix of entry-point groups

EntryPoint = importlib.metadata.EntryPoint


class PluginCandidate(msgspec.Struct, frozen=True, eq=False):
    """A plugin that may be loaded.

    Attributes:
        name: name of the entry points, of the module or of the object.
        points: entry points of one distribution with that name, by kind.
        plugin: the plugin itself, or the name of its module, if it has no entry points; otherwise None.
        source: distribution of the plugin; None for objects, modules without a distribution, and built-in plugins.
        builtin: True if the plugin is part of Djinn.
        advice: advice for the error if a named module is not a plugin.
    """

    name: str
    points: Mapping[str, tuple[EntryPoint, ...]] = {}
    plugin: Any = None
    source: importlib.metadata.Distribution | None = None
    builtin: bool = False
    advice: str = ""

    @property
    def origin(self) -> tuple[str, str]:
        """Name and version of the distribution; empty strings without a distribution."""
        if self.builtin:
            return CORE_DISTRIBUTION, core_version()
        return name_and_versions(self.source)[:2] if self.source is not None else ("", "")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of its entry points, in pipeline order; empty without entry points."""
        return tuple(kind.name for kind in KINDS if kind.name in self.points)

    def row(self, status: Status, kinds: Iterable[str] = (), error: str | None = None) -> PluginRow:
        """Return the plugin's line in the report."""
        return PluginRow(self.name, ",".join(kinds), *self.origin, status, error)

    @property
    def label(self) -> str:
        """Name of the plugin in messages."""
        return self.row("active").label


def installed(entry_points: Iterable[EntryPoint] | None = None) -> tuple[PluginCandidate, ...]:
    """Return the plugins of installed distributions (or of `entry_points`), by name, then by distribution.

    If a distribution is on the import path twice, the first copy counts.
    """
    points_by_plugin: dict[tuple[str, int], dict[str, list[EntryPoint]]] = defaultdict(lambda: defaultdict(list))
    all_points: Iterable[EntryPoint] = _all_points() if entry_points is None else entry_points
    for point in all_points:
        if kind := _kind_of(point.group):
            points_by_plugin[point.name, id(point.dist)][kind].append(point)
    candidates = []
    for (name, _), points_by_kind in points_by_plugin.items():
        points = {kind: tuple(listed) for kind, listed in points_by_kind.items()}
        candidates.append(PluginCandidate(name, points, source=next(iter(points.values()))[0].dist))
    names: dict[str, int] = defaultdict(int)
    for candidate in candidates:
        names[candidate.name] += 1
    # Reading the metadata of distributions is slow, so it is done only when it is needed.
    return tuple(
        sorted(
            candidates,
            key=lambda candidate: (candidate.name, candidate.origin if names[candidate.name] > 1 else ("", "")),
        )
    )


def _all_points() -> Iterator[EntryPoint]:
    """Yield the entry points of `importlib.metadata.entry_points`, but do not parse files without a group of Djinn."""
    names: set[str] = set()
    for distribution in importlib.metadata.distributions():
        name = distribution._normalized_name  # type: ignore[attr-defined]  # noqa: SLF001 - `name` parses METADATA
        if name not in names and f"[{_PREFIX}" in (distribution.read_text("entry_points.txt") or ""):
            yield from distribution.entry_points
        names.add(name)


def _kind_of(group: str) -> str:
    """Return the kind of an entry-point group; empty for groups that do not belong to Djinn."""
    if not group.startswith(_PREFIX):
        return ""
    kind = group.removeprefix(_PREFIX)
    return INTEGRATIONS if kind.startswith(f"{INTEGRATIONS}.") else kind if kind in EVERY_KIND else ""


def release_conflict(candidate: PluginCandidate) -> str:
    """Return the reason why a plugin's distribution does not fit this Djinn, as the end of a sentence, or an empty string.

    If Djinn runs without an installed distribution, nothing is compared.
    """
    core = core_version()
    required = name_and_versions(candidate.source)[2] if candidate.source is not None else ""
    if not required or not core or required == core:
        return ""
    return f"it requires djinn {required}, and djinn {core} is installed. Install both of one release, from one checkout or from one folder of wheels"


def of_another_release(distribution: str, version: str) -> str:
    """Return advice if a version is a calendar version of another Djinn release; otherwise empty."""
    core = core_version()
    if version == core or version.partition(".")[0] != core.partition(".")[0]:
        return ""
    return f"{distribution} {version} belongs to another release than djinn {core}: install both of one release"


def plugins_by_library() -> Mapping[str, tuple[PluginCandidate, ...]]:
    """Return the installed plugins with integrations, by the library whose import loads them."""
    candidates_by_library: dict[str, list[PluginCandidate]] = defaultdict(list)
    for candidate in installed():
        libraries = {
            point.group.removeprefix(f"{_PREFIX}{INTEGRATIONS}.") for point in candidate.points.get(INTEGRATIONS, ())
        }
        for library in libraries:
            candidates_by_library[library].append(candidate)
    return {library: tuple(candidates) for library, candidates in candidates_by_library.items()}


def built_in(builtins: Mapping[str, object]) -> tuple[PluginCandidate, ...]:
    """Return the built-in plugins in the given order. Each is an entry point or a plugin object."""
    return tuple(
        PluginCandidate(name, {_kind_of(plugin.group): (plugin,)}, builtin=True)
        if isinstance(plugin, EntryPoint)
        else PluginCandidate(name, plugin=plugin, builtin=True)
        for name, plugin in builtins.items()
    )


def named(request: object, available: Sequence[PluginCandidate]) -> PluginCandidate:
    """Return the plugin for `request`: the name of an available plugin or module, or a module or object.

    Raises:
        PluginError: no plugin has the name, or several distributions offer it.
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
    return PluginCandidate(request, plugin=request, source=source, advice=choices(request, available))


def choices(request: str, available: Iterable[PluginCandidate]) -> str:
    """Return the end of a message about an unknown name: similar names, and all plugins."""
    names = {builtin: sorted({c.name for c in available if c.builtin is builtin}) for builtin in (False, True)}
    close = difflib.get_close_matches(request, names[False] + names[True], n=3)
    guess = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
    return (
        f"{guess} Installed: {', '.join(names[False]) or 'none'}. Built in: {', '.join(names[True]) or 'none'}. "
        "The name of an importable module, a module or an object works as well if it implements a hook of Djinn"
    )


def _offered_by(candidate: PluginCandidate) -> str:
    return " ".join(part for part in candidate.origin if part) or candidate.name


def imported(plugin: object, alternatives: str) -> object:
    """Return the plugin. If it is the name of a module, import the module.

    Raises:
        PluginError: the module is not a plugin. The message ends with `alternatives`.
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
        return PluginCandidate(plugin.__name__, plugin=plugin, source=_distribution_of(plugin.__name__, installed()))
    name = getattr(plugin, "name", None)
    return PluginCandidate(name if isinstance(name, str) and name else type(plugin).__name__, plugin=plugin)


def _importable(name: str) -> bool:
    try:
        return bool(name) and not name.startswith(".") and importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # the parent package is missing, or the module is partially initialised
        return False


def _distribution_of(module: str, available: Iterable[PluginCandidate]) -> importlib.metadata.Distribution | None:
    package = module.partition(".")[0]
    for candidate in available:
        points = (point for points in candidate.points.values() for point in points)
        if any(point.module.partition(".")[0] == package for point in points):
            return candidate.source
    # `importlib.metadata.packages_distributions` reads all distributions' file lists, in half a second; these are few.
    for distribution in importlib.metadata.distributions(path=_folder_of(package)):
        if any(file.parts[0] in {package, f"{package}.py"} for file in distribution.files or ()):
            return distribution
    return None


def _folder_of(package: str) -> list[str]:
    """Return the folder on the import path that has a package or module; empty if there is no such folder."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    origin = spec.origin if spec and spec.has_location else None
    return [str(Path(origin).parents[1 if spec and spec.submodule_search_locations else 0])] if origin else []
