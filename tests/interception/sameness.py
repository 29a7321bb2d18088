"""A case is a function of a device. It is run on the CPU and on the remote device, and both must say the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from djinn_client.interception.tensors.lazy_tensor import LazyTensor

REMOTE = "remote_accelerator:0"

Case = Callable[[str], Any]


def numbers(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """0, 1, 2... in a tensor of its own."""
    count = int(torch.Size(shape).numel())
    return torch.arange(count, device="cpu").reshape(shape).to(dtype).clone().to(device)


def waves(device: str, *shape: int) -> torch.Tensor:
    """Numbers between -1 and 1, no two the same."""
    return numbers("cpu", *shape).add_(1).sin_().to(device)


def complexes(device: str) -> torch.Tensor:
    """Six complex numbers."""
    return torch.complex(numbers("cpu", 2, 3), numbers("cpu", 2, 3) + 6).to(device)


def same(case: Case) -> None:
    """Run `case` on both sides and compare what it returns."""
    here, there = run(case, "cpu"), run(case, REMOTE)
    compare(here, there, case.__name__)


def fails_alike(case: Case) -> None:
    """Run `case` on both sides: it must raise the same kind of error."""
    kinds = []
    for device in ("cpu", REMOTE):
        try:
            run(case, device)
        except Exception as error:
            kinds.append(type(error))
        else:
            raise AssertionError(f"nothing was raised on {device}")
    assert issubclass(kinds[1], kinds[0]), kinds


def run(case: Case, device: str) -> Any:
    torch.manual_seed(0)
    out = case(device)
    return fetched(out)


def fetched(out: Any) -> Any:
    """`out` with tensors replaced by what can be said of them, and their elements on the CPU."""
    if isinstance(out, torch.Tensor):
        return described(out)
    if isinstance(out, torch.nn.Module):
        return fetched(dict(out.state_dict()))
    if isinstance(out, dict):
        return {name: fetched(value) for name, value in out.items()}
    if isinstance(out, (list, tuple)):
        return [fetched(value) for value in out]
    return "the device" if isinstance(out, torch.device) and out.type in {"cpu", "remote_accelerator"} else out


def described(out: torch.Tensor) -> tuple[str, dict[str, Any], torch.Tensor]:
    if out.is_meta:
        return "meta", {"shape": out.shape, "stride": out.stride(), "dtype": out.dtype}, torch.empty(0)
    looks = {name: getattr(out, name) for name in ("dtype", "shape", "requires_grad", "is_leaf")}
    looks |= {name: getattr(out, name)() for name in ("stride", "storage_offset", "is_conj", "is_neg")}
    looks["parameter"] = isinstance(out, torch.nn.Parameter)
    looks["class"] = "Tensor" if type(out) in {LazyTensor, torch.nn.Parameter} else type(out).__name__
    return "tensor", looks, out.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().clone()


def compare(here: Any, there: Any, at: str) -> None:
    assert type(here) is type(there), f"{at}: {here} here, {there} there"
    if isinstance(here, dict):
        assert list(here) == list(there), at
        for name in here:
            compare(here[name], there[name], f"{at}[{name!r}]")
    elif isinstance(here, (list, tuple)):
        assert len(here) == len(there), at
        for index, (one, other) in enumerate(zip(here, there, strict=True)):
            compare(one, other, f"{at}[{index}]")
    elif isinstance(here, torch.Tensor):
        torch.testing.assert_close(there, here, equal_nan=True, msg=lambda text: f"{at}: {text}")
    else:
        assert here == there, at
