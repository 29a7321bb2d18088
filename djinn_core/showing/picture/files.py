"""Writing a picture to a file, as its name says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from djinn_core.errors import ConfigurationError
from djinn_core.ir.result import PipelineResult
from djinn_core.showing.picture.page import page
from djinn_core.showing.picture.svg import svg

_MAKERS: dict[str, Callable[[PipelineResult], str]] = {".svg": svg, ".html": page, ".htm": page}


def check_name(file: Path) -> None:
    """True if a picture can be written into a file of that name.

    Raises:
        ConfigurationError: its ending says something else, or there is no such folder.
    """
    if file.suffix.lower() not in _MAKERS:
        raise ConfigurationError(f"{file} does not end in .svg or .html: a picture is one of these")
    if not file.parent.is_dir():
        raise ConfigurationError(f"{file}: there is no folder {file.parent}; make it first")


def write_picture(result: PipelineResult, file: Path) -> None:
    """Write the picture of a program into `file`: an SVG, or a page in which boxes open by a click.

    Raises:
        ConfigurationError: its ending says something else, or there is no such folder.
    """
    check_name(file)
    file.write_text(_MAKERS[file.suffix.lower()](result), encoding="utf-8")
