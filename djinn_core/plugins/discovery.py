"""Plugin discovery: built-in plugins, entry points, and plugins that the user names. Nothing here imports a plugin."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Final

import attrs

from djinn_core.errors import PluginError
from djinn_core.plugins.report import PluginRow, Status

ENTRY_POINT_GROUP: Final = "djinn"
INTEGRATION_GROUP: Final = "djinn.integrations"
RUN: Final = "djinn-run"  # in place of a library, for plugins with integrations that are loaded when `djinn run` begins
CORE_DISTRIBUTION: Final = "djinn"


@attrs.frozen
class PluginCandidate:
    """A plugin that may be loaded.

    Attributes:
        name: name of the entry point, of the module or of the object.
        distribution, version: what it came with; empty where there is none.
        load: returns the plugin, a module or an object; raises whatever the plugin raises at import.
        builtin: whether it is part of Djinn.
        module: the module of its entry point; empty where it came otherwise.
    """

    name: str
    distribution: str
    version: str
    load: Callable[[], object]
    builtin: bool = False
    module: str = ""

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
    for place, changed in map(_state_of, sys.path):
        for candidate in _offered_in(place, changed, group):
            if places.setdefault(candidate.distribution, place) == place:
                yield candidate


@lru_cache(maxsize=1024)  # packages that are installed as editable have a folder each
def _offered_in(place: str, changed: int, group: str) -> tuple[PluginCandidate, ...]:
    """The plugins of the distributions in a folder, or a zip file, that was `changed` last at that time: installing changes it."""
    del changed
    found = importlib.metadata.distributions(path=[place])
    points = (point for one in found for point in one.entry_points.select(group=group))
    return tuple(map(_candidate, points))


def _candidate(point: importlib.metadata.EntryPoint) -> PluginCandidate:
    return PluginCandidate(
        point.name, *_origin(point.dist), partial(importlib.metadata.EntryPoint.load, point), module=point.module
    )


def _state_of(place: str) -> tuple[str, int]:
    """An entry of the import path, and when it changed last."""
    place = place or "."
    try:
        return os.path.abspath(place), os.stat(place).st_mtime_ns  # noqa: PTH100, PTH116 - faster
    except OSError:  # it is not there, or the current folder is gone
        return place, 0


def of_another_release(distribution: str, version: str) -> str:
    """Advice, where a version is one of Djinn's calendar versions and another than that of Djinn here; otherwise empty."""
    core = _core_version()
    if version == core or version.partition(".")[0] != core.partition(".")[0]:
        return ""
    return f"{distribution} {version} belongs to another release than djinn {core}: install both of one release"


def integrating() -> Mapping[str, tuple[PluginCandidate, ...]]:
    """The installed plugins with integrations, by the library at whose import each is loaded.

    This runs whenever `djinn` is imported: it looks for the group in the text of entry points, and parses few of them, since
    `importlib.metadata.entry_points` takes twice as long. Plugins in zip files are found with all others, at first use.
    """
    found: dict[str, dict[str, PluginCandidate]] = defaultdict(dict)
    for folder in _folders_naming(INTEGRATION_GROUP):
        distribution = importlib.metadata.Distribution.at(folder)
        plugins = {point.value: point.name for point in distribution.entry_points.select(group=ENTRY_POINT_GROUP)}
        for point in distribution.entry_points.select(group=INTEGRATION_GROUP):
            name = plugins.get(point.value, point.value)
            load = partial(importlib.metadata.EntryPoint.load, point)
            found[point.name].setdefault(name, PluginCandidate(name, *_origin(distribution), load))
    return {library: tuple(plugins.values()) for library, plugins in found.items()}


def _folders_naming(group: str) -> Iterator[Path]:
    """Metadata folders of installed distributions with entry points of a group."""
    for place, changed in map(_state_of, sys.path):
        yield from _folders_in(place, changed, group)


@lru_cache(maxsize=1024)
def _folders_in(place: str, changed: int, group: str) -> tuple[Path, ...]:
    """Those of them in a folder that was `changed` last at that time."""
    del changed
    found = []
    try:
        names = os.listdir(place)  # noqa: PTH208 - faster
    except OSError:  # a zip file, or nothing
        return ()
    for name in names:
        if name.endswith((".dist-info", ".egg-info")):
            with contextlib.suppress(OSError), open(f"{place}/{name}/entry_points.txt", "rb") as file:  # noqa: PTH123 - faster
                if group.encode() in file.read():
                    found.append(Path(place, name))
    return tuple(found)


def built_in(builtins: Mapping[str, object]) -> tuple[PluginCandidate, ...]:
    """The plugins that are part of Djinn, in the order in which they are given."""
    version = _core_version()
    return tuple(
        PluginCandidate(name, CORE_DISTRIBUTION, version, partial(_given, plugin), builtin=True)
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


def _core_version() -> str:
    try:
        return importlib.metadata.version(CORE_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return ""
