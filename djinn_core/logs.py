"""Structured logs through the standard library's loggers.

A logger passes structlog's event to the standard logger `djinn.<part>`, with the whole event in the record's attribute
`djinn`. No handler is installed until `show` or `set_debug_level` is called: the user's configuration applies. Secrets
are redacted before an event reaches a handler.

structlog is imported with the first message: the import takes a tenth of a second, and most programs log nothing.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    import structlog

from djinn_core.errors import ConfigurationError
from djinn_core.system.printable import one_line, printable

ROOT = "djinn"
FORMAT_VARIABLE = "DJINN_LOG_FORMAT"
HIDDEN = "[hidden]"
RECENT_LINES = 30
RECENT_CHARACTERS = 256  # of one, as in a `Name`

# Names of loggers after `djinn.`. A test compares them with the code.
PARTS = (
    "calibration",
    "client",
    "delivery",
    "interception",
    "launch",
    "observers",
    "pipeline",
    "plugins",
    "runtime",
    "server",
    "session",
    "stages",
    "transport",
    "trials",
)

# Loggers of each pipeline stage, by stage name.
STAGE_PARTS = dict.fromkeys(
    ("annotate", "estimate", "optimize", "place", "schedule", "scheduler", "semantic"), ("pipeline", "stages")
)

_SECRET_KEYS = re.compile(r"token|secret|password|ticket|authorization|cookie|credential", re.IGNORECASE)
_SECRET_TEXT = (
    re.compile(r"(?i)(?P<keep>\b(?:signature|sig|credential|\w*access(?:key)?id)=)[^\s&,;#'\"]+"),  # S3, GCS, Azure
    re.compile(r"(?i)(?P<keep>\b(?:token|ticket|secret|password|access_token)\s*[=:]\s*)[^\s&,;'\"]+"),
    re.compile(r"(?P<keep>\bdjinn_)[\w-]{40,}"),  # tokens of `djinn token create`
    re.compile(r"(?i)(?P<keep>\bbearer\s+)[\w.~+/=-]+"),
    re.compile(r"(?P<keep>\beyJ)[\w-]+\.[\w-]+(\.[\w-]*)?"),  # JSON Web Tokens
    re.compile(r"(?P<keep>://)[^/@\s]+(?=@)"),
)

Event = MutableMapping[str, Any]
_context: Final[ContextVar[Mapping[str, Any]]] = ContextVar("djinn_log", default={})  # noqa: B039 - never changed


@contextmanager
def in_context(**facts: Any) -> Iterator[None]:
    """Add facts to all messages of this thread inside the block."""
    before = _context.set({**_context.get(), **facts})
    try:
        yield
    finally:
        _context.reset(before)


class Logger:
    """A structlog logger that writes to the standard logger `name`.

    The structlog logger is created with the first message.
    """

    __slots__ = ("_facts", "_name", "_standard", "_structured")

    def __init__(self, name: str, facts: Mapping[str, Any]) -> None:
        """Create a logger. `facts`: fields of all its messages."""
        self._name = name
        self._facts = facts
        self._standard = logging.getLogger(name)
        self._structured: Any = None

    def bind(self, **facts: Any) -> Logger:
        """Return a logger whose messages have further fields."""
        return Logger(self._name, {**self._facts, **facts})

    def debug(self, event: str, **facts: Any) -> None:
        """Log for developers."""
        self._log(logging.DEBUG, "debug", event, facts)

    def info(self, event: str, **facts: Any) -> None:
        """Log information for an operator."""
        self._log(logging.INFO, "info", event, facts)

    def warning(self, event: str, **facts: Any) -> None:
        """Log a problem for the user or operator."""
        self._log(logging.WARNING, "warning", event, facts)

    def error(self, event: str, **facts: Any) -> None:
        """Log an error."""
        self._log(logging.ERROR, "error", event, facts)

    def exception(self, event: str, **facts: Any) -> None:
        """Log an error with the exception that is being handled."""
        self._log(logging.ERROR, "exception", event, facts)

    def _log(self, level: int, method: str, event: str, facts: Mapping[str, Any]) -> None:
        if not self._standard.isEnabledFor(level):
            return
        if self._structured is None:
            self._structured = _structured(self._standard).bind(**self._facts)
        getattr(self._structured, method)(event, **facts)


def get_logger(name: str) -> Logger:
    """Return the logger of a part, such as `djinn.runtime`."""
    return Logger(name, {})


def _structured(standard: logging.Logger) -> Any:
    import structlog

    return structlog.wrap_logger(
        standard,
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[structlog.stdlib.filter_by_level, _merge_context, redact, _to_record],
    )


def _merge_context(logger: object, method: str, event: Event) -> Event:
    del logger, method
    return {**_context.get(), **event}


def redact(logger: object, method: str, event: Event) -> Event:
    """Redact secrets: values of fields with names such as `token`, and tokens inside texts and URLs."""
    del logger, method
    return {key: _clean_entry(key, value) for key, value in event.items()}


def _clean_entry(key: str, value: object) -> Any:
    if key == "exc_info":  # still an exception object; its text is redacted after it is formatted
        return value
    if key == "exception" and isinstance(value, str):
        return _without_secrets(printable(value)).replace(
            "\n", "\n  "
        )  # indent each line, so that it cannot pass for a log line
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
    """Return arguments for the standard library: a line for other handlers, and the event for Djinn's handler."""
    del logger, method
    exc_info = event.pop("exc_info", None)
    return (_line(event),), {"extra": {"djinn": dict(event)}, "exc_info": exc_info}


def show(level: str = "info", stream: TextIO | None = None, environ: Mapping[str, str] | None = None) -> None:
    """Show Djinn's log on `stream` (standard error) from `level` on. A second call replaces the first.

    The format is human-readable, in colour on a terminal. With `DJINN_LOG_FORMAT=json` it is one JSON object per line. At level
    `warning`, messages look like those of the standard library without configuration.

    Raises:
        ConfigurationError: `level` or the format is unknown.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigurationError(f"There is no log level {level!r}: use debug, info, warning or error.")
    _install(stream or sys.stderr, os.environ if environ is None else environ, number)
    logging.getLogger(ROOT).setLevel(number)


def hide() -> None:
    """Undo `show` and `set_debug_level`, so that the user's configuration applies again."""
    root = logging.getLogger(ROOT)
    handler = _own_handler()
    if handler is not None:
        root.removeHandler(handler)
        root.propagate = True
    _reset_levels(logging.NOTSET)


def set_debug_level(parts: str) -> None:
    """Show the debug messages of `parts`: names joined by commas, such as `"runtime,server"`, or `"all"`.

    An empty string or `"off"` stops them. A plugin's logger is named in full: `"djinn_attention"`. A stage name selects all
    loggers of the stage.

    Raises:
        ConfigurationError: the part is unknown.
    """
    names = [part.strip() for part in parts.split(",") if part.strip()]
    loggers = [_logger_of(part) for name in names if name != "off" for part in STAGE_PARTS.get(name, (name,))]
    handler = _own_handler()
    shown_level = handler.shown_level if handler else None
    if handler is None or shown_level is None:
        hide()
    else:
        _reset_levels(shown_level)
    if handler is None:
        if loggers:
            _install(sys.stderr, os.environ, None)
    else:
        handler.setFormatter(_formatter_of(handler.stream, os.environ, None if loggers else shown_level))
    for logger in loggers:
        logger.setLevel(logging.DEBUG)


def shows_debug() -> bool:
    """Return True if debug messages of any part are shown."""
    names = (ROOT, *(f"{ROOT}.{part}" for part in PARTS))
    return any(logging.getLogger(name).level == logging.DEBUG for name in names)


def _reset_levels(root_level: int) -> None:
    logging.getLogger(ROOT).setLevel(root_level)
    for logger in [logging.getLogger(f"{ROOT}.{part}") for part in PARTS]:
        if logger.level != logging.NOTSET:  # setting a level scans all loggers
            logger.setLevel(logging.NOTSET)


def _logger_of(part: str) -> logging.Logger:
    if part == "all":
        return logging.getLogger(ROOT)
    if part in PARTS:
        return logging.getLogger(f"{ROOT}.{part}")
    if part.startswith((f"{ROOT}.", f"{ROOT}_")):
        return logging.getLogger(part)
    close = difflib.get_close_matches(part, PARTS, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"use all, off or some of {', '.join(PARTS)}."
    raise ConfigurationError(f"no logger part is named {part!r}: {hint}")


class RecentLines(logging.Handler):
    """The latest log lines of a process. Its gateway shows them to the operator."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._recent_lines: deque[str] = deque(maxlen=RECENT_LINES)

    def install(self) -> None:
        """Start to collect lines."""
        logging.getLogger(ROOT).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Collect a log line, without secrets."""
        event = {"event": record.getMessage(), **getattr(record, "djinn", {})}
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = _without_secrets(one_line(f"{clock} {record.levelname.lower()} {_line(event)}"))
        self._recent_lines.append(line[:RECENT_CHARACTERS])

    def lines(self) -> tuple[str, ...]:
        """Return the lines, the newest last."""
        return tuple(self._recent_lines.copy())


recent: Final = RecentLines()


class _Handler(logging.StreamHandler[TextIO]):
    """Djinn's own log handler. Its type distinguishes it from the user's handlers.

    Attributes:
        shown_level: level of the last `show`; None before.
    """

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
    # Djinn's handler has shown the message. The user's root handlers would show it again.
    root.propagate = False


class _LateFormatter(logging.Formatter):
    """structlog's formatter, created with the first message.

    Importing structlog takes a tenth of a second, and most executors log nothing.
    """

    def __init__(self, style: str, colours: bool) -> None:
        super().__init__()
        self._format_options = style, colours
        self._formatter_cache: logging.Formatter | None = None

    def format(self, record: logging.LogRecord) -> str:
        """The text of a message."""
        if self._formatter_cache is None:
            self._formatter_cache = _formatter(*self._format_options)
        return self._formatter_cache.format(record)


def _formatter_of(stream: TextIO, environ: Mapping[str, str], shown_level: int | None) -> logging.Formatter:
    style = environ.get(FORMAT_VARIABLE, "") or "console"
    if style not in {"json", "console"}:
        raise ConfigurationError(f"{FORMAT_VARIABLE}={style!r} is unknown: use json or console.")
    if style == "console" and shown_level is not None and shown_level >= logging.WARNING:
        style = "plain"
    return _LateFormatter(style, stream.isatty() and "NO_COLOR" not in environ)


def _plain(logger: object, method: str, event: Event) -> str:
    """Format a warning like the standard library without configuration."""
    del logger, method
    exception = event.pop("exception", "")
    text = _line({key: value for key, value in event.items() if key not in {"timestamp", "level", "logger"}})
    return f"{text}\n{exception}" if exception else text


def _line(event: Mapping[str, Any]) -> str:
    facts = " ".join(f"{key}={value!r}" for key, value in event.items() if key != "event")
    return f"{event.get('event', '')} {facts}".rstrip()


def _formatter(style: str, colours: bool) -> structlog.stdlib.ProcessorFormatter:
    import structlog

    people = structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)
    renderers: dict[str, Any] = {
        "json": structlog.processors.JSONRenderer(default=str),
        "console": people,
        "plain": _plain,
    }
    renderer = renderers[style]
    clean = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    add_time = structlog.processors.TimeStamper(fmt="iso", utc=True)
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[_from_record, structlog.stdlib.add_logger_name, structlog.stdlib.add_log_level, add_time],
        processors=[clean, structlog.processors.format_exc_info, redact, renderer],
    )


def _from_record(logger: object, method: str, event: Event) -> Event:
    """Return the structured event of a Djinn record. Return other records unchanged."""
    del logger, method
    record: logging.LogRecord = event["_record"]
    ours: dict[str, Any] = getattr(record, "djinn", {})
    return {**event, **ours}
