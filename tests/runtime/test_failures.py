"""Remote failures reach the user as the right error, and affect only values that depend on them."""

from __future__ import annotations

import contextlib
import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import djinn
from djinn.testing import executor_figures
from tests.shared.executors import only_executor


@pytest.fixture
def x(embedded):
    return torch.arange(6.0, device=embedded).reshape(2, 3)


def out_of_range(device):
    return torch.tensor([7], device=device)


def test_failing_op_names_op_shapes_and_line(x):
    bad = x[out_of_range(x.device)]  # this line
    with pytest.raises(IndexError) as caught:
        bad.sum().item()
    error = caught.value
    assert isinstance(error, djinn.errors.RemoteIndexError)
    assert error.op == "aten::index.Tensor"
    assert "out of bounds" in str(error)
    assert "float32[2, 3], int64[1]" in str(error)
    this = test_failing_op_names_op_shapes_and_line
    assert f"{__file__}:{this.__code__.co_firstlineno + 1} in {this.__name__}" in error.site
    assert error.site in str(error)


def test_failure_poisons_dependent_values_only(x):
    bad = x[out_of_range(x.device)]
    worse = bad * 2 + x[:1]
    fine = x * 2
    assert fine.tolist() == [[0, 2, 4], [6, 8, 10]]
    for _ in range(2):
        with pytest.raises(djinn.errors.RemoteIndexError):
            worse.cpu()
    assert x.sum().item() == 15


def test_failing_write_poisons_its_storage_only(x):
    view, other = x[0], x.clone()
    x[out_of_range(x.device)] = 1.0
    later = x.t()
    for poisoned in (x, view, later):
        with pytest.raises(djinn.errors.RemoteIndexError):
            poisoned.cpu()
    assert other.sum().item() == 15


def test_failing_write_to_view_poisons_base(x):
    before = x.clone()
    assert before.sum().item() == 15  # x lives on the executor from here on, and is an input of what follows
    x[:1][out_of_range(x.device)] = 1.0
    with pytest.raises(djinn.errors.RemoteIndexError):
        x.cpu()
    assert before.sum().item() == 15


def test_poisoned_tensor_can_be_replaced(x):
    bad = x[out_of_range(x.device)]
    with pytest.raises(djinn.errors.RemoteIndexError):
        bad.cpu()
    before = executor_figures()["values"]
    del bad
    djinn.synchronize()
    assert executor_figures()["values"] < before


def test_synchronize_raises_first_unseen_failure(x):
    djinn.synchronize()
    seen = x[out_of_range(x.device)]
    with pytest.raises(djinn.errors.RemoteIndexError):
        seen.cpu()
    djinn.synchronize()
    kept = [x[out_of_range(x.device)], torch.multinomial(-x - 1, 2)]
    with pytest.raises(djinn.errors.RemoteError, match=r"index 7 is out of bounds"):
        djinn.synchronize()
    djinn.synchronize()
    assert len(kept) == 2


def test_many_failures_are_bounded(x, monkeypatch):
    """An executor that reports thousands of failures during a send would wait for the client to read."""
    from djinn_client.interception.recording.recorder import recorders
    from djinn_client.interception.runtime_interface import port

    monkeypatch.setattr(port, "checkpoint_instructions", 400)
    recorders.limit_programs()
    index = out_of_range(x.device)
    kept = [x[index] for _ in range(4000)]
    with pytest.raises(djinn.errors.RemoteIndexError, match=f"{__file__}:"):
        kept[-1].cpu()
    executor = only_executor()
    assert len(executor.replies.reader.failures.unreported) <= 64
    assert len(executor.replies.reader.failures._programs) <= 64
    with pytest.raises(djinn.errors.RemoteIndexError):
        djinn.synchronize()


def out_of_range_index(x):
    return torch.full((1,), 9, device=x.device)


def write_clone(x, write):
    target = x.clone()
    write(target)
    return target


# What only the executor can know: the op that is named, and what is done with a 2x3 tensor.
LATE = {
    "subscript": ("aten::index.Tensor", lambda x: x[out_of_range_index(x)]),
    "index_select": ("aten::index_select", lambda x: x.index_select(0, out_of_range_index(x))),
    "gather": ("aten::gather", lambda x: x.gather(0, out_of_range_index(x).expand(2, 3))),
    "scatter": ("aten::scatter.value", lambda x: x.scatter(0, out_of_range_index(x).expand(2, 3), 1.0)),
    "take": ("aten::take", lambda x: x.take(out_of_range_index(x))),
    "index_put_": (
        "aten::index_put_",
        lambda x: write_clone(x, lambda t: t.index_put_((out_of_range_index(x),), x[:1])),
    ),
    "index_add_": (
        "aten::index_add_",
        lambda x: write_clone(x, lambda t: t.index_add_(0, out_of_range_index(x), x[:1])),
    ),
    "embedding": ("aten::embedding", lambda x: torch.nn.functional.embedding(out_of_range_index(x), x)),
    "target": ("aten::nll_loss_forward", lambda x: torch.nn.functional.cross_entropy(x[:1], out_of_range_index(x))),
    "probabilities": ("aten::multinomial", lambda x: torch.multinomial(-x - 1, 2)),
    "not finite": ("aten::_linalg_eigh", lambda x: torch.linalg.eigh(x.new_full((3, 3), float("inf")))[0]),
    "memory": ("aten::zeros", lambda x: torch.zeros(1 << 50, device=x.device).sum()),
}


@pytest.mark.parametrize("name", LATE)
def test_data_dependent_error_raises_at_fetch(x, name):
    op, mistake = LATE[name]
    before, beside = x * 2, x.clone()
    with pytest.raises(Exception) as expected:  # whatever it is
        mistake(x.cpu())
    bad = mistake(x)
    after, worse = beside + 1, bad.sum() + x
    with pytest.raises(type(expected.value)) as caught:
        bad.cpu()
    error = caught.value
    assert isinstance(error, djinn.errors.RemoteError)
    assert error.op == op
    assert f"{__file__}:{mistake.__code__.co_firstlineno} in" in error.site or name in {"index_put_", "index_add_"}
    if op != "aten::zeros":
        assert "(operands: " in str(error)
    with pytest.raises(type(expected.value)):
        worse.cpu()
    assert before.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert after.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert x.sum().item() == beside.sum().item() == 15
    djinn.synchronize()  # it was told


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: torch.linalg.inv(x[:, :2] * 0),
        lambda x: torch.linalg.solve(x[:, :2] * 0, x),
        lambda x: torch.linalg.cholesky(-torch.eye(2, device=x.device)),
    ],
    ids=["inv", "solve", "cholesky"],
)
def test_singular_matrix_raises_at_op(x, mistake):
    """Programs catch this error to try another algorithm. CUDA waits at this op, too."""
    with pytest.raises(torch.linalg.LinAlgError) as expected:
        mistake(x.cpu())
    with pytest.raises(torch.linalg.LinAlgError) as caught:
        mistake(x)
    assert str(caught.value) == str(expected.value)
    assert x.sum().item() == 15
    assert torch.linalg.inv(torch.eye(2, device=x.device)).tolist() == [[1, 0], [0, 1]]


def test_assert_async_raises_at_sync_point(x):
    torch._assert_async(x.sum() < 0, "the sum is negative")
    with pytest.raises(RuntimeError, match="the sum is negative") as caught:
        x.tolist()
    assert caught.value.op == "aten::_assert_async.msg"
    assert x.sum().item() == 15


def test_pytorch_error_types_are_kept():
    from djinn_client.runtime.receiving.failures import remote_error

    for kind, expected in {
        "OutOfMemoryError": (torch.OutOfMemoryError, MemoryError, djinn.errors.RemoteOutOfMemory),
        "_LinAlgError": (torch.linalg.LinAlgError, djinn.errors.RemoteLinAlgError),
        "AcceleratorError": (torch.AcceleratorError, RuntimeError),
        "ZeroDivisionError": (RuntimeError,),
    }.items():
        error = remote_error(kind, "message", "aten::mm", "file:1", "fc")
        assert all(isinstance(error, e) for e in (*expected, djinn.errors.RemoteError, djinn.DjinnError))
        assert (str(error), error.op, error.site, error.module_path) == ("message", "aten::mm", "file:1", "fc")


def test_failure_is_reported_once_per_cause(x):
    kept = [x[out_of_range_index(x)] for _ in range(3)]
    more = kept[0] * 2
    with pytest.raises(djinn.errors.RemoteIndexError) as caught:
        torch.remote_accelerator.synchronize()
    assert len(caught.value.__notes__) == 2
    assert all(note.startswith("also: aten::index.Tensor failed") for note in caught.value.__notes__)
    torch.remote_accelerator.synchronize()
    with pytest.raises(djinn.errors.RemoteIndexError):  # who uses it is told all the same
        more.cpu()


def test_failure_reaches_fetching_thread(x):
    bad = x[out_of_range_index(x)]
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(djinn.errors.RemoteIndexError, match=f"{__file__}:"):
            pool.submit(bad.cpu).result(300)
        assert pool.submit((x + 1).tolist).result(300) == [[1, 2, 3], [4, 5, 6]]


def test_full_overwrite_clears_poison(x):
    """Reset caches and zeroed gradients contain nothing of the failed write."""
    for overwrite in (
        lambda t: t.zero_(),
        lambda t: t.fill_(0.0),
        lambda t: t.copy_(torch.zeros(2, 3)),
        lambda t: torch._foreach_zero_([t, torch.ones(2, device=x.device)]),
    ):
        for sent in (True, False):
            cache = x.clone()
            view = cache[1]
            if sent:
                assert view.tolist() == [3, 4, 5]  # the executor has both before the write
            cache[out_of_range_index(x)] = 1.0
            overwrite(cache)
            assert cache.tolist() == [[0, 0, 0], [0, 0, 0]]
            view.add_(1)
            assert cache.tolist() == [[0, 0, 0], [1, 1, 1]], "the view looks into it as before"
    with pytest.raises(djinn.errors.RemoteIndexError):
        djinn.synchronize()
    partly = x.clone()
    partly[out_of_range_index(x)] = 1.0
    partly[0].zero_()
    with pytest.raises(djinn.errors.RemoteIndexError):
        partly.cpu()


def test_zero_grad_clears_failed_step(x):
    weight = torch.ones(2, 3, device=x.device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    (weight * x).sum().backward()
    (weight * x)[out_of_range_index(x)].sum().backward()
    with pytest.raises(djinn.errors.RemoteIndexError):
        weight.grad.cpu()
    optimizer.zero_grad(set_to_none=False)
    (weight * x).sum().backward()
    optimizer.step()
    assert weight.tolist() == (1 - x).tolist()


def test_failed_training_step_leaves_later_steps_intact(x):
    """The loss is read before the optimizer step, as in most loops, so the failed values leave with the gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).to(x.device)
    optimizer = torch.optim.AdamW(model.parameters())
    done = []
    for targets in ([0, 1], [0, 7], [1, 0]):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), torch.tensor(targets, device=x.device))
        try:
            loss.backward()
            done.append(loss.item())
        except IndexError:
            continue
        optimizer.step()
    assert len(done) == 2
    assert all(p.isfinite().all().item() for p in model.parameters())
    djinn.synchronize()


MISTAKES = {
    "add": lambda x: x + x.new_ones(4),
    "mm": lambda x: x @ x,
    "view": lambda x: x.t().view(-1),
    "index": lambda x: x[5],
    "dim": lambda x: x.sum(3),
    "cat": lambda x: torch.cat([x, x.new_ones(2, 2)]),
    "dtype": lambda x: x.long().mean(),
    "cast": lambda x: (x > 1).mul_(2),
    "grow": lambda x: x.add_(x.new_ones(4, 2, 3)),
    "overlap": lambda x: x[0, 1:].copy_(x[0, :-1]),
    "truth": bool,
    "number": int,
    "reshape": lambda x: x.reshape(4, 2),
    "conv": lambda x: torch.nn.functional.conv2d(x, x),
    "other": lambda x: x + torch.ones(3) if x.device.type != "cpu" else x + torch.ones(3, device="meta"),
    "history": lambda x: copy.deepcopy(x.requires_grad_() * 2),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_local_errors_raise_at_op(x, mistake):
    """The error kind equals the CPU's, and operands are unchanged."""
    local = x.cpu()
    with pytest.raises(Exception) as expected:  # whatever it is
        MISTAKES[mistake](local)
    with pytest.raises(type(expected.value)):
        MISTAKES[mistake](x)
    assert x.tolist() == local.tolist()


def test_backward_errors_keep_their_type(x):
    class CustomError(Exception):
        pass

    class RaisingBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            raise CustomError("in backward")

    class MismatchedBackward(RaisingBackward):
        @staticmethod
        def backward(ctx, gradient):
            return gradient + gradient.new_ones(5)

    class ReadingBackward(RaisingBackward):
        @staticmethod
        def backward(ctx, gradient):
            return gradient * gradient[out_of_range(gradient.device)].sum().item()

    def hook(_):
        raise CustomError("in a hook")

    weight = torch.ones(2, 3, device=x.device, requires_grad=True)
    with pytest.raises(CustomError, match="in backward"):
        RaisingBackward.apply(weight).sum().backward()
    with pytest.raises(RuntimeError, match=r"broadcast|size"):
        MismatchedBackward.apply(weight).sum().backward()
    with pytest.raises(djinn.errors.RemoteIndexError):
        ReadingBackward.apply(weight).sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss = (weight * weight).sum()
        loss.backward()
        loss.backward()
    result = weight * 2
    result.register_hook(hook)
    with pytest.raises(CustomError, match="in a hook"):
        result.sum().backward()
    weight.grad = None
    (weight * x).sum().backward()
    assert weight.grad.tolist() == x.tolist()


def test_interrupt_in_backward_is_raised(x, monkeypatch):
    from djinn_client.interception.native import install

    weight = torch.ones(2, 3, 59, device=x.device, requires_grad=True)  # sizes of no other test: C++ asks about the ops
    loss = (weight * x.unsqueeze(2)).sum()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(install, "record", interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()


def test_backward_errors_do_not_leak_to_next(x):
    class MismatchedBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            with contextlib.suppress(Exception):
                gradient + gradient.new_ones(5)
            return gradient * 2

    weight = torch.ones(2, 3, device=x.device, requires_grad=True)
    with contextlib.suppress(RuntimeError):
        MismatchedBackward.apply(weight).sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss = (weight * weight).sum()
        loss.backward()
        loss.backward()


def test_resized_upload_keeps_views_after_failure(embedded):
    """PyTorch cannot resize the memory of uploads, so the executor moves it. Views must follow after a failure."""
    kept = [torch.ones(4).to(embedded) for _ in range(6)]
    views = [tensor[1:3] for tensor in kept]
    djinn.synchronize()
    for tensor in kept:
        tensor.resize_(8)
        tensor.fill_(2.0)
    kept[3].view(2, 4)[out_of_range(embedded)] = 1.0
    for i, (tensor, view) in enumerate(zip(kept, views, strict=True)):
        if i == 3:
            with pytest.raises(djinn.errors.RemoteIndexError):
                tensor.cpu()
            with pytest.raises(djinn.errors.RemoteIndexError):
                view.cpu()
        else:
            assert tensor.tolist() == [2.0] * 8
            assert view.tolist() == [2.0] * 2


def test_storage_resized_after_failure_is_poisoned(embedded):
    """The index of shared memory is kept between submissions. It follows a resize in a submission without failures."""
    x, other = torch.ones(4).to(embedded), torch.ones(4).to(embedded)
    view, bad = x[1:3], torch.ones(4, device=embedded)
    bad[out_of_range(embedded)] = 1.0
    with pytest.raises(djinn.errors.RemoteIndexError):
        bad.cpu()
    x.resize_(8).fill_(2.0)
    again = x.view(2, 4)
    assert view.tolist() == [2.0, 2.0]
    again[out_of_range(embedded)] = 1.0
    for poisoned in (x, view, again):
        with pytest.raises(djinn.errors.RemoteIndexError):
            poisoned.cpu()
    assert other.sum().item() == 4


@pytest.mark.parametrize("message", ["", "for a reason"])
def test_unplannable_program_poisons_its_writes(embedded, monkeypatch, message):
    write_clone = torch.ones(4, device=embedded)
    djinn.synchronize()
    planner = only_executor().submissions.planner

    def prepare(_program):
        raise AssertionError(message)

    with monkeypatch.context() as patched:
        patched.setattr(planner, "prepare", prepare)
        write_clone.add_(1)
        with pytest.raises(AssertionError):
            djinn.synchronize()
    with pytest.raises(djinn.errors.RemoteError):
        write_clone.tolist()
    assert torch.ones(2, device=embedded).tolist() == [1, 1]
