"""Rules for devices, and for arguments that PyTorch passes as plain integers: dtypes, layouts, memory formats.

A dtype that does not exist makes kernels read beyond their tables. Only the executor's own device is allowed, because
another device belongs to another tenant.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from djinn_core import torch_private
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.form import Argument, Constant, Enumerated, Form, SelfDevice

_KINDS: Final = {
    "ScalarType": "dtype",
    "Layout": "layout",
    "MemoryFormat": "memory_format",
    "Device": "device",
}


def check_kinds(form: Form, overload: Any) -> None:
    """Check that an op call has dtypes, layouts, memory formats and devices where `overload` expects them.

    Raises:
        UnsupportedOperation: an argument has another type.
    """
    expected_kinds = _argument_kinds(overload)
    if not expected_kinds:
        return
    names = [argument.name for argument in torch_private.schema_of(overload).arguments]
    for name, argument in [*zip(names, form.args, strict=False), *form.kwargs]:
        kind = expected_kinds.get(name)
        if kind is not None and not _has_kind(kind, argument):
            raise UnsupportedOperation(
                f"{form.op}: {name} must be a {kind.replace('_', ' ')}"
                + (" of this executor" if kind == "device" else "")
            )


def _has_kind(kind: str, argument: Argument) -> bool:
    if isinstance(argument, Constant) and argument.value is None:
        return True
    if kind == "device":
        return isinstance(argument, SelfDevice)
    return isinstance(argument, Enumerated) and argument.kind == kind


@functools.cache
def _argument_kinds(overload: Any) -> dict[str, str]:
    """Return, by argument name, the kind of each argument that must be a dtype, layout, memory format or device."""
    types = {a.name: str(a.real_type) for a in torch_private.schema_of(overload).arguments}
    base_types = {name: kind.removeprefix("Optional[").removesuffix("]") for name, kind in types.items()}
    return {name: _KINDS[kind] for name, kind in base_types.items() if kind in _KINDS}
