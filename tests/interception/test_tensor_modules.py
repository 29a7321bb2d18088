"""Modules on their way there and back: what parameters keep, state dicts, and special kinds of parameters."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
import weakref
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from sameness import REMOTE, assert_same_as_cpu, assert_same_error, numbers, waves
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, rnn
from torch.utils.weak import WeakTensorKeyDictionary

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


def tied_layers(d="cpu"):
    torch.manual_seed(1)
    return TiedLayers().to(d)


def linear(d, inputs=3, outputs=2):
    layer = nn.Linear(inputs, outputs)
    layer.load_state_dict({"weight": waves("cpu", outputs, inputs), "bias": waves("cpu", outputs)})
    return layer.to(d)


def step(model, d):
    model(waves(d, 2, 3)).square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    return model


# --- moving -------------------------------------------------------------------------------------------------------


@case
def gradients_and_classes_move(d):
    model = tied_layers()
    model(waves("cpu", 2, 3)).sum().backward()
    model.to(d)
    there = model.first.weight.grad, model.first.bias.grad
    model.double().half().cpu()
    classes = type(model.first.weight), type(model.first.weight.grad), type(model.scale)
    return there, [c.__name__ for c in classes], model.first.weight.grad, model


@case
def attributes_and_hooks_stay(d):
    model, seen = tied_layers(), []
    weight = model.first.weight
    weight.note = [1]
    weight.register_hook(lambda g: seen.append(g.sum()) or g * 2)
    handle = weight.register_hook(lambda g: g * 100)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
    model.to(d)
    handle.remove()
    model(waves(d, 2, 3)).sum().backward()
    model.cpu().to(d).double()
    weight.grad = None
    model(waves(d, 2, 3).double()).sum().backward()
    return seen, weight.grad, weight.note, weight is model.first.weight


@case
def weak_references_stay(d):
    model = tied_layers()
    weight, kept = weakref.ref(model.first.weight), []
    notes = WeakTensorKeyDictionary({model.first.weight: "note"})
    for move in (lambda: model.to(d), model.double, model.cpu, lambda: model.to(d)):
        move()
        kept.append((weight() is model.first.weight, notes[model.first.weight]))
    return kept, model


@case
def an_exported_module_moves(d):
    model = tied_layers()
    weight = model.first.weight
    torch.export.export(model, (waves("cpu", 2, 3),))
    model.to(d)
    there = model(waves(d, 2, 3)), weight is model.first.weight is model.second.weight
    return there, model.cpu().double(), weight is model.second.weight


@case
def a_compiled_script_moves(d):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(linear("cpu"), nn.ReLU()))
        traced = torch.jit.trace(nn.Sequential(linear("cpu"), nn.Tanh()), waves("cpu", 1, 3))
    out = [m.to(d)(waves(d, 2, 3)) for m in (scripted, traced)]
    scripted(waves(d, 2, 3)).sum().backward()
    return out, scripted[0].weight.device, scripted[0].weight.grad, scripted.cpu()(waves("cpu", 2, 3))


def test_moved_module_invalidates_old_graph(embedded):
    model = tied_layers()
    out = model(waves("cpu", 2, 3)).sum()
    model.to(embedded)
    assert model(waves(embedded, 2, 3)).device.type == "remote_accelerator"
    with pytest.raises(RuntimeError, match="moved or converted after the forward pass"):
        out.backward()


@case
def average_and_optimizer_from_before_move(d):
    model = tied_layers()
    optimizer, average = torch.optim.SGD(model.parameters(), 0.1), torch.optim.swa_utils.AveragedModel(model)
    model.to(d)
    average.to(d)
    model(waves(d, 2, 3)).sum().backward()
    optimizer.step()
    average.update_parameters(model)
    return model, average


@case
def memory_formats_of_modules(d):
    torch.manual_seed(0)
    before, after = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Conv2d(3, 4, 3)
    before.to(d)
    after.to(d).to(memory_format=torch.channels_last)
    return before.weight, after.weight, before(waves(d, 1, 3, 5, 5)), after(waves(d, 1, 3, 5, 5))


@case
def buffers(d):
    model = tied_layers(d)
    model.register_buffer("scratch", model.scratch + 1, persistent=False)
    holder = nn.Module()
    holder.kept, holder.passing = (
        nn.Buffer(torch.ones(2, device=d)),
        nn.Buffer(torch.ones(2, device=d), persistent=False),
    )
    kinds = [isinstance(b, nn.Buffer) for b in holder.buffers()]
    return (
        dict(model.named_buffers()),
        list(model.state_dict()),
        kinds,
        list(holder.state_dict()),
        dict(holder.named_buffers()),
    )


@case
def parameters(d):
    x = waves(d, 2)
    p = nn.Parameter(x)
    p.data.add_(1)
    others = p + 0, p.detach(), p.data, torch.zeros_like(p), p.clone()
    integers = nn.Parameter(torch.ones(2, dtype=torch.int64, device=d), requires_grad=False)
    lists = nn.ParameterList([p, waves("cpu", 3)]).to(d), nn.ParameterDict({"a": nn.Parameter(x)}).to(d)
    return x, p, others, integers, list(lists[0]), dict(lists[1])


# --- state dicts --------------------------------------------------------------------------------------------------


@case
def state_dicts_both_ways(d):
    there, back, double = TiedLayers().to(d), TiedLayers(), TiedLayers().to(d).double()
    messages = [
        str(there.load_state_dict(tied_layers().state_dict())),
        str(back.load_state_dict(tied_layers(d).state_dict())),
    ]
    double.load_state_dict(tied_layers().state_dict())
    return there, back, double, messages, there.first.weight is there.second.weight


@case
def state_dicts_assigned(d):
    models = [TiedLayers().to(d), TiedLayers(), TiedLayers().to(d)]
    with torch.device("meta"):
        models.append(TiedLayers())
    for model, source in zip(models, (tied_layers(d), tied_layers(d), tied_layers("cpu"), tied_layers(d)), strict=True):
        model.load_state_dict(source.state_dict(), assign=True)
    weights = [m.first.weight for m in models[:2] + models[3:]]
    shared = [m.first.weight.data_ptr() == m.second.weight.data_ptr() for m in models]
    return models[:2], weights, [w.device for w in weights], models[2].first.weight.device.type, shared


@case
def meta_modules_become_real(d):
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    model.to_empty(device=d).load_state_dict(linear("cpu", 2).state_dict())
    return model, model.weight.device


@pytest.mark.parametrize("name", ["swap", "overwrite"])
def test_module_conversion_with_future_flags(embedded, name):
    def converted(d):
        choose = getattr(torch.__future__, f"set_{name}_module_params_on_conversion")
        choose(True)
        try:
            model = tied_layers(d)
            model.load_state_dict(tied_layers().state_dict())
            return model.double()
        finally:
            choose(False)

    assert_same_as_cpu(converted)


def test_mismatched_state_dict_raises(embedded):
    def misfit(d):
        TiedLayers().to(d).load_state_dict({"first.weight": torch.ones(2, 2)}, strict=False)

    assert_same_error(misfit)


# --- parametrisations and torch.nn.utils --------------------------------------------------------------------------


class Symmetric(nn.Module):
    """A parametrization as a symmetric matrix."""

    def forward(self, x):
        return x.triu() + x.triu(1).T

    def right_inverse(self, a):
        return a.triu()


WAYS_TO_PARAMETRISE = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": functools.partial(parametrizations.orthogonal, orthogonal_map="matrix_exp"),
    "cayley": functools.partial(parametrizations.orthogonal, orthogonal_map="cayley"),
    "householder": functools.partial(parametrizations.orthogonal, orthogonal_map="householder"),
    "one's own": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 2),
}


@pytest.mark.parametrize("way", WAYS_TO_PARAMETRISE)
def test_parametrized_layers_move_and_train(embedded, way):
    def moved(d):
        torch.manual_seed(0)
        layer = WAYS_TO_PARAMETRISE[way](linear("cpu", 3, 3)).to(d)
        trained = step(layer, d).weight.detach()
        return trained, layer, copy.deepcopy(layer.train()) if way == "weight norm" else 0

    assert_same_as_cpu(moved)


@case
def parametrize_after_move(d):
    layers = [parametrizations.weight_norm(linear(d)), linear(d, 3, 3)]
    parametrize.register_parametrization(layers[1], "weight", Symmetric())
    layers[1].weight = waves(d, 3, 3)
    with parametrize.cached():
        cached = layers[1].weight is layers[1].weight
    out = [step(layer, d).weight for layer in layers]
    parametrize.remove_parametrizations(layers[1], "weight")
    return out, cached, layers[1].weight


@case
def old_norms(d):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weight, spectral = nn.utils.weight_norm(linear("cpu")).to(d), nn.utils.spectral_norm(linear("cpu")).to(d)
    trained = step(weight, d), step(spectral, d)
    seen = weight.weight, spectral.weight
    return trained, seen, nn.utils.remove_weight_norm(weight)


@case
def prune_after_move(d):
    model = nn.Sequential(linear(d, 3, 4), linear(d, 4, 2))
    prune.global_unstructured([(model[0], "weight"), (model[1], "weight")], prune.L1Unstructured, amount=5)
    prune.ln_structured(model[0], "weight", 1, n=2, dim=0)
    prune.custom_from_mask(model[0], "bias", torch.tensor([1, 0, 1, 0], device=d))
    seen = model[0].weight, model[0].bias
    prune.remove(model[0], "weight")
    return seen, model


@case
def gradients_clipped(d):
    model = nn.Sequential(linear(d, 3, 4), linear(d, 4, 2))
    (model(waves(d, 2, 3)) * 100).sum().backward()
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"), foreach=False))
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    return norms, [p.grad for p in model.parameters()]


@case
def parameters_in_one_vector(d):
    model = linear(d)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    return vector, model, isinstance(model.weight, nn.Parameter)


@case
def packed_sequences(d):
    torch.manual_seed(0)
    net, x = nn.GRU(3, 4, batch_first=True).to(d), waves(d, 2, 5, 3)
    lengths = torch.tensor([3, 5])
    out, last = net(rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    padded, again = rnn.pad_packed_sequence(out, batch_first=True)
    packed = rnn.pack_sequence([waves(d, 3), waves(d, 2)])
    unpadded = rnn.unpad_sequence(x, lengths, batch_first=True)
    return padded, last, again, again.device.type, rnn.pad_sequence([waves(d, 2), waves(d, 3)]), packed.data, unpadded


# --- lazy modules, classes of the user ----------------------------------------------------------------------------


@case
def lazy_modules(d):
    torch.manual_seed(0)
    moved = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()).to(d)
    made = nn.LazyLinear(4, device=d)
    loaded = nn.LazyLinear(2).to(d)
    before = [type(m.weight).__name__ for m in (*moved, made, loaded)]
    loaded.load_state_dict(linear("cpu").state_dict())
    shapes = [m(waves(d, 2, 3)).shape for m in (moved, made, loaded)]
    after = [(type(m).__name__, m.weight.shape, m.weight.device) for m in (*moved, made, loaded)]
    back = copy.deepcopy(nn.LazyLinear(2).to(d)).cpu()
    there_and_back = back(waves("cpu", 2, 3)).shape, type(back.weight).__name__
    return before, shapes, after, loaded.weight, isinstance(made.weight, nn.Parameter), there_and_back


@case
def lazy_modules_converted(d):
    on_the_device = nn.LazyConv1d(3, 3, device=d)
    weight = on_the_device.weight
    found = []
    for module in (
        on_the_device.double(),
        copy.deepcopy(nn.LazyConv1d(3, 3, device=d)).to(d),
        nn.LazyConv1d(3, 3).to(d).half(),
    ):
        found += [type(module.weight).__name__, module.weight.dtype, module.weight.device]
    shape = on_the_device(waves(d, 1, 2, 8).double()).shape
    return found, shape, on_the_device.weight is weight, isinstance(weight, nn.Parameter), weight.dtype


@case
def uninitialized(d):
    p, b = nn.parameter.UninitializedParameter(device=d), nn.parameter.UninitializedBuffer(device=d)
    p.materialize((2,))
    b.materialize((2,))
    return nn.init.ones_(p), b.fill_(1)


def test_uninitialized_parameter_has_no_shape(embedded):
    assert_same_error(lambda d: nn.parameter.UninitializedParameter(device=d).shape)


class TracedTensor(torch.Tensor):
    """A tensor class that stores the names of functions called with it."""

    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})

    def twice(self):
        return self * 2


class PlainSubclass(torch.Tensor):
    """A tensor class without behaviour of its own."""


class SpecialParameter(nn.Parameter):
    """A subclass of Parameter."""


@case
def tensor_subclasses(d):
    TracedTensor.calls.clear()
    x = waves(d, 3).requires_grad_()
    mine = x.as_subclass(TracedTensor)
    mine.twice().sum().backward()
    moved = waves("cpu", 3).as_subclass(PlainSubclass).to(d)
    made = torch.Tensor._make_subclass(PlainSubclass, waves(d, 3), True)
    by_name, called = torch.Tensor.as_subclass(waves(d, 3), PlainSubclass), PlainSubclass(x)
    called.square().sum().backward()
    moved.note = 1
    kinds = [
        type(t).__name__
        for t in (mine, mine + 1, mine.cpu(), moved[1:], made, by_name, called, mine.as_subclass(torch.Tensor) + 1)
    ]
    return x.grad, TracedTensor.calls, mine.twice(), moved + 1, made, by_name, called, kinds[:-1]


@case
def copies_keep_the_class(d):
    mine = waves(d, 3).as_subclass(PlainSubclass)
    mine.note = 1
    copies = copy.copy(mine), pickle.loads(pickle.dumps(mine))
    return copies, [c.note for c in copies]


@case
def parameter_subclasses(d):
    model = nn.Linear(3, 2)
    model.weight = SpecialParameter(waves("cpu", 2, 3))
    names = [type(model.to(d).weight).__name__, type(copy.deepcopy(model).weight).__name__]
    out = model(waves(d, 1, 3))
    return names, out, type(model.cpu().weight).__name__, model


@case
def sparse_buffers_and_parameters(d):
    module = nn.Module()
    module.heads = nn.Buffer(waves("cpu", 2, 3).gt(0).to_sparse(), persistent=False)
    module.weight = nn.Parameter(waves("cpu", 2, 3).to_sparse())
    module.to(d)
    there = [t.to_dense() for t in (module.heads, module.weight)]
    module.cpu()
    return there, [t.to_dense() for t in (module.heads, module.weight)]


# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda function: function.__name__)
def test_module_result_equals_cpu(embedded, case):
    assert_same_as_cpu(case)


def test_fused_layers_equal_cpu(embedded):
    def fused(d):
        torch.manual_seed(0)
        layer, norm = nn.Conv2d(2, 3, 3).eval().to(d), nn.BatchNorm2d(3).eval().to(d)
        return nn.utils.fuse_conv_bn_eval(layer, norm)(waves(d, 1, 2, 5, 5)), F.relu(numbers(d, 2))

    assert_same_as_cpu(fused)
    assert torch.device(REMOTE) == torch.device(embedded)
