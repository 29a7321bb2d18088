"""Renderers: show results of the stages in formats other than text and JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from djinn_core.hookspecs import hookspec
from djinn_core.ir.result import PipelineResult


class Renderer(ABC):
    """Render pictures or pages in one format. A client calls it on the thread that requests a file.

    An exception fails the call that requested the file, with a message that names the renderer's plugin.

    Attributes:
        name: the format, as in `djinn explain --format NAME`; unique among renderers, and neither `text` nor `json`.
        suffixes: endings of the names of files in this format, such as `.svg`; each belongs to one renderer.
        media_type: the format as browsers and notebooks call it, such as `image/svg+xml`.
    """

    name: str
    suffixes: tuple[str, ...] = ()
    media_type: str

    @abstractmethod
    def render(self, result: PipelineResult) -> str | bytes:
        """Return a complete file that shows a program and its plan.

        Args:
            result: the program and the results of the planning stages. Results of stages that did not run are None.
        """


@hookspec
def djinn_register_renderers(settings: Any) -> Iterable[Renderer]:
    """Return the renderers that this plugin offers.

    Called once in the client process, when the plugins are first needed or configured again, and by `djinn explain`. If a
    renderer raises, the call that requested the file fails, with a message that names the plugin.
    """
    del settings
    raise NotImplementedError
