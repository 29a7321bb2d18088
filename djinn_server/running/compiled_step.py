"""One instruction of a compiled template: the op, and the places of its arguments.

A place is an index in the environment, the list of all values of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

Environment = list[Any]  # all values of a run: constants, slots, inputs, then the values that the run makes


@attrs.frozen
class ListSource:
    """Source of a list argument. `items`: places or sources of its elements."""

    items: tuple[Source, ...]

    def __call__(self, env: Environment) -> list[Any]:
        """Return the list, built from values of the environment."""
        return [env[item] if type(item) is int else item(env) for item in self.items]  # type: ignore[operator]


@attrs.frozen
class ComplexSource:
    """Source of a complex argument. `real`, `imaginary`: places of its parts."""

    real: int
    imaginary: int

    def __call__(self, env: Environment) -> complex:
        """Return the complex number, built from values of the environment."""
        return complex(env[self.real], env[self.imaginary])


@attrs.frozen
class ScalarTensorSource:
    """Source of an argument that is a 0-dim CPU tensor of `dtype`. `number`: place of its number."""

    dtype: torch.dtype
    number: int | ComplexSource

    def __call__(self, env: Environment) -> torch.Tensor:
        """Return a new 0-dim CPU tensor with the number."""
        number = self.number
        return torch.tensor(env[number] if isinstance(number, int) else number(env), dtype=self.dtype)


# A place in the environment, or a function of the environment.
Source = int | ListSource | ComplexSource | ScalarTensorSource


@attrs.frozen
class CompiledStep:
    """One instruction of a compiled template.

    Attributes:
        op: name of the overload.
        function: function that computes the op.
        arguments, keywords: sources of the positional arguments, and names and sources of the keyword arguments.
        reads: places of the tensor operands.
        makes: pairs of a result's number and the place of its new value.
        returns_list: True if the op returns several results.
        writes: places of the operands that the op writes into.
        release: places of values that no later step needs.
        moves: True if the op may reallocate an operand that it writes into.
        plain: True if `function` is a kernel of PyTorch, without a wrapper that checks arguments.
    """

    op: str
    function: Callable[..., Any]
    arguments: tuple[Source, ...]
    keywords: tuple[tuple[str, Source], ...]
    reads: tuple[int, ...]
    makes: tuple[tuple[int, int], ...]
    returns_list: bool
    writes: tuple[int, ...]
    release: tuple[int, ...]
    moves: bool
    plain: bool

    def run(self, env: Environment) -> None:
        """Run the instruction on an environment, and release values that no later step needs."""
        self.store(env)
        for place in self.release:
            env[place] = None

    def arguments_from(self, env: Environment) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of the op."""
        sources = [("", source) for source in self.arguments] + [*self.keywords]
        keyword_arguments = [
            (name, env[source] if isinstance(source, int) else source(env)) for name, source in sources
        ]
        return tuple([value for name, value in keyword_arguments if not name]), {
            name: value for name, value in keyword_arguments if name
        }

    def store(self, env: Environment) -> None:
        """Run the instruction on an environment, without releasing values."""
        positional = [env[source] if type(source) is int else source(env) for source in self.arguments]  # type: ignore[operator]
        if self.keywords:
            sources = {name: env[source] if type(source) is int else source(env) for name, source in self.keywords}  # type: ignore[operator]
            results = self.function(*positional, **sources)
        else:
            results = self.function(*positional)
        for result, place in self.makes:
            env[place] = results[result] if self.returns_list else results
