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
    """The ops that a value of `--operators` allows, by name.

    Attributes:
        tenant: the tenant that may use the ops; empty: every tenant.
        check: `OperatorLibrary.check` of the ops' library; None: the kernels check their arguments themselves.
    """

    operators: Mapping[str, torch._ops.OpOverload]
    tenant: str = ""
    check: Callable[[str, Mapping[str, Any]], None] | None = None


class CustomOperators:
    """The custom ops of an executor. The tenant is known when the first client attaches."""

    def __init__(self, options: Sequence[str], libraries: Sequence[OperatorLibrary], *, tenants: bool = True) -> None:
        """Import the libraries and modules of `options`, the values of `--operators`. `tenants`: as in `ExecutorConfig`.

        Raises:
            StartupError: a library or module does not exist, cannot be imported or registers no op, or a tenant's name
                is invalid.
        """
        self._allowed = tuple([_resolve(option, libraries, tenants) for option in options])
        self.offered: tuple[CustomOperator, ...] = ()

    def assign(self, tenant: str) -> None:
        """Allow the custom ops of `tenant`, which is the only tenant of this process."""
        operators: dict[str, torch._ops.OpOverload] = {}
        for library in self._allowed:
            if library.tenant in {"", tenant}:
                operators |= library.operators
                if library.check is not None:
                    _checks.update(dict.fromkeys(library.operators, library.check))
        allow_custom(operators)
        schemas = [(name, str(torch_private.schema_of(operators[name]))) for name in sorted(operators)]
        self.offered = tuple([CustomOperator(name, schema) for name, schema in schemas])
        if operators:
            _log.info("custom ops are allowed", tenant=tenant, ops=len(operators))


def _resolve(text: str, libraries: Sequence[OperatorLibrary], tenants: bool) -> AllowedOperators:
    name, separator, tenant = text.partition("@")
    try:
        if separator:
            check_tenant(tenant)
        if name.startswith(MODULE):
            return AllowedOperators(dict(_module_operators(name.removeprefix(MODULE))), tenant)
        return _library_operators(name, tenant, libraries, tenants)
    except ConfigurationError as error:
        raise StartupError(
            f"--operators {text}: {error}. Name a tenant after @, or leave out @ to allow the ops to every tenant"
        ) from error
    except StartupError as error:
        raise StartupError(f"--operators {text}: {error}") from error.__cause__


def _library_operators(name: str, tenant: str, libraries: Sequence[OperatorLibrary], tenants: bool) -> AllowedOperators:
    library = next((library for library in libraries if library.name == name), None)
    if library is None:
        installed = ", ".join(sorted(library.name for library in libraries)) or "none"
        raise StartupError(
            f"no plugin offers an operator library of this name (installed: {installed}). Install its package on this machine, or allow the "
            "Python ops of a module: `--operators module:NAME`"
        )
    if not library.every_tenant and not tenant and tenants:
        raise StartupError(
            f"the kernels of {name} do not validate arguments of hostile clients: name a tenant that you trust, `{name}@TENANT`"
        )
    _import(library.module)
    has_check = type(library).check is not OperatorLibrary.check
    return AllowedOperators(
        {op: _registered_operator(op, library.module) for op in sorted(library.operators)},
        tenant,
        library.check if has_check else None,
    )


def _module_operators(module: str) -> Iterator[tuple[str, torch._ops.OpOverload]]:
    """Yield the custom ops in Python whose functions a module or its submodules define."""
    _import(module)
    python_operators = [*torch_private.python_operators(module)]
    if not python_operators:
        raise StartupError(
            f"the module {module} defines no op with `torch.library.custom_op` or `triton_op`. Ops of compiled libraries need a plugin: "
            "`djinn plugins new NAME --kind operators`"
        )
    for func in python_operators:
        yield func.name(), _require_usable(func)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        raise StartupError(
            f"importing the module {module!r} in {sys.executable} raised {type(error).__name__}: {error}"
        ) from error


def _registered_operator(name: str, module: str) -> torch._ops.OpOverload:
    func = torch_private.overload_called(name)
    if func is None:
        raise StartupError(
            f"importing the module {module!r} registers no op {name!r}: install a version of the module that has this op"
        )
    return _require_usable(func)


def _require_usable(func: torch._ops.OpOverload) -> torch._ops.OpOverload:
    if torch_private.is_composite(func):
        raise StartupError(
            f"{func.name()} is composed of other ops, which clients record: the library must not list it"
        )
    if reason := custom_refusal(func):
        raise StartupError(f"programs cannot contain {func.name()}: {reason}")
    if len(str(torch_private.schema_of(func))) > limits.SCHEMA:
        raise StartupError(f"the schema of {func.name()} has more than {limits.SCHEMA} characters")
    return func


def checked_custom(op: str, overload: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that checks the arguments, calls the kernel, and copies aliased results."""
    check = _checks.get(op)
    schema = torch_private.schema_of(overload)
    names = tuple(a.name for a in schema.arguments)
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    unaliased = [index for index, result in enumerate(schema.returns) if result.alias_info is None]

    def check_and_call(*positional: Any, **keywords: Any) -> Any:
        arguments = defaults | dict(zip(names, positional, strict=False)) | keywords
        if check is not None:
            try:
                check(op, arguments)
            except (AttributeError, IndexError, TypeError) as error:
                raise TypeError(f"{op} was called with arguments of wrong types: {error}") from error
        result = kernel(*positional, **keywords)
        return _copy_aliases(result, arguments.values(), unaliased) if unaliased else result

    return check_and_call


def _copy_aliases(results: Any, arguments: Iterable[Any], unaliased: Sequence[int]) -> Any:
    """Return the results. Copy those at `unaliased` indices that share memory with an argument or another result."""
    used_storages = {torch_private.storage_key(tensor) for tensor in _tensors(arguments)}

    def copy_alias(result: Any) -> Any:
        if isinstance(result, (list, tuple)):
            return [copy_alias(item) for item in result]
        if not isinstance(result, torch.Tensor):
            return result
        if torch_private.storage_key(result) in used_storages:
            result = result.clone()
        used_storages.add(torch_private.storage_key(result))
        return result

    if not isinstance(results, tuple):
        return copy_alias(results)
    return tuple([copy_alias(result) if index in unaliased else result for index, result in enumerate(results)])


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)
