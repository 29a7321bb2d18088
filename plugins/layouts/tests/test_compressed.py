"""CSR, CSC, BSR and BSC tensors on the device: results equal the CPU's bit by bit; unsupported ops are refused by name."""

from __future__ import annotations

import io

import pytest
import torch
from compared_layouts import COMPRESSED, equal, plain

import djinn

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC|invariant)")

VALUES = torch.tensor([1.0, 2.0, 3.0, 4.0])


def csr(device):
    """Return a CSR tensor of shape (3, 4)."""
    parts = (torch.tensor([0, 1, 3, 4]), torch.tensor([2, 0, 1, 3]), VALUES.clone())
    return torch.sparse_csr_tensor(*[part.to(device) for part in parts], (3, 4))


def leaf(device):
    return csr(device).requires_grad_()


def dense(device):
    return torch.arange(20.0, device="cpu").reshape(4, 5).sin().to(device)


def square(device):
    return (torch.arange(16.0).reshape(4, 4) % 3 * (torch.arange(16.0).reshape(4, 4).sin() > 0)).to(device)


def of_layout(layout, device):
    return square(device).to_sparse(layout=layout, blocksize=(2, 2) if layout in COMPRESSED[2:] else None)


def with_vectors(device):
    """Return a CSR tensor with one dense dimension."""
    return torch.sparse_csr_tensor([0, 1, 2], [0, 1], [[1.0, 2.0], [3.0, 4.0]], (2, 2, 2), device=device)


def saved(made, where):
    file = io.BytesIO()
    torch.save({"it": made}, file)
    file.seek(0)
    return torch.load(file, map_location=where)["it"]


def gradients(loss):
    def case(device):
        s, w = leaf(device), dense(device).requires_grad_()
        loss(s, w).sum().backward()
        return [s.grad, w.grad]

    return case


def gradient_of_values(device):
    values = VALUES.clone().to(device).requires_grad_()
    crow, col = torch.tensor([0, 1, 3, 4]).to(device), torch.tensor([2, 0, 1, 3]).to(device)
    torch.sparse_csr_tensor(crow, col, values, (3, 4)).to_dense().square().sum().backward()
    return values.grad


def gradient_of_dense_tensor(device):
    x = square(device).requires_grad_()
    torch.sparse.mm(x.to_sparse_csr(), dense(device)).sum().backward()
    return x.grad


def write_case(write):
    def case(device):
        s = csr(device)
        values = s.values()
        write(s)
        return [s, values]

    return case


def repr_case(make):
    return lambda device: repr(make(device)).replace("device='remote_accelerator:0', ", "")


def each_layout_case(use):
    return lambda device: [use(of_layout(layout, device)) for layout in COMPRESSED]


CASES = {
    "sizes are found": lambda d: torch.sparse_csr_tensor(
        *[p.to(d) for p in (torch.tensor([0, 1, 2]), torch.tensor([0, 2]), VALUES[:2])]
    ),
    "of lists": lambda d: torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], (2, 2), device=d),
    "of lists, any layout": lambda d: torch.sparse_compressed_tensor(
        [0, 1, 2], [0, 1], [1.0, 2.0], (2, 2), layout=torch.sparse_csc, device=d
    ),
    "of another dtype": lambda d: torch.sparse_csr_tensor(
        [0, 1, 2], [0, 1], [1.0, 2.0], (2, 2), dtype=torch.float64, device=d
    ),
    "batches": lambda d: torch.stack([square(d), square(d)]).to_sparse_csr(),
    "torch.empty": lambda d: torch.empty(3, 4, layout=torch.sparse_csr, device=d).values().shape,
    "torch.zeros": lambda d: torch.zeros(3, 4, layout=torch.sparse_csc, device=d),
    "moved": lambda d: [of_layout(layout, "cpu").to(d) for layout in COMPRESSED],
    "moved, as another dtype": lambda d: csr("cpu").to(d, torch.float64),
    "conversions of dense ones": lambda d: [of_layout(layout, d) for layout in COMPRESSED],
    "by name": lambda d: [
        square(d).to_sparse_csr(),
        square(d).to_sparse_csc(),
        square(d).to_sparse_bsr((2, 2)),
        square(d).to_sparse_bsc((2, 2)),
    ],
    "of COO": lambda d: [square(d).to_sparse().to_sparse_csr(), square(d).to_sparse().to_sparse_bsr((2, 2))],
    "to COO": lambda d: [of_layout(layout, d).to_sparse() for layout in COMPRESSED],
    "to_dense": each_layout_case(lambda s: s.to_dense()),
    "between layouts": lambda d: [
        csr(d).to_sparse_csc(),
        csr(d).to_sparse_csr(),
        of_layout(torch.sparse_bsr, d).to_sparse_bsc((2, 2)),
    ],
    "facts": each_layout_case(
        lambda s: [
            str(s.layout),
            s.is_sparse,
            s.is_sparse_csr,
            s._nnz(),
            s.dense_dim(),
            s.sparse_dim(),
            s.shape,
            s.dim(),
            s.numel(),
        ]
    ),
    "rows": lambda d: [csr(d).crow_indices(), csr(d).col_indices(), csr(d).values()],
    "columns": lambda d: [of_layout(torch.sparse_csc, d).ccol_indices(), of_layout(torch.sparse_csc, d).row_indices()],
    "sparse.mm": lambda d: torch.sparse.mm(csr(d), dense(d)),
    "matmul": lambda d: csr(d) @ dense(d),
    "mm of all": lambda d: [of_layout(layout, d) @ dense(d) for layout in COMPRESSED[:3:2]],
    "mv": lambda d: csr(d) @ dense(d)[:, 0],
    "addmm": lambda d: torch.addmm(torch.ones(3, 5, device=d), csr(d), dense(d), beta=2, alpha=3),
    "addmv": lambda d: torch.addmv(torch.ones(3, device=d), csr(d), dense(d)[:, 0]),
    "two sparse ones": lambda d: csr(d) @ of_layout(torch.sparse_csr, d),
    "reduced": lambda d: torch.sparse.mm(csr(d), dense(d), "amax"),
    "sampled_addmm": lambda d: torch.sparse.sampled_addmm(csr(d), dense(d)[:3], dense(d).t().contiguous()[:, :4]),
    "arithmetic": lambda d: [csr(d) * 2, csr(d) + csr(d), csr(d) * csr(d), -csr(d)],
    "in place": write_case(lambda s: s.mul_(3)),
    "in place, unary": write_case(lambda s: s.sqrt_()),
    "in place, emptied": write_case(lambda s: s.zero_()),
    "values are the tensor's": lambda d: (s := csr(d), s.values().mul_(2))[0],
    "sums": lambda d: [
        csr(d).sum(),
        csr(d).sum(0, keepdim=True),
        csr(d).sum(1, keepdim=True),
    ],
    "unary": lambda d: [csr(d).sqrt(), csr(d).relu(), csr(d).sin(), csr(d).abs(), csr(d).isnan()],
    "select": lambda d: [csr(d)[1], csr(d)[1, 2]],
    "transposed": lambda d: [csr(d).t(), csr(d).transpose(0, 1)],
    "mask": lambda d: square(d)[:3].sparse_mask(csr(d)),
    "converted": lambda d: [
        csr(d).double(),
        csr(d).half(),
        torch.zeros_like(csr(d)),
        csr(d).clone(),
        csr(d).to(torch.int64),
    ],
    "without elements, like it": lambda d: [
        torch.zeros_like(torch.stack([square(d), square(d)]).to_sparse_csr(), layout=torch.sparse_csc),
        torch.zeros_like(of_layout(torch.sparse_bsr, d), layout=torch.sparse_bsc),
        (torch.zeros_like(with_vectors(d), layout=torch.sparse_coo)).dense_dim(),
    ],
    "copied": lambda d: [csr(d).copy_(csr(d) * 2), csr(d).copy_(csr("cpu") * 2)],
    "gradients of mm": gradients(torch.sparse.mm),
    "gradients of matmul": gradients(lambda s, w: s @ w),
    "gradients of mm by sums": gradients(lambda s, w: torch.sparse.mm(s, w, "mean")),
    "gradients of mm by the largest terms": gradients(lambda s, w: torch.sparse.mm(s, w, "amax")),
    "gradients of mm by the smallest terms": gradients(lambda s, w: torch.sparse.mm(s, w, "amin")),
    "a product at some places into a tensor of another size": lambda d: torch.sparse.sampled_addmm(
        square(d).to_sparse_csr(), dense(d), dense(d).t(), out=csr(d)
    ),
    "gradients of to_dense": gradients(lambda s, w: s.to_dense() @ w),
    "gradients of sum": gradients(lambda s, w: s.sum() * w),
    "gradients of values": gradient_of_values,
    "gradients through values": gradients(lambda s, w: s.values().square().sum() * w),
    "resized": lambda d: [csr(d).resize_((5, 4)), csr(d).resize_((2, 4)).shape],
    "resized like another": lambda d: [
        of_layout(torch.sparse_csc, d).resize_as_sparse_(csr(d).to_sparse_csc()).row_indices(),
        (b := csr(d)).resize_as_sparse_(square(d).to_sparse_csr()).crow_indices(),
        b.shape,
    ],
    "gradients of a dense one": gradient_of_dense_tensor,
    "saved": lambda d: [saved(of_layout(layout, d), d) for layout in COMPRESSED],
    "loaded elsewhere": lambda d: saved(csr("cpu"), d),
    "printed": repr_case(csr),
    "printed, blocks": repr_case(lambda d: of_layout(torch.sparse_bsr, d)),
    "a leaf printed": repr_case(leaf),
    "a layer": lambda d: torch.nn.functional.linear(dense(d).t(), csr(d)),
}


@pytest.mark.parametrize("case", CASES)
def test_compressed_ops_equal_cpu(embedded, case):
    here, there = plain(CASES[case]("cpu")), plain(CASES[case](embedded))
    assert equal(here, there), (here, there)


INVALID = {
    "a column beyond the size": ([0, 1, 2], [0, 1000], 2),
    "a negative column": ([0, 1, 2], [0, -7], 2),
    "rows that end beyond the values": ([0, 1, 900], [0, 1], 2),
    "more columns than values": ([0, 1, 3], [0, 1, 2], 2),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_compressed_tensor_reaches_no_kernel(embedded, case):
    crow, col, count = INVALID[case]
    whole = torch.ones(4, device=embedded)
    parts = (
        torch.tensor(crow, device=embedded),
        torch.tensor(col, device=embedded),
        torch.ones(count, device=embedded),
    )
    made = torch.sparse_csr_tensor(*parts, (2, 4), check_invariants=False)
    with pytest.raises(RuntimeError, match=r"is not satisfied|must be"):
        made.to_dense()
    with pytest.raises(RuntimeError, match=r"is not satisfied|must be"):
        torch.sparse_csr_tensor(*parts, (2, 4), check_invariants=True)
    assert whole.sum().item() == 4


@pytest.mark.parametrize("terms", [[[9] * 5] * 3, [[-1] * 5] * 3, [0]], ids=["large", "negative", "few"])
def test_sparse_product_with_invalid_index_reaches_no_kernel(embedded, terms):
    whole, matrix, w = torch.ones(4, device=embedded), csr(embedded), dense(embedded)
    gradient, terms = torch.ones(3, 5, device=embedded), torch.tensor(terms, device=embedded)
    with pytest.raises(RuntimeError, match="sparse product by amax selected are invalid"):
        made, _ = torch.ops.aten._sparse_mm_reduce_impl_backward(matrix, gradient, w, "amax", terms, [True, True])
        made.to_dense().cpu()
    assert whole.sum().item() == 4


@pytest.mark.parametrize(
    "resize",
    [
        lambda s: s.resize_((4,)),
        lambda s: s.resize_((3, 3)),
        lambda s: s.resize_as_sparse_(s.to_dense()),
        lambda s: s.resize_as_sparse_(s.to_sparse_csc()),
        lambda s: s.to_dense().resize_as_sparse_(s),
    ],
)
def test_compressed_size_mismatches_raise_as_on_cpu(embedded, resize):
    with pytest.raises(RuntimeError) as here:
        resize(csr("cpu"))
    with pytest.raises(RuntimeError) as there:
        resize(csr(embedded))
    assert str(there.value)[:60] == str(here.value)[:60]


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_are_never_checked_for_contiguity(embedded, name):
    for device in ("cpu", embedded):
        with pytest.raises(RuntimeError, match=r"Sparse \w+ tensors do not have is_contiguous"):
            of_layout(name, device).is_contiguous()
        with pytest.raises(RuntimeError, match=r"Sparse \w+ tensors do not have is_contiguous"):
            of_layout(name, device).contiguous()


@pytest.mark.parametrize("refused", [lambda s: s.cumsum(0), lambda s: s == s, lambda s: s.sort()])  # noqa: PLR0124
def test_unsupported_compressed_ops_are_refused_by_name(embedded, refused):
    s = csr(embedded)
    with pytest.raises(
        djinn.errors.UnsupportedOperation,
        match=r"aten::\w+.* does not support compressed sparse tensors on remote_accelerator.*to_dense",
    ):
        refused(s)
    assert s.sum().item() == 10


def test_compressed_subclass_dispatches_layout():
    """These tensors need `dispatch_layout`. Otherwise PyTorch looks up the layout in C++, which raises."""

    class Compressed(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return torch.sparse_csr if func is torch.ops.prim.layout.default else None

    asked = torch.Tensor._make_wrapper_subclass(Compressed, (2, 2), layout=torch.sparse_csr, dispatch_layout=True)
    assert asked.layout is torch.sparse_csr
    assert asked.is_sparse_csr
    unasked = torch.Tensor._make_wrapper_subclass(Compressed, (2, 2), layout=torch.sparse_csr)
    with pytest.raises(RuntimeError, match="layout_impl is only implemented for TensorImpl subclasses"):
        _ = unasked.layout
