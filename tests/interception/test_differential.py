"""Random small programs of views, writes, random ops and `out=`, run here and remotely: every live tensor is the same."""

from __future__ import annotations

import random

import pytest
import torch
from long_forms import long_or

from djinn_core.interception.runtime_interface import port

STEPS = 70
SIZES = (0, 1, 2, 3, 4, 6)


class Machine:
    """Takes the same decisions on every device, because they depend on metadata alone."""

    def __init__(self, seed, device):
        self.rng = random.Random(seed)
        self.device = device
        self.pool = []
        self.log = []
        torch.manual_seed(seed)
        for _ in range(3):
            self.keep(self.fresh())

    # --- the pool -------------------------------------------------------------------------------------------

    def keep(self, tensor):
        self.pool.append(tensor)
        if len(self.pool) > 9:
            self.pool.pop(self.rng.randrange(len(self.pool)))

    def pick(self):
        return self.rng.choice(self.pool)

    def target(self):
        """Something that may be written: no two elements are one."""
        return self.rng.choice([t for t in self.pool if not overlaps(t)] or [self.fresh()])

    def floating_target(self):
        return self.rng.choice(
            [t for t in self.pool if t.is_floating_point() and not overlaps(t)] or [self.fresh().float()]
        )

    def floating(self):
        return self.rng.choice([t for t in self.pool if t.is_floating_point()] or [self.fresh().float()])

    def fresh(self):
        shape = [self.rng.choice(SIZES[1:]) for _ in range(self.rng.randrange(4))]
        kind = self.rng.randrange(4)
        if kind == 0:
            return torch.arange(max(1, int(torch.Size(shape).numel())), device=self.device).reshape(shape)
        if kind == 1:
            return torch.randn(shape, device=self.device, dtype=torch.float64)
        if kind == 2:
            count = int(torch.Size(shape).numel())
            return torch.tensor([self.rng.gauss(0, 1) for _ in range(count)]).reshape(shape).to(self.device)  # uploaded
        return torch.randn(shape, device=self.device)

    def dim(self, tensor):
        return self.rng.randrange(tensor.dim()) if tensor.dim() else 0

    # --- steps ----------------------------------------------------------------------------------------------

    def step(self):
        action = self.rng.choice(ACTIONS)
        try:
            made = getattr(self, action)()
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            # Same kind of error on both sides; the texts of remote kernels and meta kernels differ.
            self.log.append((action, next(k.__name__ for k in KINDS if isinstance(error, k))))
            return
        if made is not None:
            self.keep(made)
        self.log.append((action, [layout(t) for t in self.pool]))

    def make(self):
        return self.fresh()

    def drop(self):
        if len(self.pool) > 2:
            self.pool.pop(self.rng.randrange(len(self.pool)))

    def slice_(self):
        t = self.pick()
        size = t.shape[self.dim(t)] if t.dim() else 1
        dim, start = self.dim(t), self.rng.randrange(size + 1)
        return t.narrow(dim, start, self.rng.randrange(size - start + 1))

    def stepped(self):
        return self.pick()[..., :: self.rng.choice((1, 2, 3))]

    def select(self):
        t = self.pick()
        return t.select(self.dim(t), self.rng.randrange(3))

    def transpose(self):
        t = self.pick()
        return t.transpose(self.dim(t), self.dim(t))

    def permute(self):
        t = self.pick()
        return t.permute(self.rng.sample(range(t.dim()), t.dim()))

    def flatten(self):
        return self.pick().reshape(-1)

    def view(self):
        return self.pick().view(-1)

    def unsqueeze(self):
        t = self.pick()
        return t.unsqueeze(self.rng.randrange(t.dim() + 1)) if t.dim() < 4 else None

    def squeeze(self):
        return self.pick().squeeze()

    def expand(self):
        t = self.pick()
        return t.expand(self.rng.choice((1, 2)), *t.shape) if t.dim() < 4 else None

    def diagonal(self):
        return self.pick().diagonal()

    def unfold(self):
        t = self.pick()
        return t.unfold(self.dim(t), 2, 1) if t.dim() < 4 else None

    def chunk(self):
        return self.rng.choice(self.pick().chunk(2))

    def unbind(self):
        return self.rng.choice(self.pick().unbind())

    def as_strided(self):
        t = self.pick()
        return t.as_strided((2, 2), (1, 1), t.storage_offset()) if t.numel() > 3 else None

    def bits(self):
        t = self.pick()
        return t.view(torch.int32) if t.dtype == torch.float32 and t.is_contiguous() else None

    def detach(self):
        return self.pick().detach()

    def data(self):
        return self.pick().data

    def assign_data(self):
        t = self.floating()
        if not t.is_neg():
            t.data = t.clone() * 2

    def add(self):
        return self.pick() + self.pick()

    def scalar(self):
        return self.pick() * self.rng.choice((2, 0.5, -1, 0.0, -0.0, True))

    def where(self):
        t = self.pick()
        return torch.where(t > 0, t, torch.tensor(3.0))

    def sums(self):
        return self.pick().sum(self.rng.choice((None, 0, -1)), keepdim=self.rng.random() < 0.5)

    def cat(self):
        t = self.pick()
        return torch.cat([t, t * 2, t], self.dim(t)) if t.dim() else None

    def sort(self):
        values, indexes = self.floating().sort(dim=-1, stable=True)
        self.keep(indexes)
        return values

    def cumsum(self):
        return self.pick().cumsum(-1)

    def cast(self):
        return self.pick().to(self.rng.choice((torch.float32, torch.float64, torch.int64, torch.bool, torch.float16)))

    def clone(self):
        return self.pick().clone()

    def contiguous(self):
        return self.pick().contiguous()

    def same(self):
        return self.pick().to(self.device)

    def index(self):
        t = self.pick()
        return t[torch.tensor([0, -1, 0])] if t.dim() and t.shape[0] else None

    def mask(self):
        t = self.pick()
        return t[t > 0]

    def nonzero(self):
        return self.pick().nonzero()

    def complex_(self):
        t = self.floating()
        return torch.complex(t.float(), t.float()).conj().imag

    def matmul(self):
        t = self.floating()
        return t.float() @ t.float().mT if t.dim() > 1 else None

    # in place

    def add_(self):
        self.target().add_(self.rng.choice((1, 2)))

    def add_other_(self):
        self.target().add_(self.pick())

    def mul_(self):
        self.target().mul_(2)

    def copy_(self):
        self.target().copy_(self.pick())

    def copy_cpu_(self):
        t = self.target()
        t.copy_(torch.full(t.shape, 7))

    def fill_(self):
        self.target().fill_(self.rng.choice((0, 1, torch.tensor(2))))

    def set_item(self):
        t = self.target()
        t[..., :1] = self.rng.choice((5, torch.tensor(True)))

    def set_masked(self):
        t = self.target()
        t[t > 1] = 1

    def put_(self):
        t = self.target()
        if t.dim() and t.shape[0]:
            t[torch.tensor([0, -1], device=self.device)] = 9

    def relu_(self):
        self.floating_target().relu_()

    def transpose_(self):
        t = self.target()
        t.transpose_(self.dim(t), self.dim(t))

    def squeeze_(self):
        self.target().squeeze_()

    def resize_(self):
        t = self.fresh()
        t.resize_(2, 2).fill_(1)
        return t

    def set_(self):
        t = self.target()
        return None if t.is_neg() else torch.empty(0, dtype=t.dtype, device=self.device).set_(t)

    def scatter_(self):
        t = self.floating_target()
        if t.dim():
            t.scatter_(0, torch.zeros(t.shape, dtype=torch.int64, device=self.device), 4.0)

    def swap(self):
        t = self.target()
        if t.dim() and t.shape[0] > 1:
            t[0], t[1] = t[1].clone(), t[0].clone()

    # out=

    def out_new(self):
        t = self.floating()
        return torch.add(t, 1, out=torch.empty_like(t))

    def out_resized(self):
        t = self.floating()
        return torch.mul(t, 3, out=torch.empty(0, dtype=t.dtype, device=self.device))

    def out_view(self):
        t = self.floating_target()
        torch.neg(t, out=t)

    def out_pair(self):
        t = self.floating()
        if not t.dim():
            return None
        values = torch.empty(0, dtype=t.dtype, device=self.device)
        indexes = torch.empty(0, dtype=torch.int64, device=self.device)
        torch.max(t, 0, out=(values, indexes))
        self.keep(indexes)
        return values

    def out_cast(self):
        # Casts, or is refused, as the dtypes say.
        t = self.pick()
        dtype = self.rng.choice((torch.float64, torch.float32, torch.int64, torch.bool))
        return torch.mul(t, 2, out=torch.zeros(t.shape, dtype=dtype, device=self.device))

    def out_softmax(self):
        # Takes no other dtype than its own.
        t = self.floating().float()
        dtype = self.rng.choice((torch.float64, torch.float32))
        return torch.softmax(t, -1, out=torch.zeros(t.shape, dtype=dtype, device=self.device)) if t.dim() else None

    def out_strided(self):
        t = self.floating()
        if t.dim() < 2:
            return
        out = torch.zeros(t.mT.shape, dtype=t.dtype, device=self.device).mT
        self.keep(out)
        torch.add(t, t, out=out)
        return

    def out_part(self):
        # Into a part of another tensor, whose rest stays as it is.
        t = self.floating()
        wide = torch.zeros((*t.shape, 2), dtype=t.dtype, device=self.device)
        torch.exp(t.clamp(-1, 1), out=wide[..., 1])
        return wide

    # numbers in the shape of CPU tensors, and dtypes that meet

    def number(self):
        given = self.rng.choice((torch.tensor(2.5), torch.tensor(3), torch.tensor(1.5, dtype=torch.float64)))
        return self.rng.choice((torch.add, torch.mul, torch.maximum))(self.pick(), given.to(self.rng.choice(NUMBERS)))

    def number_(self):
        self.target().mul_(torch.tensor(self.rng.choice((2, 0.5))))

    def number_first(self):
        return torch.tensor(2.0) - self.pick()

    def promote(self):
        t = self.pick()
        return torch.add(t, t.to(self.rng.choice((torch.float64, torch.int64, torch.float16, torch.bool))))

    def mul_other_(self):
        t = self.target()
        t[..., :1].mul_(self.pick())

    def divide_(self):
        self.target().div_(2)

    # random

    def seed(self):
        torch.manual_seed(self.rng.randrange(100))

    def rand_like(self):
        return torch.rand_like(self.floating())

    def normal_(self):
        self.floating_target().normal_()

    def dropout(self):
        return torch.nn.functional.dropout(self.floating(), 0.5)

    def randint(self):
        return torch.randint(0, 9, (3,), device=self.device)

    def randperm(self):
        return torch.randperm(5, device=self.device)

    def unused_random(self):
        torch.rand(3, device=self.device)

    # looking

    def item(self):
        t = self.pick()
        self.log.append(t.reshape(-1)[:1].tolist())

    def truth(self):
        self.log.append(bool((self.pick() > 0).any()))


def overlaps(tensor):
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and step < 1 for size, step in steps)


def layout(tensor):
    """Metadata, less the strides of dimensions in which there is nothing to step to."""
    steps = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tuple(tensor.shape), steps if tensor.numel() else [], tensor.storage_offset(), tensor.dtype, tensor.is_neg()


NUMBERS = (torch.float32, torch.float64, torch.int64)
KINDS = (NotImplementedError, IndexError, ValueError, TypeError, RuntimeError)
ACTIONS = [name for name in vars(Machine) if not name.startswith("__")]
for helper in ("keep", "pick", "floating", "fresh", "dim", "step", "target", "floating_target"):
    ACTIONS.remove(helper)


def run(seed, device):
    machine = Machine(seed, device)
    for _ in range(STEPS):
        machine.step()
    return machine.log, [t.cpu() for t in machine.pool]


def compare(seed, device):
    expected_log, expected = run(seed, "cpu")
    log, tensors = run(seed, device)
    for number, (want, got) in enumerate(zip(expected_log, log, strict=True)):
        assert got == want, f"seed {seed}, entry {number}"
    for want, got in zip(expected, tensors, strict=True):
        assert want.dtype == got.dtype, f"seed {seed}"
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"seed {seed}: {m}")


@pytest.mark.parametrize("block", range(long_or(2, 5)))
def test_random_programs_are_the_same_here_and_there(embedded, block):
    for seed in range(block * 12, (block + 1) * 12):
        compare(seed, embedded)


def test_random_programs_are_the_same_when_they_are_sent_in_pieces(embedded, monkeypatch):
    monkeypatch.setattr(port, "checkpoint_instructions", 32)
    for seed in range(100, long_or(105, 112)):
        compare(seed, embedded)
