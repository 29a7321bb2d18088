"""One instruction of a compiled template: the op, and where its arguments lie in the environment of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

Environment = list[Any]  # all values of a run: constants, slots, inputs, then the values that the run makes


@attrs.frozen
class ListSource:
    """A list argument. `items`: where its elements come from."""

    items: tuple[Source, ...]

    def __call__(self, env: Environment) -> list[Any]:
        """Return the list."""
        return [env[item] if type(item) is int else item(env) for item in self.items]  # type: ignore[operator]


@attrs.frozen
class ComplexSource:
    """A complex number. `real`, `imaginary`: places of its parts."""

    real: int
    imaginary: int

    def __call__(self, env: Environment) -> complex:
        """Return the number."""
        return complex(env[self.real], env[self.imaginary])


@attrs.frozen
class ScalarTensorSource:
    """A 0-dim CPU tensor of `dtype`. `number`: the number in it."""

    dtype: torch.dtype
    number: int | ComplexSource

    def __call__(self, env: Environment) -> torch.Tensor:
        """Return a new tensor."""
        number = self.number
        return torch.tensor(env[number] if isinstance(number, int) else number(env), dtype=self.dtype)


# A place in the environment, or a function of the environment.
Source = int | ListSource | ComplexSource | ScalarTensorSource


@attrs.frozen
class CompiledStep:
    """One instruction.

    Attributes:
        op: its overload name. function: computes it.
        arguments, keywords: where its arguments come from.
        reads: places of its operands. makes: places of its new values, by result. sequence: True if it returns several
            results.
        writes: places of its written operands. release: places that are free after it.
        moves: True if it may reallocate a written operand.
        plain: True if `function` is an unwrapped PyTorch kernel.
    """

    op: str
    function: Callable[..., Any]
    arguments: tuple[Source, ...]
    keywords: tuple[tuple[str, Source], ...]
    reads: tuple[int, ...]
    makes: tuple[tuple[int, int], ...]
    sequence: bool
    writes: tuple[int, ...]
    release: tuple[int, ...]
    moves: bool
    plain: bool

    def run(self, env: Environment) -> None:
        """Run on an environment, and release unneeded values."""
        self.store(env)
        for place in self.release:
            env[place] = None

    def given(self, env: Environment) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments."""
        named = [("", source) for source in self.arguments] + [*self.keywords]
        found = [(name, env[source] if isinstance(source, int) else source(env)) for name, source in named]
        return tuple([value for name, value in found if not name]), {name: value for name, value in found if name}

    def store(self, env: Environment) -> None:
        """Run on an environment, without releasing values."""
        given = [env[source] if type(source) is int else source(env) for source in self.arguments]  # type: ignore[operator]
        if self.keywords:
            named = {name: env[source] if type(source) is int else source(env) for name, source in self.keywords}  # type: ignore[operator]
            made = self.function(*given, **named)
        else:
            made = self.function(*given)
        for result, place in self.makes:
            env[place] = made[result] if self.sequence else made
