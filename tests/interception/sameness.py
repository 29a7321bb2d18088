"""Compare the CPU and the remote device. A case is a function of a device, whose results must be equal on both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from djinn_client.interception.tensors.lazy_tensor import LazyTensor

REMOTE = "remote_accelerator:0"

Case = Callable[[str], Any]


def numbers(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a new tensor 0, 1, 2, ..."""
    count = int(torch.Size(shape).numel())
    return torch.arange(count, device="cpu").reshape(shape).to(dtype).clone().to(device)


def waves(device: str, *shape: int) -> torch.Tensor:
    """Return distinct numbers between -1 and 1."""
    return numbers("cpu", *shape).add_(1).sin_().to(device)


def complexes(device: str) -> torch.Tensor:
    """Return six complex numbers."""
    return torch.complex(numbers("cpu", 2, 3), numbers("cpu", 2, 3) + 6).to(device)


def assert_same_as_cpu(case: Case) -> None:
    """Run `case` on both devices and compare the results."""
    here, there = run(case, "cpu"), run(case, REMOTE)
    compare(here, there, case.__name__)


def assert_same_error(case: Case) -> None:
    """Run `case` on both devices and assert that it raises the same kind of error."""
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
    return comparable(out)


def comparable(out: Any) -> Any:
    """Return `out` with each tensor replaced by its properties and its elements on the CPU."""
    if isinstance(out, torch.Tensor):
        return describe_tensor(out)
    if isinstance(out, torch.nn.Module):
        return comparable(dict(out.state_dict()))
    if isinstance(out, dict):
        return {name: comparable(value) for name, value in out.items()}
    if isinstance(out, (list, tuple)):
        return [comparable(value) for value in out]
    return "the device" if isinstance(out, torch.device) and out.type in {"cpu", "remote_accelerator"} else out


def describe_tensor(out: torch.Tensor) -> tuple[str, dict[str, Any], torch.Tensor]:
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
