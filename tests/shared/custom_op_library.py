"""Custom ops that the tests' servers import: Python ops of a module, and an operator library."""

from __future__ import annotations

import torch
from torch import Tensor

from djinn.hooks import CastPolicy, OperatorLibrary, hookimpl

djinn_api_version = "2.0"


@torch.library.custom_op("djinn_custom::scale", mutates_args=())
def scale(x: Tensor, factor: float) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * factor)  # which no remote tensor can do


scale.register_fake(lambda x, factor: torch.empty_like(x))
scale.register_vmap(lambda info, dims, x, factor: (scale(x, factor), dims[0]))
scale.register_autocast("cpu", torch.bfloat16)


def _keep_factor(ctx, inputs, output):
    ctx.factor = inputs[1]


scale.register_autograd(lambda ctx, grad: (scale(grad, ctx.factor), None), setup_context=_keep_factor)


@torch.library.custom_op("djinn_custom::add_to", mutates_args=("x", "others"))
def add_to(x: Tensor, others: list[Tensor], number: float) -> None:
    for one in (x, *others):
        one.numpy()[...] += number


@torch.library.custom_op("djinn_custom::add_and_sum", mutates_args=("x",))
def add_and_sum(x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
    x.numpy()[...] += 1 if y is None else y.numpy()
    return x.sum(), x * 2


add_and_sum.register_fake(lambda x, y=None: (x.new_empty(()), torch.empty_like(x)))


@torch.library.custom_op("djinn_custom::pieces", mutates_args=())
def pieces(tensors: list[Tensor], count: int) -> list[Tensor]:
    return [part.clone() for one in tensors for part in one.chunk(count)]


pieces.register_fake(lambda tensors, count: [torch.empty_like(part) for one in tensors for part in one.chunk(count)])


@torch.library.custom_op("djinn_custom::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    return x[x > 0].clone()


@positive.register_fake
def _positive(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@torch.library.custom_op("djinn_custom::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x.sum(0)


@torch.library.custom_op("djinn_custom::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


noise.register_fake(torch.empty_like)

# An operator library: ops that a C++ library would register, without a fake kernel.
LIBRARY = torch.library.Library("djinn_library", "DEF")
LIBRARY.define("pick(Tensor x, Tensor index) -> Tensor")
LIBRARY.define("pick.out(Tensor x, Tensor index, *, Tensor(a!) out) -> Tensor(a!)")
LIBRARY.define("same(Tensor x) -> Tensor")
LIBRARY.define("hidden(Tensor x) -> Tensor")
LIBRARY.define("halve_(Tensor(a!) x) -> Tensor(a!)")


def _pick_out(x, index, *, out):
    return out.copy_(x[index])


def _halve(x):
    return x.mul_(0.5)


LIBRARY.impl("pick", lambda x, index: x[index], "CPU")
LIBRARY.impl("pick.out", _pick_out, "CPU")
LIBRARY.impl("same", lambda x: x, "CPU")
LIBRARY.impl("hidden", lambda x: x + 1, "CPU")
LIBRARY.impl("halve_", _halve, "CPU")


class Library(OperatorLibrary):
    """An operator library as in another author's plugin, which imports only `djinn`."""

    name = "tests"
    module = "custom_op_library"
    package = "the package of the tests"
    operators = frozenset({f"djinn_library::{name}" for name in ("pick", "pick.out", "same", "halve_")})

    def metadata(self, op):
        if op == "djinn_library::pick":
            return lambda x, index: x.new_empty((*index.shape, *x.shape[1:]))
        return None

    def cast_policy(self, op):
        return CastPolicy(torch.float32, restores=True) if op == "djinn_library::pick" else None

    def check(self, op, arguments):
        if "index" in arguments and not (
            0 <= int(arguments["index"].min()) <= int(arguments["index"].max()) < len(arguments["x"])
        ):
            raise ValueError(f"{op}: index must lie in 0 to {len(arguments['x']) - 1}")


class Trusting(OperatorLibrary):
    """A library for named tenants only."""

    name = "trusting"
    module = "custom_op_library"
    operators = frozenset({"djinn_library::hidden"})
    every_tenant = False


@hookimpl
def djinn_register_operators():
    return [Library(), Trusting()]
