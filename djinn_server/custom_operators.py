"""Custom ops that `djinn serve --operators` allows. They are imported and resolved once, at startup."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from djinn_core import torch_private
from djinn_core.errors import ConfigurationError, StartupError
from djinn_core.hookspecs.operators import OperatorLibrary
from djinn_core.ir.operators import allow_custom, custom_refusal
from djinn_core.logs import get_logger
from djinn_core.wire import limits
from djinn_core.wire.messages import CustomOperator
from djinn_server.launch.token_table import check_tenant

MODULE: Final = "module:"
_log = get_logger("djinn.server")
_checks: Final[dict[str, Callable[[str, Mapping[str, Any]], None]]] = {}  # by name of the op


@attrs.frozen
class AllowedOperators:
    """One value of `--operators`, with the ops that it allows, by name.

    Attributes:
        tenant: the tenant that may use the ops; empty: every tenant.
        check: as `OperatorLibrary.check`; None: the kernels check their arguments themselves.
    """

    operators: Mapping[str, torch._ops.OpOverload]
    tenant: str = ""
    check: Callable[[str, Mapping[str, Any]], None] | None = None


class CustomOperators:
    """The custom ops of an executor. Its tenant is known when the first client attaches."""

    def __init__(self, chosen: Sequence[str], libraries: Sequence[OperatorLibrary], *, tenants: bool = True) -> None:
        """Import the libraries and modules in `chosen`, the values of `--operators`. `tenants`: as in `ExecutorConfig`.

        Raises:
            StartupError: a library or module does not exist, cannot be imported or registers no op, or a tenant's name
                is invalid.
        """
        self._allowed = tuple([_allowed(text, libraries, tenants) for text in chosen])
        self.offered: tuple[CustomOperator, ...] = ()

    def assign(self, tenant: str) -> None:
        """Allow the ops of a tenant in this process, which works for no other tenant."""
        operators: dict[str, torch._ops.OpOverload] = {}
        for one in self._allowed:
            if one.tenant in {"", tenant}:
                operators |= one.operators
                if one.check is not None:
                    _checks.update(dict.fromkeys(one.operators, one.check))
        allow_custom(operators)
        offered = [CustomOperator(name, str(torch_private.schema_of(operators[name]))) for name in sorted(operators)]
        self.offered = tuple(offered)
        if operators:
            _log.info("custom ops are allowed", tenant=tenant, ops=len(operators))


def _allowed(text: str, libraries: Sequence[OperatorLibrary], tenants: bool) -> AllowedOperators:
    name, at, tenant = text.partition("@")
    try:
        if at:
            check_tenant(tenant)
        if name.startswith(MODULE):
            return AllowedOperators(dict(_of_module(name.removeprefix(MODULE))), tenant)
        return _of_library(name, tenant, libraries, tenants)
    except ConfigurationError as error:
        raise StartupError(
            f"--operators {text}: {error}. Name a tenant after @, or leave out @ to allow the ops to every tenant"
        ) from error
    except StartupError as error:
        raise StartupError(f"--operators {text}: {error}") from error.__cause__


def _of_library(name: str, tenant: str, libraries: Sequence[OperatorLibrary], tenants: bool) -> AllowedOperators:
    library = next((one for one in libraries if one.name == name), None)
    if library is None:
        installed = ", ".join(sorted(one.name for one in libraries)) or "none"
        raise StartupError(
            f"no plugin offers an operator library of this name (there are: {installed}). Install its package on this machine, or allow the "
            "Python ops of a module: `--operators module:NAME`"
        )
    if not library.every_tenant and not tenant and tenants:
        raise StartupError(
            f"its kernels do not validate arguments of hostile clients: name a tenant that you trust, `{name}@TENANT`"
        )
    _import(library.module)
    checks = type(library).check is not OperatorLibrary.check
    return AllowedOperators(
        {op: _registered(op, library.module) for op in sorted(library.operators)},
        tenant,
        library.check if checks else None,
    )


def _of_module(module: str) -> Iterator[tuple[str, torch._ops.OpOverload]]:
    """Yield the custom ops in Python whose functions a module or its submodules define."""
    _import(module)
    python_operators = [*torch_private.python_operators(module)]
    if not python_operators:
        raise StartupError(
            f"the module {module} defines no op with `torch.library.custom_op` or `triton_op`. Ops of compiled libraries need a plugin: "
            "`djinn plugins new NAME --kind operators`"
        )
    for func in python_operators:
        yield func.name(), _usable(func)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        raise StartupError(
            f"importing the module {module!r} in {sys.executable} raised {type(error).__name__}: {error}"
        ) from error


def _registered(name: str, module: str) -> torch._ops.OpOverload:
    func = torch_private.overload_called(name)
    if func is None:
        raise StartupError(
            f"importing the module {module!r} registers no op {name!r}: install a version of it that does"
        )
    return _usable(func)


def _usable(func: torch._ops.OpOverload) -> torch._ops.OpOverload:
    if torch_private.is_composite(func):
        raise StartupError(f"{func.name()} is made of other ops, which clients record: leave it out")
    if reason := custom_refusal(func):
        raise StartupError(f"programs cannot contain {func.name()}: {reason}")
    if len(str(torch_private.schema_of(func))) > limits.SCHEMA:
        raise StartupError(f"the schema of {func.name()} has more than {limits.SCHEMA} characters")
    return func


def checked_custom(op: str, overload: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel of a custom op: its library checks the arguments, and aliased results are copied."""
    check = _checks.get(op)
    schema = torch_private.schema_of(overload)
    names = tuple(a.name for a in schema.arguments)
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    fresh = [place for place, result in enumerate(schema.returns) if result.alias_info is None]

    def look_and_call(*positional: Any, **keywords: Any) -> Any:
        arguments = defaults | dict(zip(names, positional, strict=False)) | keywords
        if check is not None:
            try:
                check(op, arguments)
            except (AttributeError, IndexError, TypeError) as error:
                raise TypeError(f"{op} was called with arguments of wrong types: {error}") from error
        result = kernel(*positional, **keywords)
        return _with_own_memory(result, arguments.values(), fresh) if fresh else result

    return look_and_call


def _with_own_memory(made: Any, given: Iterable[Any], fresh: Sequence[int]) -> Any:
    """Return the results. Copy those that alias an argument or another result without a note in the schema."""
    operand_storages = {torch_private.storage_key(one) for one in _tensors(given)}

    def own(result: Any) -> Any:
        if isinstance(result, (list, tuple)):
            return [own(one) for one in result]
        if not isinstance(result, torch.Tensor):
            return result
        if torch_private.storage_key(result) in operand_storages:
            result = result.clone()
        operand_storages.add(torch_private.storage_key(result))
        return result

    if not isinstance(made, tuple):
        return own(made)
    return tuple([own(result) if place in fresh else result for place, result in enumerate(made)])


def _tensors(given: Iterable[Any]) -> Iterator[torch.Tensor]:
    for one in given:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)
