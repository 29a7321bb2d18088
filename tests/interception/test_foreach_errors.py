"""Ops over lists whose elements kernels refuse: the error is that of the element, at the op, in the CPU's words."""

from __future__ import annotations

import pytest
import torch

import djinn

# What is done with lists of tensors of int16, uint8, complex64 and float32, and with one of the last whose sizes differ.
REFUSED = {
    "sizes": lambda i, u, c, f, g: torch._foreach_add(f, g),
    "sizes of pow": lambda i, u, c, f, g: torch._foreach_pow(f, g),
    "sizes in place": lambda i, u, c, f, g: torch._foreach_maximum_(f, g),
    "mul_ of integers": lambda i, u, c, f, g: torch._foreach_mul_(i, 0.5),
    "sub_ of integers": lambda i, u, c, f, g: torch._foreach_sub_(i, 0.5 + 1j),
    "sub_ of a bool": lambda i, u, c, f, g: torch._foreach_sub_(i, True),
    "lerp of integers": lambda i, u, c, f, g: torch._foreach_lerp(u, u, u),
    "lerp_ by a number": lambda i, u, c, f, g: torch._foreach_lerp_(i, i, 0.5),
    "addcmul of bytes": lambda i, u, c, f, g: torch._foreach_addcmul(u, u, u, 0.5 + 1j),
    "addcmul of lists": lambda i, u, c, f, g: torch._foreach_addcmul(u, u, u, [300.0] * 3),
    "mul_ by a complex number": lambda i, u, c, f, g: torch._foreach_mul_(f, 1j),
    "sub_ of floats and a bool": lambda i, u, c, f, g: torch._foreach_sub_(f, [True] * 3),
    "numbers in a tensor": lambda i, u, c, f, g: torch._foreach_addcmul(f, f, f, torch.ones(2)),
    "numbers in a matrix": lambda i, u, c, f, g: torch._foreach_addcmul(f, f, f, torch.ones(3, 1)),
    "every second number": lambda i, u, c, f, g: torch._foreach_addcdiv_(f, f, f, torch.ones(6)[::2]),
    "ceil of complex numbers": lambda i, u, c, f, g: torch._foreach_ceil(c),
    "max of complex numbers": lambda i, u, c, f, g: torch._foreach_max(c),
}


def error_of(refused, device):
    dtypes = (torch.int16, torch.uint8, torch.complex64, torch.float32)
    lists = [[torch.ones(3, dtype=dtype).to(device) for _ in range(3)] for dtype in dtypes]
    with pytest.raises(Exception) as caught:
        refused(*lists, [torch.ones(4).to(device) for _ in range(3)])
    djinn.synchronize()
    return caught.value


@pytest.mark.parametrize("name", REFUSED)
def test_foreach_error_equals_cpu(embedded, name):
    expected, got = error_of(REFUSED[name], "cpu"), error_of(REFUSED[name], embedded)
    assert (type(got), str(got)) == (type(expected), str(expected))


def test_foreach_accepts_cpu_tensor_of_scalars(embedded):
    numbers = torch.tensor([1.0, 2.0, 3.0])
    for device in ("cpu", embedded):
        ones = [torch.ones(2).to(device) for _ in range(3)]
        assert [t.tolist() for t in torch._foreach_addcmul(ones, ones, ones, numbers)] == [[2, 2], [3, 3], [4, 4]]
        torch._foreach_addcdiv_(ones, ones, ones, numbers)
        assert ones[2].tolist() == [4, 4]


def test_valid_foreach_call_is_one_instruction(embedded):
    whole = [torch.ones(3, dtype=torch.int64, device=embedded) for _ in range(4)]
    djinn.synchronize()
    djinn.reset_stats()
    torch._foreach_add_(whole, 2)
    assert djinn.stats()["ops_captured"] == 1
    assert [t.tolist() for t in whole] == [[3, 3, 3]] * 4
