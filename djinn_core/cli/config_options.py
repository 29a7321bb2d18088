"""Options of a command made from the flags that the fields of configuration classes declare."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import click

from djinn_core.launch.flags import FLAG, Flag

_GIB = 2**30


@attrs.frozen
class _Option:
    """The option for one field; `parameter` is its name as a parameter, unique among the fields of all nested classes."""

    parameter: str
    flag: Flag
    type: Any
    default: Any

    def decorate(self, command: Callable[..., None]) -> Callable[..., None]:
        default = self.default if self.flag.default is None else self.flag.default
        number = isinstance(default, (int, float)) and not isinstance(default, bool) and default > 0
        return click.option(
            self.flag.name,
            self.parameter,
            type=self._click_type(),
            is_flag=self.type is bool,
            multiple=self._repeated,
            default=(default / _GIB if self.flag.gib else default) if number else None,
            show_default=number,
            help=self.flag.help,
        )(command)

    def read(self, given: Mapping[str, Any]) -> Any:
        """Value of the field; the field's default where there is none on the command line."""
        value = given[self.parameter]
        if value is None:
            return self.default
        return int(value * _GIB) if self.flag.gib else value

    @property
    def _repeated(self) -> bool:
        return typing.get_origin(self.type) is tuple

    def _click_type(self) -> Any:
        flag, kind = self.flag, self.type
        if isinstance(kind, types.UnionType) or self._repeated:
            kind = typing.get_args(kind)[0]
        if kind is Path:
            return click.Path(path_type=Path, dir_okay=not flag.file, exists=flag.exists)
        if kind not in {int, float} or (flag.least, flag.above, flag.most) == (None, None, None):
            return kind
        bounds = click.FloatRange if kind is float or flag.gib else click.IntRange
        return bounds(flag.least if flag.above is None else flag.above, flag.most, min_open=flag.above is not None)


def config_options(config: type, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Options for the fields of a configuration class that declare a flag, handed to the command as one `config` named `name`.

    Fields of classes that are fields of it are included; every other field has its default.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = dict(_options(config, name))

        @functools.wraps(command)
        def read(**given: Any) -> None:
            values = {parameter: option.read(given) for parameter, option in options.items()}
            others = {parameter: value for parameter, value in given.items() if parameter not in options}
            command(**{name: _build(config, name, values)}, **others)

        decorated: Callable[..., None] = read
        for option in reversed(options.values()):
            decorated = option.decorate(decorated)
        return decorated

    return decorate


def _options(config: type, prefix: str) -> Iterator[tuple[str, _Option]]:
    for field, kind, parameter in _fields(config, prefix):
        flag = field.metadata.get(FLAG)
        if flag is not None:
            yield parameter, _Option(parameter, flag, kind, field.default)
        elif attrs.has(kind):
            yield from _options(kind, parameter)


def _build(config: type, prefix: str, values: Mapping[str, Any]) -> Any:
    given = {}
    for field, kind, parameter in _fields(config, prefix):
        if parameter in values:
            given[field.name] = values[parameter]
        elif attrs.has(kind):
            given[field.name] = _build(kind, parameter, values)
    return config(**given)


def _fields(config: Any, prefix: str) -> Iterator[tuple[attrs.Attribute[Any], Any, str]]:
    """Fields, each with its type and with its path from the outermost class as a name of a parameter."""
    kinds = typing.get_type_hints(config)
    return ((field, kinds[field.name], f"{prefix}_{field.name}") for field in attrs.fields(config))
