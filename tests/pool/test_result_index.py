"""Every way to make a tensor keeps the device index of its operands, or the index that the call names."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import djinn

FIRST, SECOND = "remote_accelerator:1", "remote_accelerator:2"


@torch.library.custom_op("djinn_tests::cube_here", mutates_args=(), device_types="cpu")
def cube_here(x: torch.Tensor) -> torch.Tensor:
    """Cube, as an op that no executor has."""
    return x**3


@torch.library.custom_op("djinn_tests::count_here", mutates_args=(), device_types="cpu")
def count_here(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Count, as an op that no executor has, with a result on the named device."""
    return torch.arange(float(x.numel()), device=device)


@torch.library.custom_op("djinn_tests::double_here", mutates_args=("x",), device_types="cpu")
def double_here(x: torch.Tensor) -> None:
    """Double in place, as an op that no executor has."""
    x.mul_(2)


@pytest.fixture(scope="module")
def pool_with_fallback(make_pool):
    """Yield the router of two executors, with `client_fallback`."""
    with make_pool("round_robin", client_fallback=True) as router:
        yield router
    djinn.reset_stats()


def sample_input(device):
    return torch.arange(6.0).view(2, 3).to(device) - 2


def write_with_fallback(device):
    x = sample_input(device)
    double_here(x)
    return x


def save_and_load(device):
    file = io.BytesIO()
    torch.save({"x": sample_input(device)}, file)
    file.seek(0)
    return torch.load(file)["x"]


def draw_with_generator(device):
    return torch.rand(3, generator=torch.Generator(device).manual_seed(3), device=device)


def redraw_from_state(device):
    state = torch.Generator(device).manual_seed(5).get_state()
    generator = torch.Generator(device)
    generator.set_state(state)
    return torch.rand(3, generator=generator, device=device)


def move_module(device):
    module = torch.nn.BatchNorm1d(3).to(device)
    module(sample_input(device))
    return [*module.parameters(), *module.buffers()]


def differentiate(device):
    x = sample_input(device).requires_grad_()
    cube = torch.where(x > 0, x**2, x.exp())
    cube.sum().backward()
    return [x.grad, torch.func.grad(lambda y: (y**2).sum())(sample_input(device))]


def in_place_of_parts(device):
    x = sample_input(device)
    x[0, torch.tensor([0, 2])] = torch.tensor([7.0, 8.0])
    x[1] = torch.tensor(5.0)
    x.data = sample_input(device) + x
    return x


def add_in_capture(device):
    with djinn.capture():
        return sample_input(device).add(1)


SOURCES = {
    "upload": sample_input,
    "upload of a strided tensor": lambda d: torch.arange(6.0).view(2, 3).t().to(d),
    "upload of a number": lambda d: torch.tensor(3).to(d),
    "non-blocking upload": lambda d: torch.arange(3).to(d, non_blocking=True),
    "upload of a conjugate": lambda d: torch.tensor([1 + 2j]).conj().to(d),
    "factories": lambda d: [torch.full((2,), 3, device=d), torch.eye(2, device=d), torch.linspace(0, 1, 3, device=d)],
    "tensor": lambda d: [torch.tensor([1, 2], device=d), torch.as_tensor([1.0], device=d), torch.empty(0, device=d)],
    "windows": lambda d: [torch.hann_window(4, device=d), torch.tril_indices(2, 2, device=d)],
    "factories under a default": lambda d: default_device(
        d, lambda: [torch.ones(2), torch.tensor([2.0]), torch.arange(3)]
    ),
    "like": lambda d: [
        torch.ones_like(sample_input(d)),
        sample_input(d).new_zeros(2),
        sample_input(d).new_tensor([1, 2]),
        sample_input(d).new_tensor(np.ones(2)),
        sample_input(d).new([1.0]),
        sample_input(d).new(2).zero_(),
    ],
    "like, named": lambda d: (
        torch.zeros_like(torch.ones(2, device=FIRST if d != FIRST else SECOND), device=d)
        if d != "cpu"
        else torch.zeros(2)
    ),
    "CPU operands": lambda d: [
        sample_input(d) + torch.tensor(2.0),
        sample_input(d)[torch.tensor([1, 0])],
        torch.tensor(2.0) * sample_input(d),
    ],
    "constants": lambda d: [torch.ones((), dtype=torch.int64, device=d) + 2, torch.arange(4, device=d)[1:] * 2],
    "bool folding": lambda d: [
        torch.tensor([True, False], device=d).logical_not(),
        torch.tensor([1, 2], device=d) == 1,
    ],
    "data-dependent sizes": lambda d: [
        sample_input(d).nonzero(),
        sample_input(d)[sample_input(d) > 0],
        sample_input(d).unique(),
    ],
    "data-dependent lists": lambda d: [
        *torch.unique(sample_input(d), return_counts=True),
        *torch.where(sample_input(d) > 0),
    ],
    "repeats": lambda d: torch.arange(3, device=d).repeat_interleave(torch.tensor([1, 0, 2]).to(d)),
    "read back": lambda d: torch.tensor(sample_input(d).tolist(), device=d),
    "deepcopy": lambda d: copy.deepcopy(sample_input(d)),
    "deepcopy of a view": lambda d: copy.deepcopy(sample_input(d).t()),
    "deepcopy of a parameter": lambda d: copy.deepcopy(torch.nn.Parameter(sample_input(d))),
    "pickle": lambda d: pickle.loads(pickle.dumps(sample_input(d))),
    "save and load": save_and_load,
    "generator": draw_with_generator,
    "state of a generator": redraw_from_state,
    "module": move_module,
    "autograd": differentiate,
    "writes": in_place_of_parts,
    "capture": add_in_capture,
    "sparse": lambda d: parts_of(sample_input(d).to_sparse().coalesce()),
    "sparse upload": lambda d: parts_of(sample_input("cpu").to_sparse().to(d).coalesce()),
    "sparse factory": lambda d: torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], device=d).to_dense(),
    "compressed": lambda d: [
        sample_input(d).to_sparse_csr().values(),
        sample_input("cpu").to_sparse_csr().to(d).crow_indices(),
    ],
    "nested": lambda d: [*torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=d).unbind()],
    "nested upload": lambda d: [*torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).to(d).unbind()],
    "quantized": lambda d: torch.quantize_per_tensor(sample_input(d), 0.5, 0, torch.qint8).dequantize(),
    "quantized upload": lambda d: (
        torch.quantize_per_tensor(sample_input("cpu"), 0.5, 0, torch.qint8).to(d).dequantize()
    ),
    "composites": lambda d: [
        torch.nn.functional.one_hot(torch.tensor([0, 2]).to(d)),
        torch.block_diag(sample_input(d), sample_input(d)),
    ],
    "batched": lambda d: torch.func.vmap(lambda row: row * torch.tensor(2.0))(sample_input(d)),
    "storage": lambda d: torch.empty(0, device=d).set_(sample_input(d).untyped_storage(), 1, (2,)),
    "fallback": lambda d: cube_here(sample_input(d)),
    "fallback onto a device that it is given": lambda d: count_here(sample_input(d), torch.device(d)),
    "fallback that writes": write_with_fallback,
}


def default_device(device, make):
    with torch.device(device):
        return make()


def parts_of(sparse):
    return [sparse.indices(), sparse.values(), sparse.to_dense()]


def as_list(found):
    return found if isinstance(found, list) else [found]


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:The PyTorch API of nested", "ignore:torch.quantize_per", "ignore:Sparse invariant"
)
@pytest.mark.parametrize("source", SOURCES)
def test_result_keeps_index_of_operands(pool_with_fallback, source):
    make = SOURCES[source]
    expected = as_list(make("cpu"))
    for device in (SECOND, FIRST):
        made = as_list(make(device))
        assert [tensor.device for tensor in made] == [torch.device(device)] * len(expected)
        for one, other in zip(made, expected, strict=True):
            if source not in ("generator", "state of a generator"):  # those of a GPU draw other numbers
                assert torch.equal(one.cpu(), other), device
            one + one  # on one device, also to the executor


def test_compiled_graph_constants_keep_index(pool_with_fallback):
    compiled = torch.compile(
        lambda x: x[torch.tensor([1, 0])] + torch.tensor([1.0, 2.0, 3.0]).to(x.device), backend="djinn"
    )
    for _ in range(3):
        made = compiled(sample_input(SECOND))
        assert made.device == torch.device(SECOND)
        assert made.tolist() == [[2, 4, 6], [-1, 1, 3]]
