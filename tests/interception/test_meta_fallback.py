"""Meta kernels against kernels: if they disagree about an error, the kernel is right, and a refused op writes nothing."""

from __future__ import annotations

import pytest
import torch

from djinn_client.interception import remote_infer

MISTAKES = {
    # An AssertionError to the meta kernel.
    "complex of whole numbers": lambda d: torch.complex(torch.ones(2, device=d), torch.ones(2, device=d).int()),
    # An IndexError to the meta kernel.
    "a dimension of narrow_copy": lambda d: torch.ones(2, device=d).narrow_copy(3, 0, 1),
    # A RuntimeError to the meta kernel.
    "cat into a narrower dtype": lambda d: torch.cat([torch.ones(2, device=d)], out=torch.ones(2, device=d).bool()),
    # A RuntimeError to the meta kernel, of an op without results.
    "a size that is not so": lambda d: torch.ops.aten._assert_tensor_metadata(torch.ones(2, device=d), [3]),
    # Fine to the meta kernel.
    "softmax into a narrower dtype": lambda d: torch.softmax(
        torch.ones(2, device=d), 0, out=torch.ones(2, device=d).int()
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_exception_equals_kernel_exception(embedded, mistake):
    with pytest.raises(Exception) as expected:
        MISTAKES[mistake]("cpu")
    with pytest.raises(expected.type):
        MISTAKES[mistake](embedded)


def test_refused_op_leaves_operands_unchanged(embedded):
    target, wrong = torch.zeros(3, device=embedded), torch.ones(2, device=embedded)
    with pytest.raises(RuntimeError):
        target.add_(wrong)
    out = torch.full((2,), 7, device=embedded, dtype=torch.int32)
    with pytest.raises(RuntimeError):
        torch.softmax(wrong, 0, out=out)
    assert target.tolist() == [0, 0, 0]
    assert out.tolist() == [7, 7]


def test_op_refused_only_by_meta_kernel_runs(embedded):
    out = torch.zeros(3, dtype=torch.bool, device=embedded)
    assert torch.bernoulli(torch.ones(3, device=embedded), out=out) is out
    assert out.tolist() == [True, True, True]


def test_matrix_rank_writes_out_tensor(embedded):
    rank = torch.ones((), dtype=torch.int64, device=embedded)
    assert torch.linalg.matrix_rank(torch.eye(5, device=embedded), out=rank) is rank
    assert rank.item() == 5


def test_meta_fallback_keeps_exception_kinds_apart():
    assert remote_infer._kinds(IndexError()) != remote_infer._kinds(RuntimeError())


def test_program_mistake_is_not_blamed_on_plugin(embedded, caplog):
    model, x = torch.nn.Linear(5, 2).to(embedded), torch.ones(3, 4, device=embedded)
    with caplog.at_level("WARNING"), pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(x)
    with caplog.at_level("WARNING"), pytest.raises(RuntimeError):
        x @ x
    assert not [record.getMessage() for record in caplog.records]
