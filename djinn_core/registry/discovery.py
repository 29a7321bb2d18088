"""Plugin discovery: built-in plugins, entry points, and plugins that the user names. Nothing here imports a plugin."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Final

import msgspec

from djinn_core.errors import PluginError
from djinn_core.registry.entry_points import CORE_DISTRIBUTION, core_version, installed_points, pinned_release
from djinn_core.registry.report import PluginRow, Status

ENTRY_POINT_GROUP: Final = "djinn"
INTEGRATION_GROUP: Final = "djinn.integrations"
RUN: Final = "djinn-run"  # in place of a library, for plugins with integrations that are loaded when `djinn run` begins


class PluginCandidate(msgspec.Struct, frozen=True):
    """A plugin that may be loaded.

    Attributes:
        name: name of the entry point, of the module or of the object.
        distribution, version: what it came with; empty where there is none.
        load: returns the plugin, a module or an object; raises whatever the plugin raises at import.
        builtin: whether it is part of Djinn.
        module: the module of its entry point; empty where it came otherwise.
        integrating: whether it is loaded anyway when a library is imported that it names.
        pinned: the version of Djinn that its distribution requires exactly, as the packages of Djinn's own repository do; or empty.
    """

    name: str
    distribution: str
    version: str
    load: Callable[[], object]
    builtin: bool = False
    module: str = ""
    integrating: bool = False
    pinned: str = ""

    def row(self, status: Status, kind: str = "", error: str | None = None) -> PluginRow:
        """The plugin's line in the report."""
        return PluginRow(self.name, kind, self.distribution, self.version, status, error)

    @property
    def label(self) -> str:
        """The plugin as messages name it."""
        return self.row("active").label


def installed(
    entry_points: Iterable[importlib.metadata.EntryPoint] | None = None, group: str = ENTRY_POINT_GROUP
) -> tuple[PluginCandidate, ...]:
    """The plugins that installed distributions offer in a group (or that `entry_points` name), by name, then by distribution."""
    found = _offered(group) if entry_points is None else map(_candidate, entry_points)
    return tuple(sorted(found, key=lambda candidate: (candidate.name, candidate.distribution)))


def _offered(group: str) -> Iterator[PluginCandidate]:
    """The plugins of installed distributions; one that lies on the import path twice counts where it comes first."""
    places: dict[str, str] = {}
    for place, points in installed_points():
        integrating = {(point.distribution, point.value) for point in points if point.group == INTEGRATION_GROUP}
        for point in points:
            if point.group == group and places.setdefault(point.distribution, place) == place:
                found = point.entry_point
                yield PluginCandidate(
                    point.name,
                    point.distribution,
                    point.version,
                    partial(_loaded, found),
                    module=found.module,
                    integrating=(point.distribution, point.value) in integrating,
                    pinned=point.pinned,
                )


def _loaded(point: importlib.metadata.EntryPoint) -> object:
    return point.load()


def _candidate(point: importlib.metadata.EntryPoint) -> PluginCandidate:
    pinned = pinned_release(point.dist.metadata) if point.dist is not None else ""
    return PluginCandidate(
        point.name, *_origin(point.dist), partial(_loaded, point), module=point.module, pinned=pinned
    )


def check_release(candidate: PluginCandidate) -> None:
    """Raise `PluginError` if a plugin's distribution requires another release of Djinn than the installed one.

    Entry points are cached with this requirement, so that no metadata is read. Djinn that runs without being installed is not compared.
    """
    core = core_version()
    if candidate.pinned and core and candidate.pinned != core:
        raise PluginError(
            f"{candidate.label} cannot be used: it requires djinn {candidate.pinned}, and djinn {core} is installed. Install both of one "
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
    found: dict[str, dict[str, PluginCandidate]] = defaultdict(dict)
    for _, points in installed_points():
        plugins = {(p.distribution, p.value): p.name for p in points if p.group == ENTRY_POINT_GROUP}
        for point in points:
            if point.group == INTEGRATION_GROUP:
                name = plugins.get((point.distribution, point.value), point.value)
                load = partial(_loaded, point.entry_point)
                candidate = PluginCandidate(name, point.distribution, point.version, load, pinned=point.pinned)
                found[point.name].setdefault(name, candidate)
    return {library: tuple(plugins.values()) for library, plugins in found.items()}


def built_in(builtins: Mapping[str, object]) -> tuple[PluginCandidate, ...]:
    """The plugins that are part of Djinn, in the order in which they are given."""
    version = core_version()
    return tuple(
        PluginCandidate(name, CORE_DISTRIBUTION, version, partial(_built_in, plugin), builtin=True)
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
    load = partial(_imported, request, choices(request, available))
    return PluginCandidate(request, *_origin_of_module(request), load)


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
    return " ".join(part for part in (candidate.distribution, candidate.version) if part) or candidate.name


def _imported(name: str, alternatives: str) -> ModuleType:
    module = importlib.import_module(name)
    if not hasattr(module, "djinn_api_version"):
        raise PluginError(
            f"no plugin is installed as {name!r}, and the module of that name has no `djinn_api_version`{alternatives}"
        )
    return module


def _built_in(plugin: object) -> object:
    """Import a plugin that is given as the name of its module."""
    return importlib.import_module(plugin) if isinstance(plugin, str) else plugin


def _given(plugin: object) -> object:
    return plugin


def _from_object(plugin: object) -> PluginCandidate:
    if isinstance(plugin, ModuleType):
        return PluginCandidate(plugin.__name__, *_origin_of_module(plugin.__name__), partial(_given, plugin))
    name = getattr(plugin, "name", None)
    return PluginCandidate(
        name if isinstance(name, str) and name else type(plugin).__name__, "", "", partial(_given, plugin)
    )


def _importable(name: str) -> bool:
    try:
        return bool(name) and not name.startswith(".") and importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # the parent package is missing, or the module is half made
        return False


def _origin(distribution: importlib.metadata.Distribution | None) -> tuple[str, str]:
    if distribution is None:
        return "", ""
    metadata = distribution.metadata  # it is read each time
    return metadata["Name"], metadata["Version"]


def _origin_of_module(module: str) -> tuple[str, str]:
    package = module.partition(".")[0]
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if point.module.partition(".")[0] == package:
            return _origin(point.dist)
    # `importlib.metadata.packages_distributions` reads what all distributions hold, in half a second; these are few.
    for distribution in importlib.metadata.distributions(path=_folder_of(package)):
        if any(file.parts[0] in {package, f"{package}.py"} for file in distribution.files or ()):
            return _origin(distribution)
    return "", ""


def _folder_of(package: str) -> list[str]:
    """The folder in which a package or module lies, as an import path; empty for one that was made in memory."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    origin = spec.origin if spec and spec.has_location else None
    return [str(Path(origin).parents[1 if spec and spec.submodule_search_locations else 0])] if origin else []
