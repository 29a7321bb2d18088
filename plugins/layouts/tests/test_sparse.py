"""Sparse COO tensors on the device: results equal the CPU's bit by bit; unsupported ops are refused by name."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from compared_layouts import equal, one_of_each, plain

import djinn

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)")

ROWS = torch.tensor([[0, 1, 1, 2], [2, 0, 0, 3]])
VALUES = torch.tensor([1.0, 2.0, 3.0, 4.0])


def sparse(device):
    """Return a COO tensor of shape (3, 4) with one duplicate index."""
    return torch.sparse_coo_tensor(ROWS.clone().to(device), VALUES.clone().to(device), (3, 4))


def leaf(device):
    return sparse(device).requires_grad_()


def dense(device):
    return torch.arange(20.0, device="cpu").reshape(4, 5).sin().to(device)


def hybrid(device):
    return torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]).to(device), dense(device)[:3], (4, 5))


def saved(made, where):
    file = io.BytesIO()
    torch.save({"it": made}, file)
    file.seek(0)
    return torch.load(file, map_location=where)["it"]


def gradients(loss):
    def case(device):
        s, w = leaf(device), dense(device).requires_grad_()
        loss(s, w).sum().backward()
        return [g.coalesce() if g.is_sparse else g for g in (s.grad, w.grad)]

    return case


def gradient_of_values(use):
    def case(device):
        values = VALUES.clone().to(device).requires_grad_()
        use(torch.sparse_coo_tensor(ROWS.to(device), values, (3, 4))).sum().backward()
        return values.grad

    return case


def embedding(optimizer, **options):
    def case(device):
        torch.manual_seed(0)
        table = torch.nn.Embedding(10, 3, sparse=True)
        table.to(device)
        steps = optimizer(list(table.parameters()), lr=0.1, **options)
        for k in range(3):
            steps.zero_grad()
            table(torch.tensor([1, 2, 2, k]).to(device)).sin().sum().backward()
            steps.step()
        return [table.weight.detach(), table.weight.grad]

    return case


def embedding_bag(device):
    torch.manual_seed(0)
    table = torch.nn.EmbeddingBag(4, 2, sparse=True, mode="sum").to(device)
    table(torch.tensor([1, 2, 2]).to(device), torch.tensor([0, 2]).to(device)).sum().backward()
    return table.weight.grad.coalesce()


def two_backward_passes(device):
    table = torch.nn.Embedding(4, 2, sparse=True).to(device)
    for places in ([1, 2], [1, 3]):
        table(torch.tensor(places).to(device)).sum().backward()
    return table.weight.grad.coalesce()


def scale_values(device):
    s = sparse(device)
    s._values().mul_(2)
    return s


def write_case(write):
    def case(device):
        s = sparse(device)
        values = s._values()
        write(s)
        return [s, values]

    return case


def repr_case(make):
    return lambda device: repr(make(device)).replace("device='remote_accelerator:0', ", "")


CASES = {
    "sizes are found": lambda d: torch.sparse_coo_tensor(ROWS.to(d), VALUES.to(d)),
    "of lists": lambda d: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2), device=d),
    "without elements": lambda d: torch.sparse_coo_tensor((3, 4), device=d),
    "torch.zeros": lambda d: torch.zeros(3, 4, layout=torch.sparse_coo, device=d),
    "moved": lambda d: sparse("cpu").to(d),
    "moved coalesced": lambda d: sparse("cpu").coalesce().to(d),
    "to_sparse": lambda d: dense(d).to_sparse(),
    "to_sparse of one dimension": lambda d: dense(d).to_sparse(1),
    "to_dense": lambda d: sparse(d).to_dense(),
    "coalesce": lambda d: sparse(d).coalesce(),
    "hybrid": lambda d: hybrid(d).coalesce(),
    "parts": lambda d: [sparse(d)._indices(), sparse(d)._values(), sparse(d).coalesce().indices()],
    "facts": lambda d: [sparse(d).is_sparse, str(sparse(d).layout), hybrid(d).dense_dim(), sparse(d)._nnz()],
    "sparse.mm": lambda d: torch.sparse.mm(sparse(d), dense(d)),
    "matmul": lambda d: sparse(d) @ dense(d),
    "vector": lambda d: sparse(d) @ dense(d)[:, 0],
    "two sparse ones": lambda d: torch.sparse.mm(sparse(d), sparse(d).t()),
    "addmm": lambda d: torch.sparse.addmm(torch.ones(3, 5).to(d), sparse(d), dense(d)),
    "bmm": lambda d: torch.bmm(torch.stack([sparse(d), sparse(d)]), torch.stack([dense(d), dense(d)])),
    "arithmetic": lambda d: (sparse(d) * 2 - sparse(d)) * sparse(d) / 3,
    "dense times sparse": lambda d: torch.full((3, 4), 2.0, device=d) * sparse(d),
    "dense plus sparse": lambda d: torch.ones(3, 4, device=d) + sparse(d),
    "into a dense one": lambda d: dense(d).add_(hybrid(d), alpha=-2),
    "in place": write_case(lambda s: s.mul_(3)),
    "in place, divided": write_case(lambda s: s.div_(3)),
    "in place, added": write_case(lambda s: s.add_(s)),
    "in place, emptied": write_case(lambda s: s.zero_()),
    "values are the tensor's": scale_values,
    "sums": lambda d: [torch.sparse.sum(sparse(d)), torch.sparse.sum(sparse(d), 0), sparse(d).norm()],
    "softmax": lambda d: [torch.sparse.softmax(sparse(d), 1), torch.sparse.log_softmax(sparse(d), 1)],
    "unary": lambda d: [sparse(d).sqrt(), -sparse(d), sparse(d).relu(), sparse(d).pow(2), sparse(d).tanh()],
    "without elements, like it": lambda d: [
        torch.zeros_like(sparse(d), layout=layout) for layout in (torch.sparse_csr, torch.sparse_csc, torch.strided)
    ],
    "out=": lambda d: torch.tanh(sparse(d), out=sparse(d)),
    "shapes": lambda d: [sparse(d).t(), sparse(d)[1], sparse(d).unsqueeze(0), torch.cat([sparse(d), sparse(d)])],
    "chosen": lambda d: sparse(d).index_select(0, torch.tensor([0, 1]).to(d)),
    "mask": lambda d: torch.ones(3, 4, device=d).sparse_mask(sparse(d).coalesce()),
    "converted": lambda d: [sparse(d).double(), sparse(d).half(), torch.zeros_like(sparse(d)), sparse(d).clone()],
    "gradients of mm": gradients(torch.sparse.mm),
    "gradients of to_dense": gradients(lambda s, w: s.to_dense() @ w),
    "gradients of mul": gradients(lambda s, w: (s * s).to_dense() @ w),
    "gradients of sum": gradients(lambda s, w: torch.sparse.sum(s) * w),
    "gradients of softmax": gradients(lambda s, w: torch.sparse.mm(torch.sparse.softmax(s, 1), w)),
    "gradients of values": gradient_of_values(lambda s: s.to_dense().square()),
    "gradients of coalesced values": gradient_of_values(lambda s: s.coalesce().values().square()),
    "gradients of a dense one": lambda d: torch.autograd.grad(
        torch.sparse.mm((x := dense(d)[:, :4].clone().requires_grad_()).to_sparse(), dense(d)).sum(), x
    ),
    "SGD": embedding(torch.optim.SGD),
    "SGD with momentum": embedding(torch.optim.SGD, momentum=0.9),
    "Adagrad": embedding(torch.optim.Adagrad),
    "SparseAdam": embedding(torch.optim.SparseAdam),
    "EmbeddingBag": embedding_bag,
    "gradients add up": two_backward_passes,
    "saved": lambda d: saved(sparse(d), d),
    "loaded elsewhere": lambda d: saved(sparse("cpu"), d),
    "printed": repr_case(sparse),
    "a leaf printed": repr_case(leaf),
    "a result printed": repr_case(lambda d: leaf(d) * 1),
    "resized": lambda d: [
        sparse(d).resize_as_sparse_(torch.sparse_coo_tensor((5, 6), device=d)),
        sparse(d).sparse_resize_((4, 4), 2, 0),
        sparse(d).sparse_resize_and_clear_((2, 3, 4), 1, 2),
        hybrid(d).resize_as_(hybrid(d)),
    ],
    "deep copy": lambda d: copy.deepcopy(sparse(d)),
}


@pytest.mark.parametrize("case", CASES)
def test_sparse_ops_equal_cpu(embedded, case):
    here, there = plain(CASES[case]("cpu")), plain(CASES[case](embedded))
    assert equal(here, there), (here, there)


INVALID = {
    "an index beyond the size": ([0, 1000], 2, False),
    "a negative index": ([0, -7], 2, False),
    "more indices than values": ([0, 1, 2], 2, False),
    "not coalesced, and said to be": ([3, 1], 2, True),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_sparse_tensor_reaches_no_kernel(embedded, case):
    indices, count, coalesced = INVALID[case]
    whole = torch.ones(4, device=embedded)
    made = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1, 0, [4], torch.zeros(1, count, dtype=torch.int64, device=embedded), torch.ones(count, device=embedded),
        layout=torch.sparse_coo, is_coalesced=coalesced
    )  # fmt: skip
    made.held_indices = torch.tensor([indices], device=embedded)  # as a client without size checks could send it
    with pytest.raises(RuntimeError):
        made.to_dense()
    assert whole.sum().item() == 4


@pytest.mark.parametrize("elements", [(2, 3), (2, 1), (3, 2)])
def test_sparse_values_of_wrong_size_are_refused_immediately(embedded, elements):
    raised = []
    for device in ("cpu", embedded):
        with pytest.raises(RuntimeError) as info:
            torch.sparse_coo_tensor(ROWS[:, :2].to(device), torch.ones(elements, device=device), (3, 4, 2))
        raised.append(str(info.value))
    assert raised[0] == raised[1]


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_integers_become_default_dtype_of_program(embedded, default):
    torch.set_default_dtype(default)
    try:
        whole = [torch.sparse_coo_tensor(ROWS.to(d), VALUES.long().to(d), (3, 4)) for d in ("cpu", embedded)]
        made = [[s / 2, s.sqrt(), s.to(torch.float32), s.to_sparse_csr().sin()] for s in whole]
        assert equal(plain(made[0]), plain(made[1]))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:(.*functions that produce|The PyTorch API of nested)")
def test_sparse_views_work_in_inference_mode(embedded):
    def views(device):
        held = one_of_each(device)
        ragged = torch.nested.as_nested_tensor([torch.ones(2, 3, device=device), torch.ones(1, 3, device=device)])
        with torch.inference_mode():
            made = [t.detach() for t in (*held, ragged)]
            return [*made, held[3].t(), held[3].view(64), ragged[0], ragged.transpose(1, 2)]

    here, there = views("cpu"), views(embedded)
    assert equal(plain(here), plain(there))
    assert [t.is_inference() for t in there] == [False] * len(there)


def test_sparse_tensor_of_failed_op_cannot_be_read(embedded):
    table = torch.ones(4, 2, device=embedded)
    broken = table[torch.tensor([0, 9], device=embedded)]
    made = torch.ops.aten._sparse_coo_tensor_unsafe(torch.tensor([[0, 1]], device=embedded), broken, (4, 2))
    with pytest.raises(IndexError):
        made.coalesce()
    assert table.sum().item() == 8


@pytest.mark.parametrize("size", [((2, 4), 2, 0), ((3, 4, 1), 2, 1), ((12,), 1, 0), ((3, 4), 1, 0)])
def test_sparse_resize_that_drops_dimensions_raises_as_on_cpu(embedded, size):
    with pytest.raises(RuntimeError) as here:
        sparse("cpu").sparse_resize_(*size)
    with pytest.raises(RuntimeError) as there:
        sparse(embedded).sparse_resize_(*size)
    assert str(there.value)[:40] == str(here.value)[:40]


@pytest.mark.parametrize(
    "refused",
    [lambda s: s.cumsum(0), lambda s: s == s, lambda s: torch.isclose(s, s)],  # noqa: PLR0124
)
def test_unsupported_sparse_ops_are_refused_by_name(embedded, refused):
    s = sparse(embedded)
    with pytest.raises(
        djinn.errors.UnsupportedOperation, match=r"aten::\w+.* does not support sparse tensors on remote_accelerator"
    ):
        refused(s)
    assert torch.sparse.sum(s).item() == 10
