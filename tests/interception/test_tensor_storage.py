"""Storages of remote tensors, and what is shared through them: copies, pickles, files."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import safetensors.torch
import torch
from sameness import REMOTE, assert_same_as_cpu, assert_same_error, complexes, numbers
from torch import nn

import djinn

CASES = []


def case(function):
    CASES.append(function)
    return function


class TiedLayers(nn.Module):
    """A model whose two layers share one weight, with persistent and non-persistent buffers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x):
        return self.second(self.first(x))


def tied_layers(d):
    torch.manual_seed(1)
    return TiedLayers().to(d)


def share_storage(*tensors):
    return len({t.untyped_storage().data_ptr() for t in tensors}) == 1


def save_and_load(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


# --- the storage itself -------------------------------------------------------------------------------------------


@case
def identity(d):
    x, other = numbers(d, 4, 4), numbers(d, 4, 4)
    s = x.untyped_storage()
    alike = [s, x[1:].untyped_storage(), x.detach().untyped_storage(), x.view(-1).untyped_storage()]
    return (
        [a.data_ptr() == s.data_ptr() and a._cdata == s._cdata and a == s and hash(a) == hash(s) for a in alike],
        other.untyped_storage() == s,
        other.untyped_storage()._cdata == s._cdata,
        (s.nbytes(), s.size(), len(s), s.element_size(), s.is_cuda, s.device),
        x.is_set_to(x.view(4, 4)),
        x.is_set_to(x[1:]),
        x.is_set_to(other),
    )


@case
def addresses(d):
    x, other = numbers(d, 4, 4), numbers(d, 4, 4)
    end = numbers(d, 5)[-1].data_ptr() + 4
    return (
        x[1:].data_ptr() - x.data_ptr(),
        x.data_ptr() == x.t().data_ptr() == x.untyped_storage().data_ptr(),
        other.data_ptr() != x.data_ptr(),
        end not in {x.data_ptr(), other.data_ptr()},
        x[:0].data_ptr(),
        torch.empty(0, device=d).untyped_storage().data_ptr(),
    )


@case
def typed_storages(d):
    x = numbers(d, 4)
    s = x._typed_storage()
    return s._size(), s._data_ptr() == x[:2]._typed_storage()._data_ptr(), s._getitem(2)


@case
def content(d):
    x, y = numbers(d, 2), numbers(d, 2)
    s = x.untyped_storage()
    copied = torch.empty(0, device=d).set_(s.clone())
    s[0] = 7
    y.untyped_storage().copy_(s)
    bytes_here = torch.empty(0).set_(s.cpu())
    z = numbers(d, 2)
    z.untyped_storage().copy_(torch.ones(2).untyped_storage())
    filled = numbers(d, 2)
    filled.untyped_storage().fill_(0)
    return x, y, z, filled, copied, bytes_here, s.tolist(), s[0], list(s), repr(s).count("\n")


@case
def new_storages(d):
    s = torch.UntypedStorage(8, device=d)
    s.fill_(0)
    ones = torch.ones(2).untyped_storage().to(device=torch.device(d))
    numbers_given = torch.UntypedStorage([1, 2], device=d).tolist()
    return torch.empty(0, device=d).set_(s), torch.empty(0, device=d).set_(ones), numbers_given


@case
def a_storage_grows(d):
    x = numbers(d, 3)
    x.untyped_storage().resize_(32)
    y = torch.empty(0, device=d).set_(x.untyped_storage())
    y[3:] = 5
    return x, y, x.untyped_storage().nbytes()


@case
def a_storage_is_freed_and_allocated_again(d):
    x = numbers(d, 3)
    storage = x.untyped_storage()
    storage.resize_(0)
    freed = storage.nbytes(), x.untyped_storage().size()
    storage.resize_(12)
    x.copy_(torch.arange(3.0))
    return freed, storage.nbytes(), x


@case
def a_typed_storage_is_copied(d):
    x = numbers(d, 3)
    copied = copy.deepcopy({"tensor": x}), x._typed_storage()._deepcopy({})  # the public ways warn
    return copied[0]["tensor"], list(copied[1]._untyped_storage), copied[1].dtype


@case
def tied_weights_are_found(d):
    from safetensors.torch import _find_shared_tensors
    from transformers.pytorch_utils import id_tensor_storage

    x = numbers(d, 4, 4)
    names = _find_shared_tensors({"a": x, "b": x[1:], "c": x.clone(), "e": torch.empty(0, device=d)})
    ids = [id_tensor_storage(t) for t in (x, x[1:], x.clone())]
    return sorted(map(sorted, names)), ids[0] == ids[1], ids[0] == ids[2]


# --- copies -------------------------------------------------------------------------------------------------------


@case
def deep_copies(d):
    x = numbers(d, 4)
    x.note = [1]
    together = copy.deepcopy([x, x, x[1:], x.view(2, 2)])
    together[0].add_(1)
    part = copy.deepcopy(numbers(d, 4, 4)[1:, ::2])
    return x, together, together[0] is together[1], together[0].note, part, part.untyped_storage().nbytes()


@case
def deep_copies_of_parameters(d):
    p = nn.Parameter(numbers(d, 3))
    p.note = 1
    leaf = numbers(d, 3).requires_grad_()
    for tensor in (p, leaf):
        tensor.sum().backward()
    copied = copy.deepcopy(p)
    return copied, copied.grad, hasattr(copied, "note"), copy.deepcopy(leaf).grad


@case
def deep_copy_of_training(d):
    model = tied_layers(d)
    optimizer = torch.optim.Adam(model.parameters())
    model(numbers(d, 2, 3)).sum().backward()
    optimizer.step()
    again, theirs = copy.deepcopy((model, optimizer))
    theirs.zero_grad()
    again(numbers(d, 2, 3)).sum().backward()
    theirs.step()
    return model, again, again.first.weight is again.second.weight, again.scratch


@case
def shallow_copies(d):
    x, p = numbers(d, 3), nn.Parameter(numbers(d, 3))
    x.note = 1
    y = copy.copy(x)
    y.add_(1)
    return x, y, y.note, share_storage(x, y), copy.copy(p), share_storage(p, copy.copy(p))


def test_deepcopy_of_non_leaf_raises(embedded):
    def result(d):
        copy.deepcopy(numbers(d, 3).requires_grad_() * 2)

    assert_same_error(result)


# --- pickles and files --------------------------------------------------------------------------------------------


@case
def pickles(d):
    x, p, buffer = numbers(d, 4), nn.Parameter(numbers(d, 3)), nn.Buffer(numbers(d, 3))
    x.note = p.note = 3
    several = pickle.loads(pickle.dumps([x, x[1:], x]))
    q, again = pickle.loads(pickle.dumps(p)), pickle.loads(pickle.dumps(buffer))
    module = pickle.loads(pickle.dumps(tied_layers(d)))
    return several, several[0] is several[2], several[0].note, q, q.note, isinstance(again, nn.Buffer), module


@case
def saved_with_what_is_shared(d):
    x = numbers(d, 4)
    several = save_and_load({"a": x, "b": x[1:], "n": 1})
    state = save_and_load(tied_layers(d).state_dict())
    whole = save_and_load(tied_layers(d), weights_only=False)
    return (
        several,
        share_storage(several["a"], several["b"]),
        share_storage(state["first.weight"], state["second.weight"]),
        whole.first.weight is whole.second.weight,
        whole,
        save_and_load(nn.Parameter(numbers(d, 3))),
    )


def test_shared_storage_is_fetched_and_saved_once(embedded):
    x = numbers(embedded, 1000)
    file = io.BytesIO()
    djinn.reset_stats()
    torch.save([x, x[:], x.view(10, 100), x[3:]], file)
    assert djinn.stats()["round_trips"] == 1
    assert file.tell() < 2 * 4000


@case
def saved_dtypes(d):
    kinds = (torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.complex64, torch.int8)
    return [t.to(torch.complex64) for t in save_and_load([numbers(d, 4).to(kind) for kind in kinds])]


@case
def saved_in_the_old_format(d):
    file = io.BytesIO()
    torch.save({"a": numbers(d, 4)}, file, _use_new_zipfile_serialization=False)
    file.seek(0)
    first = torch.load(file)
    file.seek(0)
    return first, torch.load(file, map_location="cpu")


PLACES = {
    "str": lambda d: d,
    "type": lambda d: torch.device(d).type,
    "device": torch.device,
    "dict": lambda d: {"cpu": d, REMOTE: d},
    "callable": lambda d: lambda storage, _: torch.serialization.default_restore_location(storage, d),
    "other function": lambda d: lambda storage, _: storage,
    "none": lambda d: None,
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_load_with_map_location_equals_cpu(embedded, place, weights_only):
    def load_on_device(d):
        return save_and_load({"w": numbers("cpu", 3)}, map_location=PLACES[place](d), weights_only=weights_only)

    def load_on_cpu(d):
        return save_and_load(
            {"w": nn.Parameter(numbers(d, 3))}, map_location=PLACES[place]("cpu"), weights_only=weights_only
        )

    assert_same_as_cpu(load_on_device)
    assert_same_as_cpu(load_on_cpu)
    moves = place not in {"other function", "none"}
    assert load_on_device(embedded)["w"].device.type == ("remote_accelerator" if moves else "cpu")
    assert load_on_cpu(embedded)["w"].device.type == ("remote_accelerator" if place == "none" else "cpu")


def test_load_with_mmap_equals_cpu(embedded, tmp_path):
    for name, device in (("here", "cpu"), ("there", embedded)):
        torch.save({"w": numbers(device, 4), "half": numbers(device, 2).half()}, tmp_path / name)
        for place in ("cpu", embedded):
            loaded = torch.load(tmp_path / name, mmap=True, map_location=place)
            assert loaded["w"].device == torch.device(place)
            assert loaded["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
            assert loaded["half"].tolist() == [0.0, 1.0]


def test_remote_checkpoint_loads_without_djinn(python, plain_environment, embedded, tmp_path):
    model = tied_layers(embedded)
    model.first.weight.note = 1
    torch.save(model.state_dict(), tmp_path / "state")
    script = (
        "import sys, torch; s = torch.load(sys.argv[1], map_location='cpu'); "
        "assert 'djinn' not in sys.modules; print(s['first.bias'].tolist())"
    )
    done = python.run("-c", script, tmp_path / "state", env=plain_environment)
    assert done.stdout.strip() == str(model.first.bias.tolist())


@case
def optimizer_state_saved(d):
    model = tied_layers(d)
    optimizer = torch.optim.Adam(model.parameters())
    model(numbers(d, 2, 3)).sum().backward()
    optimizer.step()
    state = save_and_load({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    again = tied_layers(d)
    other = torch.optim.Adam(again.parameters())
    again.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    other.zero_grad()
    again(numbers(d, 2, 3)).sum().backward()
    other.step()
    return again, other.state_dict()["state"]


def test_safetensors_round_trip_keeps_tensors(embedded, tmp_path):
    tensors = {"a": numbers("cpu", 2, 3), "b": numbers("cpu", 2).half(), "c": numbers("cpu", 4).bool()}
    file = tmp_path / "tensors"
    safetensors.torch.save_file({name: t.to(embedded) for name, t in tensors.items()}, file)
    for device in ("cpu", embedded):
        loaded = safetensors.torch.load_file(file, device=device)
        assert {str(t.device) for t in loaded.values()} == {device}
        assert {name: t.tolist() for name, t in loaded.items()} == {name: t.tolist() for name, t in tensors.items()}
    with safetensors.safe_open(file, framework="pt", device=embedded) as opened:
        assert opened.get_slice("a")[1:].tolist() == [[3.0, 4.0, 5.0]]
    assert safetensors.torch.load(safetensors.torch.save({"a": numbers(embedded, 3)}))["a"].tolist() == [0.0, 1.0, 2.0]


def test_safetensors_of_tied_model_equals_cpu(embedded, tmp_path):
    model, again = tied_layers(embedded), TiedLayers().to(embedded)
    safetensors.torch.save_model(model, tmp_path / "model")
    assert safetensors.torch.load_model(again, tmp_path / "model", device=embedded) == (set(), [])
    assert again.first.weight is again.second.weight
    assert torch.equal(again.first.weight, model.first.weight)


@pytest.mark.parametrize("name", ["shared", "not contiguous"], ids=str)
def test_safetensors_error_equals_cpu(embedded, name):
    def save_or_raise(d):
        x = numbers(d, 4, 4)
        safetensors.torch.save({"a": x, "b": x} if name == "shared" else {"a": x.t()})

    assert_same_error(save_or_raise)


@case
def conjugates_saved(d):
    return save_and_load(complexes(d).conj()).resolve_conj()


# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda function: function.__name__)
def test_storage_result_equals_cpu(embedded, case):
    assert_same_as_cpu(case)
