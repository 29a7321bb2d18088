"""Replay of templates by the library in C++ and by Python: the same bits, layouts, failures and poison."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref

import attrs
import msgspec
import pytest
import torch

from djinn_core.ir.form import (
    ComplexSlot,
    Constant,
    Enumerated,
    Form,
    ListArg,
    Operand,
    ScalarTensor,
    SelfDevice,
    SlotArg,
)
from djinn_core.ir.handles import make_handle
from djinn_core.wire.message_base import Failure
from djinn_core.wire.messages import Claim, Template
from djinn_server.running import native_replay
from djinn_server.running import run as running
from djinn_server.running.run import TemplateRun, run_template
from djinn_server.running.run_request import CANCEL, Progress, RunRequest
from djinn_server.running.template_compiler import compile_template
from djinn_server.running.values import Poison, ValueTable

CPU = torch.device("cpu")
T, S, NONE = Operand(), SlotArg(), Constant(None)


def form(op, *arguments, new=1, sequence=False, **named):
    return Form(f"aten::{op}", arguments, tuple(named.items()), ("new",) * new or ("none",), sequence)


def list_arg(*items):
    return ListArg(items)


# Forms with their slots. Some fail for some shapes, and some are Python's: they leave memory unwritten, or their arguments are checked.
CALLS = [
    (form("relu", T), ()),
    (form("sin", T), ()),
    (form("add.Tensor", T, T), ()),
    (form("add.Tensor", T, T, alpha=S), (2,)),
    (form("mul.Tensor", T, S), (0.5,)),
    (form("sub.Tensor", T, S), (3,)),
    (form("add.Tensor", T, ScalarTensor("float32")), (1e300,)),
    (form("mul.Tensor", T, ScalarTensor("int64")), (3,)),
    (form("mul.Tensor", T, ScalarTensor("bfloat16")), (0.3,)),
    (form("eq.Scalar", T, Constant(True)), ()),
    (form("pow.Tensor_Scalar", T, S), (2,)),
    (form("clamp", T, S, NONE), (-1,)),
    (form("leaky_relu", T, S), (1,)),
    (form("mm", T, T), ()),
    (form("t", T), ()),
    (form("view", T, list_arg(S, S)), (2, 8)),
    (form("view", T, list_arg(S)), (-1,)),
    (form("slice.Tensor", T, S, NONE, S), (0, 3)),
    (form("slice.Tensor", T, S, S), (0, 1)),
    (form("sum.dim_IntList", T, list_arg(S), Constant(True)), (0,)),
    (form("mean.dim", T, list_arg(S), dtype=Enumerated("dtype", "float64")), (-1,)),
    (form("cat", list_arg(T, T)), ()),
    (form("cat", list_arg(T, T), S), (1,)),
    (form("index.Tensor", T, list_arg(NONE, T)), ()),
    (form("split.Tensor", T, S, new=2, sequence=True), (2,)),
    (form("max.dim", T, S, new=2, sequence=True), (0,)),
    (form("clone", T, memory_format=Enumerated("memory_format", "contiguous_format")), ()),
    (form("_to_copy", T, dtype=Enumerated("dtype", "int64"), device=SelfDevice()), ()),
    (form("empty_like", T), ()),
    (form("roll", T, list_arg(S), list_arg(S)), (1, 0)),
    (form("add_.Tensor", T, T, new=0), ()),
    (form("mul_.Tensor", T, S, new=0), (2,)),
    (form("zero_", T, new=0), ()),
    (form("resize_", T, list_arg(S), new=0), (20,)),
    (form("mul.Tensor", T, ComplexSlot()), (0.5, 1)),
    (form("add.Scalar", T, ComplexSlot()), (0.5, 1)),
    (form("_foreach_add_.Scalar", list_arg(T, T), S, new=0), (1,)),
    (form("_foreach_mul.Scalar", list_arg(T, T), S, new=2, sequence=True), (3,)),
    (form("rand_like", T), ()),
    (form("is_same_size", T, T), ()),
    (form("expand", T, list_arg(S, S, S)), (2, -1, -1)),
    (form("expand", T, list_arg(S, S)), (4, 1.5)),
]


@attrs.define
class Program:
    """A random template with its slots."""

    template: Template
    slots: list
    inputs: int


def program(seed, length):
    draw = random.Random(seed)
    inputs = 4
    forms, slots, references, known = [], [], [], list(range(inputs))
    for _ in range(length):
        call, numbers = draw.choice(CALLS if draw.random() < 0.4 else CALLS[:12])  # most of which fit any shape
        forms.append(call)
        slots += numbers
        recent = known[-6:] if draw.random() < 0.5 else known
        references += [draw.choice(recent) for _ in range(call.operand_count)]
        made = [len(known) + i for i in range(call.new_count)]
        references += made
        known += made
    outputs = sorted(draw.sample(known[inputs:], min(8, len(known) - inputs)))
    consumed = (0,) if draw.random() < 0.5 else ()
    template = Template(
        tuple(forms), tuple(range(length)), tuple(references), tuple(range(inputs)), tuple(outputs), consumed
    )
    return Program(template, slots, inputs)


def inputs_of(seed):
    torch.manual_seed(seed)
    base = torch.randn(4, 4)
    return [base, base.t()[1:], torch.randint(0, 4, (3,)), torch.randn(4)]


@attrs.define
class Session:
    values: ValueTable
    inputs: list
    outputs: list
    run: object

    def facts(self):
        """Return the results that a client can read."""
        found = {}
        for handle, value in self.values.items():
            if isinstance(value, Poison):
                found[handle] = value.failure
            elif isinstance(value, torch.Tensor):
                layout = value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes()
                found[handle] = str(value.dtype), *layout, bytes(value.untyped_storage())
            else:
                found[handle] = value
        return found, self.run.failures


def session(made, seed, compiled):
    """Run a program of `made` on new values."""
    values, handles = ValueTable(), [make_handle(n + 1, 1) for n in range(made.inputs)]
    outputs = [make_handle(100 + n, 1) for n in range(len(made.template.outputs))]
    with torch.inference_mode():
        for handle, tensor in zip(handles, inputs_of(seed), strict=True):
            values[handle] = tensor
    work = RunRequest(1, outputs, [], [], [], (), False, handles)
    torch.manual_seed(seed)
    return Session(values, handles, outputs, run_template(compiled, work, made.slots, values))


@pytest.fixture(autouse=True)
def _from_the_first_run(monkeypatch):
    native_replay.LIBRARY.build()
    assert native_replay.load_library()
    monkeypatch.setattr(native_replay, "BUILD_AFTER_RUNS", 1)


@pytest.fixture
def native(monkeypatch):
    """Count the ops that the library issued. Short ranges are included."""
    issued = []
    for module in (native_replay, running):
        monkeypatch.setattr(module, "MIN_STEPS", 2)
    plain = native_replay.NativeReplay.run

    def run(self, start, stop, *others, **named):
        step, error = plain(self, start, stop, *others, **named)
        issued.append(step - start)
        return step, error

    monkeypatch.setattr(native_replay.NativeReplay, "run", run)
    return issued


def facts_of_both(made, seed, monkeypatch):
    """Return the facts after a run by the library, and after a run by Python."""
    there = session(made, seed, compile_template(made.template, CPU, {}))
    with monkeypatch.context() as patch:
        patch.setattr(native_replay, "BUILD_AFTER_RUNS", 1 << 30)
        here = session(made, seed, compile_template(made.template, CPU, {}))
    return there.facts(), here.facts()


@pytest.mark.parametrize("length", [6, 40])
def test_random_programs_equal_python_replay(length, native, monkeypatch):
    failed = 0
    for seed in range(150):
        found, expected = facts_of_both(program(seed, length), seed, monkeypatch)
        assert found == expected, seed
        failed += bool(expected[1])
    assert sum(native) > 300
    assert failed > 20


def chain(count, *forms):
    """Return a template of successive unary forms on input 0. The last value is its output."""
    chosen = [forms[i % len(forms)] for i in range(count)]
    references = [word for i in range(count) for word in (i, i + 1)]
    return Program(Template(tuple(chosen), tuple(range(count)), tuple(references), (0,), (count,)), [], 1)


def request(outputs, inputs):
    return RunRequest(1, outputs, [], [], [], (), False, inputs)


def test_each_call_is_issued_by_library_or_python(native, monkeypatch):
    """Run each call alone between others, with fitting operands."""
    python = {"empty_like", "is_same_size", "rand_like", "resize_", "roll"}
    for call, slots in CALLS:
        native.clear()
        forms = [form("neg", T)] * 4 + [call] + [form("neg", T)] * 4
        operands = [
            4 if i == 0 or "foreach" in call.op or call.op == "aten::mm" else 2 for i in range(call.operand_count)
        ]
        if call.op == "aten::index.Tensor":
            operands = [4, 5]
        news = [10 + i for i in range(call.new_count)]
        references = [0, 6, 6, 7, 7, 8, 8, 9, *operands, *news, 0, 20, 20, 21, 21, 22, 22, 23]
        template = Template(tuple(forms), tuple(range(9)), tuple(references), (0, 2, 4, 5), (9, 23, *news))
        values = ValueTable()
        handles = [make_handle(n, 1) for n in range(1, 5)]
        with torch.inference_mode():
            given = torch.rand(4, 4), torch.rand(4, 4), torch.rand(4, 4), torch.tensor([0, 1])
            for handle, tensor in zip(handles, given, strict=True):
                values[handle] = tensor
        compiled = compile_template(template, CPU, {})
        run_template(
            compiled, request([make_handle(50 + n, 1) for n in range(2 + len(news))], handles), list(slots), values
        )
        assert native, call.op
        packet = call.op.removeprefix("aten::").partition(".")[0]
        kept = packet in python or (any(type(slot) is float for slot in slots) and packet == "expand")
        if not (kept or call.arguments()[-1] in (ScalarTensor("bfloat16"), ComplexSlot())):
            assert native[0] == 9, call


def test_bound_template_makes_no_python_calls():
    counts = {}
    for length in (50, 500):
        made = chain(length, form("neg", T), form("sin", T))
        compiled = compile_template(made.template, CPU, {})
        values, given = ValueTable(), make_handle(1, 1)
        values[given] = torch.ones(4)
        run_template(compiled, request([make_handle(2, 1)], [given]), [], values)
        calls = []
        sys.setprofile(lambda _frame, event, _argument, note=calls.append: note(event))
        try:
            run_template(compiled, request([make_handle(2, 1)], [given]), [], values)
        finally:
            sys.setprofile(None)
        counts[length] = len(calls)
    assert counts[50] == counts[500]


def test_failing_op_poisons_dependants_only(native):
    """Values 4 and 5 depend on the product that does not fit; 6 and what came before do not."""
    product, neg = form("mm", T, T), form("neg", T)
    forms = (neg, neg, product, neg, neg, neg, neg)
    references = (0, 1, 1, 2, 2, 7, 3, 3, 4, 4, 5, 1, 6, 6, 8)
    template = Template(forms, tuple(range(7)), references, (0, 7), (2, 3, 5, 8))
    values, given = ValueTable(), [make_handle(1, 1), make_handle(2, 1)]
    values[given[0]], values[given[1]] = torch.ones(2, 3), torch.ones(2, 3)
    outputs = [make_handle(10 + n, 1) for n in range(4)]
    run = run_template(compile_template(template, CPU, {}), request(outputs, given), [], values)
    assert native == [2]
    with pytest.raises(RuntimeError) as local:
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert run.failures == [Failure(1, 2, "aten::mm", "RuntimeError", str(local.value))]
    assert [isinstance(values[handle], Poison) for handle in outputs] == [False, True, True, False]


def test_attention_with_more_values_than_keys_fails(native):
    attention, neg = form("scaled_dot_product_attention", T, T, T), form("neg", T)
    references = (0, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 0, 1, 2, 10, 10, 11)
    template = Template((attention, neg), (1,) * 7 + (0, 1), references, (0, 1, 2), (9, 11))
    values, given = ValueTable(), [make_handle(n, 1) for n in (1, 2, 3)]
    for handle, positions in zip(given, (8, 200, 300), strict=True):
        values[handle] = torch.zeros(1, 2, positions, 64)
    outputs = [make_handle(10, 1), make_handle(11, 1)]
    run = run_template(compile_template(template, CPU, {}), request(outputs, given), [], values)
    assert native
    assert "as many positions, and have 200 and 300" in run.failures[0].message
    assert [isinstance(values[handle], Poison) for handle in outputs] == [False, True]


def test_values_of_failed_run_are_freed(native):
    forms, references = (*[form("neg", T)] * 4, form("mm", T, T)), (0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5)
    template = Template(forms, tuple(range(5)), references, (0,), (5,))
    values, given = ValueTable(), make_handle(1, 1)
    values[given] = torch.ones(2, 3)
    freed = weakref.ref(values[given])
    gc.disable()
    try:
        work = request([make_handle(2, 1)], [given])
        assert run_template(compile_template(template, CPU, {}), work, [], values).failures
        values.clear()
        assert native
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["IndexError", "NotImplementedError", "RuntimeError", "_LinAlgError"])
def test_error_types_and_texts_equal_python(kind, monkeypatch):
    failing = {
        "IndexError": (form("sum.dim_IntList", T, list_arg(S)), [7]),
        "NotImplementedError": (form("bitwise_and.Tensor", T, T), []),
        "RuntimeError": (form("linalg_cholesky_ex", T, Constant(True), new=2, sequence=True), []),  # by name alone
        "_LinAlgError": (form("linalg_cholesky_ex", T, check_errors=Constant(True), new=2, sequence=True), []),
    }
    call, slots = failing[kind]
    neg = form("neg", T)
    operands = [0] * call.operand_count
    news = [20 + n for n in range(call.new_count)]
    forms = (neg, neg, neg, neg, call)
    template = Template(forms, tuple(range(5)), (0, 1, 1, 2, 2, 3, 3, 4, *operands, *news), (0,), (4, *news))
    made = Program(template, slots, 1)
    monkeypatch.setattr(sys.modules[__name__], "inputs_of", lambda _: [-torch.eye(3)])
    found, expected = facts_of_both(made, 0, monkeypatch)
    assert found == expected
    assert [failure.kind for failure in found[1]] == [kind]


def test_cancelled_run_stops_between_ops(native):
    """Another thread cancels it when it sees what the second op writes."""
    count = 400
    write, product = form("fill_.Scalar", T, S, new=0), form("mm", T, T)
    references = [0, *[word for i in range(count) for word in (1, 1, 10 + i)]]
    template = Template((write, product), (0, *[1] * count), tuple(references), (0, 1), (10, 9 + count))
    values, given = ValueTable(), [make_handle(1, 1), make_handle(2, 1)]
    mark = torch.zeros(1)
    values[given[0]], values[given[1]] = mark, torch.ones(400, 400)
    work = request([make_handle(10, 1), make_handle(11, 1)], given)
    seen = threading.Event()

    def cancel():
        while not mark.item():
            pass
        work.halt.value |= CANCEL
        seen.set()

    thread = threading.Thread(target=cancel)
    thread.start()
    run = run_template(compile_template(template, CPU, {}), work, [1], values)
    thread.join()
    assert seen.is_set()
    assert run.stopped_at is not None
    assert native[0] == run.stopped_at
    assert isinstance(values[work.outputs[1]], Poison)


def test_current_op_is_visible_to_other_threads(native):
    """The library runs until the thread has seen an op in the middle, and cancels it there."""
    count = 400
    product = form("mm", T, T)
    template = Template(
        (product,), (0,) * count, tuple(word for i in range(count) for word in (0, 0, 1 + i)), (0,), (count,)
    )
    values, given = ValueTable(), make_handle(1, 1)
    values[given] = torch.ones(400, 400)
    work = request([make_handle(2, 1)], [given])
    work.progress = Progress()

    def cancel():
        while work.progress.step < 3:
            pass
        work.halt.value |= CANCEL

    thread = threading.Thread(target=cancel)
    thread.start()
    run = run_template(compile_template(template, CPU, {}), work, [], values)
    thread.join()
    assert native[0] == run.stopped_at > 3


def test_consumed_input_is_freed_after_its_range(native):
    made = chain(6, form("neg", T))
    template = msgspec.structs.replace(made.template, consumed=(0,))
    values, given = ValueTable(), make_handle(1, 1)
    values[given] = torch.ones(4)
    tensor = torch._C._WeakTensorRef(values[given])
    run = TemplateRun(compile_template(template, CPU, {}), request([make_handle(2, 1)], [given]), [], values)
    run.advance(5)
    assert native == [5]
    assert tensor.expired()


def test_claims_and_poison_are_left_to_python(native):
    made = chain(6, form("neg", T))
    values, given, output = ValueTable(), make_handle(1, 1), make_handle(2, 1)
    compiled = compile_template(made.template, CPU, {})
    values[given] = torch.ones(2, 3)
    work = request([output], [given])
    work.claims = [Claim(2, 0, (2, 3), (1, 2), "float32")]
    run = run_template(compiled, work, [], values)
    assert [(one.instruction, one.stride) for one in run.layout_mismatches] == [(2, (3, 1))]
    assert native == []
    values[given] = Poison(Failure(0, 0, "", "RuntimeError", "before"))
    run = run_template(compiled, request([output], [given]), [], values)
    assert not run.failures
    assert values[output].failure.message == "before"


def test_python_replays_until_library_is_built(native, monkeypatch, tmp_path):
    compiled = compile_template(chain(6, form("neg", T)).template, CPU, {})
    values, given, output = ValueTable(), make_handle(1, 1), make_handle(2, 1)
    values[given] = torch.ones(2)
    with monkeypatch.context() as patch:
        patch.setattr(native_replay, "LIBRARY", native_replay.NativeLibrary("absent", tmp_path / "csrc"))
        patch.setattr(native_replay, "_loaded", None)
        patch.setattr(native_replay, "_build_started", True)  # nothing is compiled
        for _ in range(3):
            run_template(compiled, request([output], [given]), [], values)
    assert values[output].tolist() == [1, 1]
    assert native == []
    run_template(compiled, request([output], [given]), [], values)
    assert native == [6]


def test_ranges_are_prepared_once(native, monkeypatch):
    """Python runs each fifth step, whose tensor the library does not make."""
    made = chain(500, *[form("neg", T)] * 4, form("mul.Tensor", T, ScalarTensor("bfloat16")))
    prepared, plain = [], native_replay._Range
    monkeypatch.setattr(native_replay, "_Range", lambda one: prepared.append(one) or plain(one))
    compiled = compile_template(made.template, CPU, {})
    values, given, output = ValueTable(), make_handle(1, 1), make_handle(2, 1)
    values[given] = torch.ones(4)
    for _ in range(3):
        run_template(compiled, request([output], [given]), [1.0] * 100, values)
    assert (native, len(prepared)) == ([4] * 300, 100)


@pytest.mark.parametrize("length", [native_replay.MIN_STEPS - 1, native_replay.MIN_STEPS])
def test_short_ranges_are_left_to_python(length):
    compiled = compile_template(chain(length, form("neg", T)).template, CPU, {})
    values, given = ValueTable(), make_handle(1, 1)
    values[given] = torch.ones(2)
    work = request([make_handle(2, 1)], [given])
    ran = [run_template(compiled, work, [], values).native_ops for _ in range(native_replay.BUILD_AFTER_RUNS)]
    assert ran[-1] == (length if length >= native_replay.MIN_STEPS else 0)
    assert not any(ran[:-1])


def test_boolean_lists_are_issued_by_library(native):
    pair = list_arg(SlotArg(), SlotArg())
    mask = list_arg(Constant(True), Constant(False), Constant(False))
    numbers = Constant(None), pair, pair, pair, Constant(False), pair, SlotArg(), mask
    backward = form("convolution_backward", T, T, T, *numbers, new=3, sequence=True)
    template = Template((backward, form("neg", T)), (0, 1), (0, 1, 2, 3, 4, 5, 3, 6), (0, 1, 2), (6,))
    slots = [1, 1, 0, 0, 1, 1, 0, 0, 1]
    values, handles = ValueTable(), [make_handle(n, 1) for n in range(1, 4)]
    given = torch.rand(1, 2, 2, 2), torch.rand(1, 3, 4, 4), torch.rand(2, 3, 3, 3)
    for handle, tensor in zip(handles, given, strict=True):
        values[handle] = tensor
    output, compiled = make_handle(10, 1), compile_template(template, CPU, {})
    for _ in range(native_replay.BUILD_AFTER_RUNS):
        assert not run_template(compiled, request([output], handles), slots, values).failures
    assert native == [2]
    expected = torch.nn.grad.conv2d_input((1, 3, 4, 4), given[2], given[0])
    assert torch.equal(values[output], -expected)


def test_equal_slots_of_other_types_are_distinct(native):
    """The library has the slots of the last run: True, 1 and 1.0 differ, as 0.0 and -0.0 do."""
    made = chain(4, form("mul.Scalar", T, SlotArg()), form("neg", T))
    compiled = compile_template(made.template, CPU, {})
    values, given, output = ValueTable(), make_handle(1, 1), make_handle(2, 1)
    values[given] = torch.ones(2, dtype=torch.int64)
    found = []
    for slots in ([1, 1], [1, 1], [1, 1], [1.0, 1], [True, 1], [1, -0.0], [1, 0.0], [2, 3]):
        run_template(compiled, request([output], [given]), slots, values)
        found.append((values[output].dtype, str(values[output].tolist())))
    kinds = [dtype for dtype, _ in found]
    assert kinds == [torch.int64] * 3 + [torch.float32, torch.int64, torch.float32, torch.float32, torch.int64]
    assert [text for _, text in found[-3:]] == ["[-0.0, -0.0]", "[0.0, 0.0]", "[6, 6]"]
    assert native
