"""Search for renderer plugins by format or file suffix. Their errors name the plugin."""

from __future__ import annotations

from pathlib import Path

from djinn_client.hookspecs.renderers import Renderer
from djinn_core.errors import ConfigurationError, DjinnError, PluginError, install_hint
from djinn_core.ir.result import PipelineResult
from djinn_core.registry.registry import Registry

_INSTALL = f"For .svg and .html, run {install_hint('plugins/observability')}. `djinn plugins` shows installed, disabled and broken plugins"


def renderer_of(name: str, registry: Registry) -> Renderer:
    """Return the renderer of the format `name`.

    Raises:
        ConfigurationError: no plugin has the format; the message names a package to install.
    """
    renderers: tuple[Renderer, ...] = registry.renderers
    for renderer in renderers:
        if renderer.name == name:
            return renderer
    available = ", ".join(("text", "json", *(renderer.name for renderer in renderers)))
    raise ConfigurationError(f"there is no format {name!r} (available: {available}). {_INSTALL}")


def renderer_for(file: Path, registry: Registry) -> Renderer:
    """Return the renderer for a file, by its suffix.

    Raises:
        ConfigurationError: no plugin has a renderer for the suffix, or the file's folder does not exist.
    """
    suffix = file.suffix.lower()
    renderers: tuple[Renderer, ...] = registry.renderers
    matching = next((renderer for renderer in renderers if suffix in renderer.suffixes), None)
    if matching is None:
        available = ", ".join(sorted(s for renderer in renderers for s in renderer.suffixes)) or "none"
        raise ConfigurationError(
            f"{file}: no renderer writes files that end in {suffix or 'nothing'} (available: {available}). {_INSTALL}"
        )
    if not file.parent.is_dir():
        raise ConfigurationError(f"cannot write {file}: create the folder {file.parent} first")
    return matching


def render(result: PipelineResult, renderer: Renderer, registry: Registry) -> bytes:
    """Return a program in the format of a renderer, as bytes. Text is encoded as UTF-8.

    Raises:
        PluginError: the renderer raised an exception that is not a `DjinnError`.
    """
    try:
        document = renderer.render(result)
    except DjinnError:
        raise
    except Exception as error:
        raise PluginError(_failure_text(renderer, registry, error)) from error
    return document.encode() if isinstance(document, str) else document


def _failure_text(renderer: Renderer, registry: Registry, error: Exception) -> str:
    owner = registry.owner("renderers", renderer.name)
    return f"the renderer {renderer.name!r} of {owner} raised {type(error).__name__}: {error}"
