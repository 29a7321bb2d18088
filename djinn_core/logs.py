"""Structured logs that stay out of the user's way.

A logger hands structlog's event to the standard library's logger `djinn.<part>`, with the whole event in the record's
attribute `djinn`. Until `show` or `set_debug_level` is called, nothing is installed: whatever the user set up for the
standard library applies. Secrets are taken out before an event reaches any handler.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import structlog

from djinn_core.errors import ConfigurationError
from djinn_core.printable import one_line, printable

ROOT = "djinn"
FORMAT_VARIABLE = "DJINN_LOG_FORMAT"
HIDDEN = "[hidden]"

# What follows `djinn.` in the names of loggers; a test compares.
PARTS = (
    "calibration",
    "client",
    "delivery",
    "fallback",
    "interception",
    "launch",
    "observers",
    "pipeline",
    "plugins",
    "pool",
    "runtime",
    "server",
    "session",
    "stages",
    "transport",
    "trials",
    "verify",
)

# Loggers of what a stage of the pipeline does, by its names.
STAGE_PARTS = dict.fromkeys(
    ("annotate", "estimate", "optimize", "place", "schedule", "scheduler", "semantic"), ("pipeline", "stages")
)

_SECRET_KEYS = re.compile(r"token|secret|password|ticket|authorization|cookie|credential", re.IGNORECASE)
_SECRET_TEXT = (
    re.compile(r"(?i)(?P<keep>\b(?:token|ticket|secret|password|access_token)\s*[=:]\s*)[^\s&,;'\"]+"),
    re.compile(r"(?P<keep>\bdjinn_)[\w-]{40,}"),  # what `djinn token create` makes
    re.compile(r"(?i)(?P<keep>\bbearer\s+)[\w.~+/=-]+"),
    re.compile(r"(?P<keep>\beyJ)[\w-]+\.[\w-]+(\.[\w-]*)?"),  # JSON Web Tokens
    re.compile(r"(?P<keep>://)[^/@\s]+(?=@)"),
)

in_context = structlog.contextvars.bound_contextvars  # a block in which all messages of this thread have further facts

Event = MutableMapping[str, Any]


def get_logger(name: str) -> Any:
    """A structlog logger that writes to the standard library's logger `name`, such as `djinn.runtime`."""
    return structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
        processors=[structlog.stdlib.filter_by_level, structlog.contextvars.merge_contextvars, redact, _to_record],
    )


def redact(logger: object, method: str, event: Event) -> Event:
    """Replace what must not be logged: values under telling names, and tokens inside texts and URLs."""
    del logger, method
    return {key: _clean_entry(key, value) for key, value in event.items()}


def _clean_entry(key: str, value: object) -> Any:
    if key == "exc_info":  # still an exception; its text is cleaned once it is formatted
        return value
    if key == "exception" and isinstance(value, str):
        return _without_secrets(printable(value)).replace(
            "\n", "\n  "
        )  # so that no line of it looks like one of the log
    return HIDDEN if _SECRET_KEYS.search(key) else _clean(value)


def _clean(value: object) -> Any:
    if isinstance(value, str):
        return _without_secrets(one_line(value))
    if isinstance(value, Mapping):
        return {str(key): _clean_entry(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{len(value)} bytes"
    if isinstance(value, BaseException):
        return _clean(repr(value))
    return value if isinstance(value, (int, float, bool, type(None))) else _clean(str(value))


def _without_secrets(text: str) -> str:
    for pattern in _SECRET_TEXT:
        text = pattern.sub(rf"\g<keep>{HIDDEN}", text)
    return text


def _to_record(logger: object, method: str, event: Event) -> tuple[tuple[str], dict[str, Any]]:
    """Arguments for the standard library: a readable line for foreign handlers, the event itself for ours."""
    del logger, method
    exc_info = event.pop("exc_info", None)
    return (_line(event),), {"extra": {"djinn": dict(event)}, "exc_info": exc_info}


def show(level: str = "info", stream: TextIO | None = None, environ: Mapping[str, str] | None = None) -> None:
    """Show Djinn's log on `stream` (standard error) from `level` on; a second call replaces the first.

    Human-readable, in colour on a terminal; one JSON object a line where `DJINN_LOG_FORMAT=json` is set. Warnings alone look as
    they do where nothing is set up.

    Raises:
        ConfigurationError: `level` or the format is unknown.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigurationError(f"There is no log level {level!r}: use debug, info, warning or error.")
    _install(stream or sys.stderr, os.environ if environ is None else environ, number)
    logging.getLogger(ROOT).setLevel(number)


def hide() -> None:
    """Undo `show` and `set_debug_level`: what the user set up for the standard library applies again."""
    root = logging.getLogger(ROOT)
    handler = _own_handler()
    if handler is not None:
        root.removeHandler(handler)
        root.propagate = True
    _reset_levels(logging.NOTSET)


def set_debug_level(parts: str) -> None:
    """Show the debug messages of `parts`: names joined by commas, such as `"runtime,server"`, or `"all"`.

    An empty text or `"off"` ends it. A plugin's logger is named in full: `"djinn_attention"`. The name of a stage stands for
    the parts that log what it does.

    Raises:
        ConfigurationError: there is no such part.
    """
    names = [part.strip() for part in parts.split(",") if part.strip()]
    loggers = [_logger_of(part) for name in names if name != "off" for part in STAGE_PARTS.get(name, (name,))]
    shown = _own_handler()
    shown_level = shown.shown_level if shown else None
    if shown is None or shown_level is None:
        hide()
    else:
        _reset_levels(shown_level)
    if shown is None:
        if loggers:
            _install(sys.stderr, os.environ, None)
    else:
        shown.setFormatter(_formatter_of(shown.stream, os.environ, None if loggers else shown_level))
    for logger in loggers:
        logger.setLevel(logging.DEBUG)


def shows_debug() -> bool:
    """True if debug messages of any part are shown."""
    names = (ROOT, *(f"{ROOT}.{part}" for part in PARTS))
    return any(logging.getLogger(name).level == logging.DEBUG for name in names)


def _reset_levels(root_level: int) -> None:
    logging.getLogger(ROOT).setLevel(root_level)
    for part in PARTS:
        logging.getLogger(f"{ROOT}.{part}").setLevel(logging.NOTSET)


def _logger_of(part: str) -> logging.Logger:
    if part == "all":
        return logging.getLogger(ROOT)
    if part in PARTS:
        return logging.getLogger(f"{ROOT}.{part}")
    if part.startswith((f"{ROOT}.", f"{ROOT}_")):
        return logging.getLogger(part)
    close = difflib.get_close_matches(part, PARTS, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"use all, off or some of {', '.join(PARTS)}."
    raise ConfigurationError(f"There is no part {part!r} whose debug messages could be shown: {hint}")


class _Handler(logging.StreamHandler[TextIO]):
    """Djinn's own handler, distinguished from the user's by its type. `shown_level` is what `show` asked for, if it was called."""

    def __init__(self, stream: TextIO, shown_level: int | None) -> None:
        super().__init__(stream)
        self.shown_level = shown_level


def _own_handler() -> _Handler | None:
    return next((h for h in logging.getLogger(ROOT).handlers if isinstance(h, _Handler)), None)


def _install(stream: TextIO, environ: Mapping[str, str], shown_level: int | None) -> None:
    formatter = _formatter_of(stream, environ, shown_level)
    hide()
    handler = _Handler(stream, shown_level)
    handler.setFormatter(formatter)
    root = logging.getLogger(ROOT)
    root.addHandler(handler)
    # Our handler has shown it; the user's root handlers would show it a second time.
    root.propagate = False


def _formatter_of(
    stream: TextIO, environ: Mapping[str, str], shown_level: int | None
) -> structlog.stdlib.ProcessorFormatter:
    style = environ.get(FORMAT_VARIABLE, "") or "console"
    if style not in {"json", "console"}:
        raise ConfigurationError(f"{FORMAT_VARIABLE}={style!r} is unknown: use json or console.")
    if style == "console" and shown_level is not None and shown_level >= logging.WARNING:
        style = "plain"
    return _formatter(style, colours=stream.isatty() and "NO_COLOR" not in environ)


def _plain(logger: object, method: str, event: Event) -> str:
    """A warning as the standard library shows it where nothing is set up."""
    del logger, method
    exception = event.pop("exception", "")
    text = _line({key: value for key, value in event.items() if key not in {"timestamp", "level", "logger"}})
    return f"{text}\n{exception}" if exception else text


def _line(event: Mapping[str, Any]) -> str:
    facts = " ".join(f"{key}={value!r}" for key, value in event.items() if key != "event")
    return f"{event.get('event', '')} {facts}".rstrip()


def _formatter(style: str, colours: bool) -> structlog.stdlib.ProcessorFormatter:
    people = structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)
    renderers: dict[str, Any] = {
        "json": structlog.processors.JSONRenderer(default=str),
        "console": people,
        "plain": _plain,
    }
    renderer = renderers[style]
    clean = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[_from_record, structlog.stdlib.add_logger_name, structlog.stdlib.add_log_level, _add_time],
        processors=[clean, structlog.processors.format_exc_info, redact, renderer],
    )


_add_time = structlog.processors.TimeStamper(fmt="iso", utc=True)


def _from_record(logger: object, method: str, event: Event) -> Event:
    """The structured event that a logger of ours put into the record; records of others stay as they are."""
    del logger, method
    record: logging.LogRecord = event["_record"]
    ours: dict[str, Any] = getattr(record, "djinn", {})
    return {**event, **ours}
