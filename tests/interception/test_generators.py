"""`torch.Generator` on the remote device: the same numbers as a CPU generator with the same seed, where the executor is one."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import djinn
from djinn_client.interception.device import memory

TYPE = "remote_accelerator"
pytestmark = pytest.mark.usefixtures("embedded")

DRAWS = {
    "randn": lambda d, g: torch.randn(5, generator=g, device=d),
    "rand": lambda d, g: torch.rand(5, generator=g, device=d),
    "randint": lambda d, g: torch.randint(0, 9, (5,), generator=g, device=d),
    "randperm": lambda d, g: torch.randperm(50, generator=g, device=d),
    "randperm_out": lambda d, g: torch.randperm(9, generator=g, out=torch.empty(0, dtype=torch.int64, device=d)),
    "normal_": lambda d, g: torch.empty(5, device=d).normal_(generator=g),
    "uniform_": lambda d, g: torch.empty(5, device=d).uniform_(generator=g),
    "bernoulli_": lambda d, g: torch.empty(5, device=d).bernoulli_(0.3, generator=g),
    "exponential_": lambda d, g: torch.empty(5, device=d).exponential_(generator=g),
    "random_": lambda d, g: torch.empty(5, device=d).random_(generator=g),
    "bernoulli": lambda d, g: torch.bernoulli(torch.full((5,), 0.5, device=d), generator=g),
    "multinomial": lambda d, g: torch.multinomial(torch.ones(9, device=d), 3, generator=g),
    "normal": lambda d, g: torch.normal(torch.zeros(4, device=d), 1.0, generator=g),
    "poisson": lambda d, g: torch.poisson(torch.full((9,), 4.0, device=d), generator=g),
    "kaiming": lambda d, g: torch.nn.init.kaiming_uniform_(torch.empty(4, 4, device=d), generator=g),
    "truncated": lambda d, g: torch.nn.init.trunc_normal_(torch.empty(4, 4, device=d), generator=g),
    "orthogonal": lambda d, g: torch.nn.init.orthogonal_(torch.empty(4, 4, device=d), generator=g),
}


def remote(seed=None):
    made = torch.Generator(device=TYPE)
    return made if seed is None else made.manual_seed(seed)


def draw(generator):
    return torch.randn(3, generator=generator, device=TYPE).tolist()


@pytest.mark.parametrize("seed", [None, 5, -3, 2**63 + 1])
def test_remote_generator_draws_equal_cpu_generator(seed):
    here, there = torch.Generator(), remote()
    if seed is not None:
        here.manual_seed(seed)
        assert there.manual_seed(seed) is there
    assert there.initial_seed() == here.initial_seed()
    for name, function in DRAWS.items():
        assert torch.equal(function(TYPE, there).cpu(), function("cpu", here)), name
    assert torch.equal(there.get_state(), here.get_state())


def test_generator_is_instance_of_torch_generator():
    generator = remote()
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.Generator(), torch.Generator)
    assert type(torch.Generator()) is torch._C.Generator
    assert not isinstance(3, torch.Generator)
    assert issubclass(type(generator), torch.Generator)
    assert str(generator.device) == f"{TYPE}:0"
    assert torch.Generator(device="cpu").device.type == "cpu"
    with pytest.raises(RuntimeError, match="device_count"):
        torch.Generator(device=f"{TYPE}:7")


def test_state_is_saved_copied_and_restored():
    generator = remote(1)
    draw(generator)
    state = generator.get_state()
    wanted = draw(generator)
    assert draw(generator.set_state(state)) == wanted
    generator.set_state(state)
    copies = [generator.clone_state(), copy.deepcopy(generator), pickle.loads(pickle.dumps(generator))]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    copies.append(remote().set_state(torch.load(file)))
    for copied in copies:
        assert copied.initial_seed() == 1
        assert draw(copied) == wanted
    assert draw(generator) == wanted
    assert generator.seed() == generator.initial_seed() != 1


def test_remote_generators_are_independent():
    torch.manual_seed(3)
    wanted = torch.rand(3, device=TYPE).tolist()
    first, second = remote(1), remote(1)
    torch.manual_seed(3)
    draws = [draw(first), draw(first)]
    assert torch.rand(3, device=TYPE).tolist() == wanted
    assert [draw(second), draw(second)] == draws


def test_threads_share_generator_in_program_order():
    wanted = torch.Generator().manual_seed(9)
    expected = [torch.randn(3, generator=wanted).tolist() for _ in range(20)]
    generator, drawn = remote(9), []

    def draw_in_order():
        drawn.append(torch.randn(3, generator=generator, device=TYPE))

    for _ in range(10):
        draw_in_order()
        thread = threading.Thread(target=draw_in_order)
        thread.start()
        thread.join()
    assert [t.tolist() for t in drawn] == expected


def test_generator_of_other_device_raises():
    with pytest.raises(RuntimeError, match=f"Expected a '{TYPE}' device type for generator but found 'cpu'"):
        torch.randn(2, generator=torch.Generator(), device=TYPE)
    for function in (
        lambda g: torch.randn(2, generator=g),
        lambda g: torch.empty(2).normal_(generator=g),
        lambda g: next(iter(torch.utils.data.DataLoader([1, 2, 3], shuffle=True, generator=g))),
    ):
        with pytest.raises(RuntimeError, match=f"Expected a 'cpu' device type for generator but found '{TYPE}'"):
            function(remote())
    sampled = torch.randn(3, generator=torch.Generator().manual_seed(1)).to(TYPE)  # as diffusers does
    assert sampled.tolist() == draw(remote(1))


def test_invalid_generator_state_raises():
    generator = remote(2)
    for state, error in (
        (3, TypeError),
        (torch.zeros(4), TypeError),
        (torch.zeros(7, dtype=torch.uint8), RuntimeError),
        (generator.get_state().to(TYPE), TypeError),
    ):
        with pytest.raises(error):
            generator.set_state(state)
    with pytest.raises(ValueError, match="Overflow"):
        generator.manual_seed(2**70)
    with pytest.raises(RuntimeError, match="no offset"):
        generator.get_offset()
    assert draw(generator) == torch.randn(3, generator=torch.Generator().manual_seed(2)).tolist()


def test_new_generator_reuses_plan():
    def step():
        generator = remote(4)
        return (torch.randn(3, generator=generator, device=TYPE) * 2).tolist()

    first = step()
    before = djinn.stats()
    assert [step() for _ in range(4)] == [first] * 4
    after = djinn.stats()
    assert after["templates_sent"] == before["templates_sent"]
    assert after["round_trips"] - before["round_trips"] == 4


def test_setting_rng_state_reuses_plan():
    state = torch.remote_accelerator.get_rng_state()

    def step():
        torch.remote_accelerator.set_rng_state(state)
        return torch.rand(3, device=TYPE).tolist()

    first = step()
    sent = djinn.stats()["templates_sent"]
    assert [step() for _ in range(3)] == [first] * 3
    assert djinn.stats()["templates_sent"] == sent


def test_generator_is_freed_with_last_reference():
    def values():
        return memory.figures()["values"]

    before = values()
    kept = [remote(n) for n in range(3)]
    for generator in kept:
        draw(generator)
    assert values() == before + 3
    del kept, generator
    assert values() == before


def test_unused_generator_survives_session(embedded):
    unused, used = remote(6), remote(6)
    wanted = draw(used)
    djinn.shut_down()
    djinn.configure(threads=1)
    assert draw(unused) == wanted
    with pytest.raises(djinn.errors.SessionLost):
        draw(used)
    assert draw(used.manual_seed(6)) == wanted


def test_default_generator_is_device_rng_state():
    module = torch.remote_accelerator
    (default,) = module.default_generators
    torch.manual_seed(8)
    assert default.initial_seed() == module.initial_seed() == 8
    wanted = torch.rand(3, device=TYPE).tolist()
    default.manual_seed(8)
    assert torch.rand(3, device=TYPE, generator=default).tolist() == wanted
    copied = default.clone_state()
    assert torch.rand(3, device=TYPE).tolist() == torch.rand(3, device=TYPE, generator=copied).tolist()
    state = module.get_rng_state()
    with torch.random.fork_rng(device_type=TYPE):
        torch.manual_seed(1)
        torch.rand(3, device=TYPE)
    assert torch.equal(module.get_rng_state(), state)
    module.set_rng_state_all(module.get_rng_state_all())
    module.manual_seed_all(8)
    assert torch.rand(3, device=TYPE).tolist() == wanted
    module.seed()
    assert module.initial_seed() != 8


def test_checkpoint_keeps_rng_state_without_fetch():
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8)).to(TYPE)

    def gradients(call):
        torch.manual_seed(2)
        layers.zero_grad()
        x = torch.ones(4, 8, device=TYPE).requires_grad_()
        call(call(x)).sum().backward()
        return [p.grad.clone() for p in layers.parameters()]

    wanted = gradients(layers)
    module = torch.remote_accelerator
    after = module.get_rng_state()
    for reentrant in (False, True):
        before = djinn.stats()["round_trips"]
        got = gradients(lambda x, reentrant=reentrant: checkpoint(layers, x, use_reentrant=reentrant))
        assert djinn.stats()["round_trips"] == before
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, wanted, strict=True))
        assert torch.equal(module.get_rng_state(), after)
    with pytest.raises(KeyError), torch.random.fork_rng(device_type=TYPE):
        torch.rand(3, device=TYPE)
        raise KeyError
    assert torch.equal(module.get_rng_state(), after)
