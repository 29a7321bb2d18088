"""Growth in place: random programs that append, crop, write and read, with and without it: the same bits and layouts."""

from __future__ import annotations

import random

import pytest
import torch

from djinn_core.ir.form import Constant, Enumerated, Form, ListArg, Operand, SlotArg
from djinn_core.ir.handles import make_handle, storage_of
from djinn_core.wire.messages import Template
from djinn_server.running import growing, native_replay
from djinn_server.running.run import TemplateRun
from djinn_server.running.run_request import RunRequest
from djinn_server.running.template_compiler import compile_template
from djinn_server.running.values import ValueTable

T, S, NONE = Operand(), SlotArg(), Constant(None)
HEADS, WIDTH = 4, 128
BEGIN = 300  # entries: enough bytes for a buffer, in two bytes each as well


def form(op, *arguments, new=1, **named):
    return Form(f"aten::{op}", arguments, tuple(named.items()), ("new",) * new or ("none",), False)


APPEND = form("cat", ListArg((T, T)), S)
ATTEND = form("scaled_dot_product_attention", T, T, T)
TRANSPOSE = form("transpose.int", T, S, S)
CLONE = form("clone", T, memory_format=Enumerated("memory_format", "contiguous_format"))


def template(calls, inputs, outputs, consumed=()):
    """Return a template of calls, given as forms with their references."""
    forms = tuple([one for one, _ in calls])
    references = tuple([reference for _, found in calls for reference in found])
    made = Template(forms, tuple(range(len(forms))), references, tuple(range(inputs)), outputs, consumed)
    return compile_template(made, torch.device("cpu"), {})


def decode(consumed):
    """Return a template of attention over two caches and the appends to them."""
    calls = [(APPEND, (1, 3, 5)), (APPEND, (2, 4, 6)), (ATTEND, (0, 5, 6, 7))]
    return template(calls, 5, (5, 6, 7), consumed)


# Heads behind positions, as many programs keep them; also a product by hand and a clone.
OTHER = template(
    [
        (APPEND, (1, 2, 3)),
        (TRANSPOSE, (3, 4)),
        (form("unsqueeze", T, S), (4, 5)),
        (form("expand", T, ListArg((S,) * 5)), (5, 6)),
        (CLONE, (6, 7)),
        (TRANSPOSE, (4, 8)),
        (form("matmul", T, T), (0, 8, 9)),
    ],
    3,
    (3, 7, 9),
)
CROP = template([(form("slice.Tensor", T, S, S, S), (0, 1))], 1, (1,))
WRITE = template([(form("mul_.Scalar", T, S, new=0), (0,))], 1, ())


@pytest.fixture(scope="module", autouse=True)
def _library():
    native_replay.LIBRARY.build()
    assert native_replay.load_library()


class Session:
    """A session's values. `grows`: appends are done in place."""

    def __init__(self, grows):
        self.values, self.grows, self.submissions = ValueTable(), grows, 0

    def run(self, compiled, inputs, outputs, slots):
        self.submissions += 1
        work = RunRequest(self.submissions, outputs, [], [], [], (), False, inputs)
        run = TemplateRun(compiled, work, slots, self.values, growth=compiled.growth() if self.grows else None)
        run.advance()
        outcome = run.finish()
        assert not outcome.failures, outcome.failures

    def facts(self, handle):
        value = self.values[handle]
        return value.shape, value.stride(), value.storage_offset(), value


class SessionPair:
    """The same session twice, with in-place appends and without."""

    def __init__(self, seed, dtype=torch.float32):
        self.draw, self.dtype = random.Random(seed), dtype
        torch.manual_seed(seed)
        self.sessions = Session(grows=True), Session(grows=False)
        self.storages = self.views = 0
        self.decode = {kept: decode(() if kept else (1, 2)) for kept in (True, False)}

    def new(self, storage=None):
        if storage is None:
            self.storages += 1
            return make_handle(self.storages, 0)
        self.views += 1
        return make_handle(storage, self.views)

    def upload(self, *shape):
        handle, value = self.new(), torch.randn(shape).to(self.dtype)
        for one in self.sessions:
            one.values[handle] = value.clone()
        return handle

    def run(self, compiled, inputs, outputs, slots=()):
        for one in self.sessions:
            one.run(compiled, list(inputs), list(outputs), list(slots))
        return outputs

    def free(self, *handles):
        for one in self.sessions:
            one.values.free(handles)

    def compare(self, *handles):
        for handle in handles:
            ours, theirs = (one.facts(handle) for one in self.sessions)
            assert ours[:3] == theirs[:3]
            assert torch.equal(ours[3], theirs[3])

    def entries(self, handle):
        return self.sessions[1].values[handle].shape[2]

    def token(self, keys, values, *, keep=False, rows=1):
        q, k, v = (self.upload(2, HEADS, rows, WIDTH) for _ in range(3))
        made = self.run(self.decode[keep], [q, keys, values, k, v], [self.new(), self.new(), self.new()], [2, -2])
        self.free(q, k, v)
        return made


def copied_bytes():
    return growing.copied_bytes()[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_copied_for_a_token_do_not_grow(dtype):
    pair = SessionPair(0, dtype)
    keys, values = (pair.upload(2, HEADS, BEGIN, WIDTH) for _ in range(2))
    copies = []
    for _ in range(100):
        before = copied_bytes()
        keys, values, attended = pair.token(keys, values)
        copies.append(copied_bytes() - before)
        pair.compare(attended)
    whole = 2 * 2 * HEADS * BEGIN * WIDTH * dtype.itemsize
    assert copies[0] == whole, "the first append makes the buffers"
    assert sum(one > 0 for one in copies) == 2, "the buffers have room for a quarter more"
    pair.compare(keys, values)


def test_capacity_counts_as_memory():
    pair = SessionPair(0)
    keys, values, _ = pair.token(*(pair.upload(2, HEADS, BEGIN, WIDTH) for _ in range(2)))
    ours, theirs = pair.sessions
    assert ours.values.bytes_of(storage_of(keys)) > theirs.values.bytes_of(storage_of(keys))
    assert ours.values[values].untyped_storage().nbytes() == theirs.values[values].untyped_storage().nbytes()


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_equal_dense_tensors(seed):
    """Programs keep, read, crop, and write through views of several caches, and append twice."""
    pair = SessionPair(seed)
    draw, first, caches = pair.draw, copied_bytes(), []
    caches.append([pair.upload(2, HEADS, BEGIN, WIDTH) for _ in range(2)])
    for _ in range(40):
        at = draw.randrange(len(caches))
        keys, values = cache = caches[at]
        action = draw.choice(("token", "token", "token", "branch", "crop", "write", "read", "other"))
        if action in {"token", "branch"}:
            keep = action == "branch"
            *made, attended = pair.token(keys, values, keep=keep, rows=draw.choice((1, 1, 3)))
            caches[at : at + 1] = [made, cache] if keep else [made]
            pair.compare(attended)
        elif action == "crop":
            shorter = max(2, pair.entries(keys) - draw.randrange(4))
            cropped = [pair.run(CROP, [one], [pair.new(storage_of(one))], [2, 0, shorter])[0] for one in cache]
            caches.append(cropped)
        elif action == "write":
            pair.run(WRITE, [keys], [], [1.5])
        elif action == "read":
            pair.compare(draw.choice(cache))
        else:
            _some_tokens(pair)
        for dropped in caches[:-4]:
            pair.free(*dropped)
        del caches[:-4]
    assert copied_bytes() > first
    pair.compare(*[one for cache in caches for one in cache])


def _some_tokens(pair):
    """Return some tokens of a cache whose heads come after its positions."""
    cache = pair.upload(2, BEGIN, HEADS, WIDTH)
    for length in range(BEGIN + 1, BEGIN + 5):
        q, row = pair.upload(2, HEADS, 1, WIDTH), pair.upload(2, 1, HEADS, WIDTH)
        slots = [1, 1, 2, 2, 2, HEADS, 3, length, WIDTH, 2, 3]
        made = pair.run(OTHER, [q, cache, row], [pair.new(), pair.new(), pair.new()], slots)
        pair.compare(*made[1:])
        cache = made[0]
    pair.compare(cache)


def test_products_of_growing_batch_round_as_dense():
    """A dense batch is contiguous, so its product uses the transposed matrices without a copy."""
    product = [(APPEND, (1, 2, 3)), (TRANSPOSE, (3, 4)), (form("matmul", T, T), (0, 4, 5))]
    compiled, pair = template(product, 3, (3, 5)), SessionPair(0, torch.float64)
    query, cache, row = pair.upload(2, 101, 5, 48), pair.upload(2, 100, 32, 48), pair.upload(2, 1, 32, 48)
    first = copied_bytes()
    made = pair.run(compiled, [query, cache, row], [pair.new(), pair.new()], [1, 2, 3])
    assert copied_bytes() > first
    pair.compare(made[1])


def test_growing_products_run_under_precision_of_one_backend():
    products = torch.backends.mkldnn.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        _some_tokens(SessionPair(0))
    finally:
        products.fp32_precision = before


def test_programs_that_read_strides_or_write_do_not_grow():
    as_strided = form("as_strided", T, ListArg((S, S)), ListArg((S, S)))
    for more, outputs in (
        ([(as_strided, (2, 3))], (2, 3)),  # reads the memory
        ([(TRANSPOSE, (2, 3))], (2, 3)),  # a view leaves the program
        ([(form("add_.Scalar", T, S, new=0), (2,))], (2,)),  # writes the result
        ([(form("add_.Scalar", T, S, new=0), (0,))], (2,)),  # writes the tensor that grows
        ([(form("view", T, ListArg((S, S))), (2, 3))], (2,)),  # fails for some strides
        ([(ATTEND, (2, 2, 2, 3))], (2, 3)),  # as a query
        ([(form("clone", T), (2, 3))], (2, 3)),  # keeps strides
        ([], (2, 2)),  # under two names
        ([], (0, 2)),
    ):
        assert template([(APPEND, (0, 1, 2)), *more], 2, outputs).growth() is None
    assert template([(APPEND, (0, 1, 2))], 2, (2,)).growth() is not None
    assert template([(APPEND, (0, 0, 1))], 1, (1,)).growth() is None, "to itself"
    made_here = [(form("relu", T), (0, 2)), (APPEND, (2, 1, 3))]
    assert template(made_here, 2, (3,)).growth() is None, "what is made here does not outlive a program"


def test_programs_may_append_twice():
    twice = template([(APPEND, (0, 1, 2)), (APPEND, (2, 1, 3))], 2, (3,))
    pair = SessionPair(0)
    cache, row = pair.upload(2, HEADS, BEGIN, WIDTH), pair.upload(2, HEADS, 1, WIDTH)
    for _ in range(3):
        (cache,) = pair.run(twice, [cache, row], [pair.new()], [2, 2])
    pair.compare(cache)


def test_growth_ends_if_results_are_read_dense():
    alone = template([(APPEND, (0, 1, 2))], 2, (2,))
    pair = SessionPair(0)
    cache, row = pair.upload(2, HEADS, BEGIN, WIDTH), pair.upload(2, HEADS, 1, WIDTH)
    for _ in range(100):
        (cache,) = pair.run(alone, [cache, row], [pair.new()], [2])
        pair.compare(cache)
    assert alone.growth() is None
