"""Views, lazy bits and aliasing of remote tensors: what a write through one tensor does to all others."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from sameness import assert_same_as_cpu, assert_same_error, complexes, numbers

CASES = []
MISTAKES = []


def case(function):
    CASES.append(function)
    return function


def mistake(function):
    MISTAKES.append(function)
    return function


# --- views --------------------------------------------------------------------------------------------------------


@case
def as_strided(d):
    x = numbers(d, 4, 5)
    y = x.as_strided((2, 3), (5, 2), 3)
    y.add_(10)
    z = numbers(d, 4, 5)
    return x, y, y.as_strided((2, 2), (1, 1)), z.as_strided_((2, 3), (5, 2), 3), z


@case
def narrow(d):
    x = numbers(d, 4, 5)
    x.narrow(1, 2, 2).zero_()
    return x, x.narrow(0, torch.tensor(1), 2), x.narrow(0, torch.tensor(1, device=d), 2)


@case
def unfold(d):
    y = numbers(d, 4, 5).unfold(1, 3, 1)
    return y, y.sum(-1)


@case
def diagonal(d):
    x = numbers(d, 4, 5)
    x.diagonal(1).fill_(9)
    return x, x.diagonal(-1), x.diagonal().t()


@case
def chain_of_views(d):
    x = numbers(d, 2, 3, 4)
    y = x.transpose(0, 2)[1:, ::2].permute(2, 0, 1).unsqueeze(1).squeeze(1).movedim(0, -1).swapaxes(0, 1)
    y.mul_(2)
    return x, y, y.contiguous(), y.reshape(-1), y.clone(), y.expand(2, *y.shape)


@case
def views_in_place(d):
    x = numbers(d, 2, 3, 1)
    before = x
    x.transpose_(0, 1)
    x.unsqueeze_(0)
    x.squeeze_()
    x.swapdims_(0, 1)
    x.t_()
    return x, x is before


@case
def splits(d):
    x = numbers(d, 7, 2)
    pieces = x.split(3), x.split([1, 2, 4]), x.chunk(3), x.tensor_split((1, 4)), x.tensor_split(torch.tensor([1, 4]))
    x.unbind(1)[0].fill_(-1)
    return pieces, x.unbind(1), torch.vsplit(x, [2])


@case
def bits_as_another_dtype(d):
    x = numbers(d, 2, 4)
    x.view(torch.int32)[0, 1] = 0
    return x, x.view(torch.int32), x.view(torch.int64), x.view(torch.uint8), x.view(torch.float16)


@case
def versions_and_bases(d):
    x = torch.ones(3, 4, device=d)
    y = x[1:]
    return y._is_view(), y[0]._base is x, x._version, y.add_(1)._version, x._version


@mistake
def view_of_noncontiguous(d):
    numbers(d, 2, 3).t().view(-1)


@mistake
def view_as_dtype_of_wrong_size(d):
    numbers(d, 2, 3).view(torch.int64)


@mistake
def write_to_expanded(d):
    numbers(d, 4, 1).expand(4, 3).add_(1)


# --- conjugate and negative bits ----------------------------------------------------------------------------------


@case
def conjugate_views(d):
    x = complexes(d)
    y = x.conj()
    return y, y.resolve_conj(), y.conj(), y.imag, y.imag.resolve_neg(), y.imag.clone(), x.mH, x.H.contiguous()


@case
def conjugates_across_devices(d):
    there = complexes("cpu").conj().to(d).resolve_conj()
    return there, complexes(d).conj().tolist(), complexes(d).conj()[1, 2].item(), complexes(d).conj().imag.tolist()


def test_fetched_conjugates_are_resolved(embedded):
    fetched = complexes(embedded).conj().cpu(), complexes(embedded).conj().imag.cpu()
    assert not fetched[0].is_conj()
    assert not fetched[1].is_neg()
    assert torch.equal(fetched[0], complexes("cpu").conj())
    assert torch.equal(fetched[1], complexes("cpu").conj().imag)


@case
def writes_through_conjugates(d):
    x = complexes(d)
    x.conj().add_(1j)
    x.imag.mul_(2)
    torch.view_as_real(x)[..., 0] = 7
    into_conjugate = torch.zeros_like(x).conj()
    into_conjugate.copy_(x)
    return x, torch.zeros_like(x).copy_(x.conj()), into_conjugate, x.conj_physical_()


@case
def products_of_conjugates(d):
    x = complexes(d)
    return x.conj() @ x.t(), x.mH @ x, torch.dot(x[0].conj(), x[1])


@case
def gradient_through_conjugate(d):
    x = complexes(d).requires_grad_()
    (x.conj() * x).real.sum().backward()
    return x.grad


@case
def copies_of_conjugates(d):
    x = complexes(d).conj()
    return copy.deepcopy(x), copy.deepcopy(x.imag), pickle.loads(pickle.dumps(x)).resolve_conj()


@mistake
def conjugate_as_pairs(d):
    torch.view_as_real(complexes(d).conj())


# --- set_, resize_ ------------------------------------------------------------------------------------------------


def write_after_set(d, set_to):
    x, y = numbers(d, 3), numbers(d, 4, 4)
    set_to(x, y)
    x.add_(100)
    return x, y


WAYS_TO_SET = {
    "tensor": lambda x, y: x.set_(y),
    "keyword": lambda x, y: x.set_(source=y),
    "part of a tensor": lambda x, y: x.set_(y, 3, (2, 2), (1, 2)),
    "part of a tensor, no stride": lambda x, y: x.set_(y, 3, (2,)),
    "storage": lambda x, y: x.set_(y.untyped_storage()),
    "part of a storage": lambda x, y: x.set_(y.untyped_storage(), 2, (3, 2), (4, 1)),
    "keywords": lambda x, y: x.set_(y.untyped_storage(), storage_offset=1, size=(2,), stride=(1,)),
    "typed storage": lambda x, y: x.set_(y._typed_storage(), 2, (3, 2), (4, 1)),
    "nothing": lambda x, y: x.set_(),
}


@pytest.mark.parametrize("way", WAYS_TO_SET)
def test_set_shares_memory_with_source(embedded, way):
    def set_(d):
        return write_after_set(d, WAYS_TO_SET[way])

    assert_same_as_cpu(set_)


@mistake
def set_to_another_dtype(d):
    numbers(d, 3).set_(numbers(d, 4).int())


@mistake
def set_of_leaf_with_gradient(d):
    torch.ones(3, device=d).requires_grad_().set_(numbers(d, 4))


@case
def resize(d):
    grown, shrunk, view = numbers(d, 3), numbers(d, 4), numbers(d, 4, 4)
    grown.resize_(2, 3)[1] = 0
    part = view[1:]
    part.resize_(2, 2).add_(1)
    again = shrunk.resize_(2).clone()
    laid_out = numbers(d, 16).resize_(1, 2, 4, 2, memory_format=torch.channels_last)
    return grown, shrunk.resize_(4), again, view, part, numbers(d, 4).resize_as_(numbers(d, 2, 2)), laid_out


@mistake
def resize_with_gradient(d):
    numbers(d, 3).requires_grad_().resize_(4)


# --- data, detach, requires_grad ----------------------------------------------------------------------------------


@case
def data_shares_memory_and_no_history(d):
    p = torch.nn.Parameter(numbers(d, 3))
    p.data.mul_(2)
    return p, p._version, p.data


@case
def data_assigned(d):
    p, q = torch.nn.Parameter(numbers(d, 3)), numbers(d, 2, 2)
    p.data = q
    q.add_(1)
    double, part = torch.nn.Parameter(numbers(d, 3)), torch.nn.Parameter(numbers(d, 4, 4))
    double.data = double.data.double()
    part.data = part.data[1:, ::2]
    return p, p.data_ptr() == q.data_ptr(), double, part


@case
def data_assigned_with_bits(d):
    x, y = complexes(d), complexes(d).conj()
    x.data, y.data = x.conj(), complexes(d)
    return x, y, x + 1, y + 1


@case
def data_assigned_under_a_graph(d):
    p = torch.nn.Parameter(numbers(d, 3))
    y = p * p
    p.data = torch.ones(3, device=d)
    y.sum().backward()
    p.grad.data = torch.zeros(3, device=d)
    return p, p.grad


@mistake
def data_on_meta_device(d):
    torch.nn.Parameter(numbers(d, 3)).data = torch.empty(3, device="meta")


@mistake
def data_deleted(d):
    del numbers(d, 3).data


@mistake
def write_to_saved_tensor(d):
    p = torch.nn.Parameter(numbers(d, 3))
    y = (p * p).sum()
    with torch.no_grad():
        p.add_(1)
    y.backward()


@case
def detach_shares_memory(d):
    x = numbers(d, 3).requires_grad_()
    y, z = x * 2, x * 3
    y.detach().add_(1)
    return y, z.detach_(), z.requires_grad, x.requires_grad_(False), x.detach()._is_view()


@mistake
def detach_a_view_in_place(d):
    (numbers(d, 3).requires_grad_() * 2)[1:].detach_()


@mistake
def gradient_for_integers(d):
    numbers(d, 3).long().requires_grad_()


@mistake
def no_gradient_for_a_result(d):
    (numbers(d, 3).requires_grad_() * 2).requires_grad = False


@mistake
def write_to_a_leaf(d):
    torch.ones(3, device=d).requires_grad_().add_(1)


@case
def swap_tensors(d):
    x, y = numbers(d, 3), numbers(d, 2, 2)
    x.note = 1
    torch.utils.swap_tensors(x, y)
    p, q = torch.nn.Parameter(numbers(d, 3)), torch.nn.Parameter(numbers("cpu", 2))
    torch.utils.swap_tensors(p, q)
    return x, y, hasattr(x, "note"), y.note, p, q, p.device.type


@case
def inference_tensors(d):
    with torch.inference_mode():
        x = numbers(d, 3)
        made = x.is_inference(), (x + 1).is_inference(), x[1:].is_inference()
    outside = (x[1:], x.view(1, 3), x.split(1)[0], x.detach(), x.data, x + 1, x.clone())
    return made, [y.is_inference() for y in outside]


@mistake
def write_to_an_inference_tensor(d):
    with torch.inference_mode():
        x = numbers(d, 3) + 0
    x.add_(1)


@mistake
def write_to_a_part_of_an_inference_tensor(d):
    with torch.inference_mode():
        x = numbers(d, 3) + 0
    x[0] = 1


@mistake
def an_inference_tensor_as_parameter(d):
    with torch.inference_mode():
        x = numbers(d, 3) + 0
    torch.nn.Parameter(x)


# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda function: function.__name__)
def test_view_result_equals_cpu(embedded, case):
    assert_same_as_cpu(case)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda function: function.__name__)
def test_view_error_equals_cpu(embedded, mistake):
    assert_same_error(mistake)
