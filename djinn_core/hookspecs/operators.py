"""Operator libraries: custom ops that a program may run on the executor as single ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from attrs.validators import instance_of

from djinn_core.hookspecs import hookspec


@attrs.frozen
class CastPolicy:
    """How autocast calls an op.

    Attributes:
        dtype: dtype to which floating-point tensors are cast, except float64 ones.
        restores: True if results get the dtype of the first tensor argument.
    """

    dtype: torch.dtype = attrs.field(default=torch.float32, validator=instance_of(torch.dtype))
    restores: bool = attrs.field(default=False, validator=instance_of(bool))


class OperatorLibrary:
    """Describe the custom ops of one library. The operator of a server allows them with `djinn serve --operators NAME`.

    If the library is allowed, the executor imports `module` at its start and looks each op up once. A client can name only these
    ops. The client calls `metadata` and `cast_policy`; the executor calls `check`. The plugin must not import the library itself.

    Attributes:
        name: unique among operator libraries, as `--operators` names it.
        module: module whose import registers the ops with PyTorch, such as `torchvision`.
        operators: names of the overloads, such as `torchvision::nms` or `mylib::scale.out`. The overload `default` has no suffix.
            Include the ops that autograd calls, such as `torchvision::_roi_align_backward`.
        package: the package to install on the server, as shown in error messages: `the package djinn-torchvision`.
        data_dependent: names of the ops whose result shapes depend on data. Each call waits for the executor, as `nonzero` does.
        every_tenant: False if the kernels do not validate arguments of hostile clients. The server then refuses `--operators
            NAME` and needs a tenant: `--operators NAME@TENANT`. Programs may name the library for executors of their own.
    """

    name: str
    module: str
    operators: frozenset[str]
    package: str = ""
    data_dependent: frozenset[str] = frozenset()
    every_tenant: bool = True

    def metadata(self, op: str) -> Callable[..., Any] | None:
        """Return a function that computes the results of `op` on meta tensors, or None.

        If it returns None, PyTorch uses the op's fake kernel (`torch.library.register_fake`) or its kernel for the meta
        device. If it has neither, each call waits for the executor.
        """
        del op
        return None

    def cast_policy(self, op: str) -> CastPolicy | None:
        """Return how autocast calls `op`, or None.

        If it returns None, autocast casts as `torch.library.register_autocast` says for the op, or does not cast.
        """
        del op
        return None

    def check(self, op: str, arguments: Mapping[str, Any]) -> None:
        """Check arguments that the kernel of `op` does not check itself, before each call on the executor.

        Tensors are on the executor's device.

        Args:
            op: name of the overload.
            arguments: by name, with defaults.

        Raises:
            ValueError: the kernel would read or write beyond a tensor. The call fails with this message.
        """
        del op, arguments

    def implementation(self, op: str) -> Callable[..., Any] | None:
        """Return the function that runs `op` on the executor, or None.

        Only ops of Djinn itself are requested: today `djinn::layout_call`. The first library that returns a function
        runs the op. The op needs no `--operators`, so the function must check arguments of any client.
        """
        del op
        return None


@hookspec
def djinn_register_operators(settings: Any) -> Iterable[OperatorLibrary]:
    """Return the operator libraries that this plugin offers.

    Called once in each client and executor process, when the client first meets a custom op, and at the start of the executor. An exception
    disables the plugin.
    """
    del settings
    raise NotImplementedError
