"""Custom ops: recorded as single ops, run by servers that allow them, and equal to the CPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import custom_op_library as library
import pytest
import torch
from configured import configured
from held_engine import HeldEngine, HeldPlugin
from servers import start_server

import djinn
from djinn_client.interception.runtime_interface import port
from djinn_core.errors import StartupError, UnsupportedOperation
from djinn_core.registry.selection import Selection
from djinn_server.custom_operators import CustomOperators
from djinn_server.launch.executor_config import ExecutorConfig, NetworkConfig
from djinn_server.launch.process import ExecutorProcess
from djinn_server.launch.token_table import change_table, create
from evaluation.fuzz.op_names import talking, try_names

DEVICE = "remote_accelerator:0"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Return the token file and the tokens of its tenants."""
    file = tmp_path_factory.mktemp("tokens") / "tokens.json"
    return file, {name: create_token(file, name) for name in ("alice", "bob")}


def create_token(file, tenant):
    with change_table(file) as change:
        change.table, _, token = create(change.table, tenant, 0.0)
    return token


@pytest.fixture(scope="module")
def library_folder(tmp_path_factory):
    """Return a folder from which executors import the module with the ops."""
    folder = tmp_path_factory.mktemp("importable")
    shutil.copy(library.__file__, folder)
    return str(folder)


@pytest.fixture(scope="module")
def server(start_python, plain_environment, tmp_path_factory, library_folder, tokens):
    options = [
        word for name in ("module:custom_op_library", "tests", "trusting@alice") for word in ("--operators", name)
    ]
    options += ["--threads", "1", "--drain-seconds", "1", "--store-gib", "0", "--lease-seconds", "0"]
    options += ["--token-file", str(tokens[0])]
    given = {"PYTHONPATH": library_folder, "DJINN_PLUGINS": "tcp,custom_op_library"}
    running = start_server(start_python, tmp_path_factory.mktemp("operators"), *options, env=plain_environment | given)
    yield running
    assert running.stop() == 0, running.log.read_text()


def connect_tenant(server, tokens, tenant):
    return configured(servers=[server.url("tcp")], token=tokens[1][tenant], plugins=["tcp", library])


@pytest.fixture(scope="module")
def device_with_library(server, tokens):
    with connect_tenant(server, tokens, "bob"):
        djinn.init()
        yield DEVICE


def values(count=12, device="cpu", shape=(4, 3)):
    return torch.linspace(-2, 3, count).view(shape).to(device)


def assert_equals_cpu(program):
    """Run a program on both devices. Assert that the results are bitwise equal."""
    there, here = program(DEVICE), program("cpu")
    assert len(there) == len(here)
    for one, other in zip(there, here, strict=True):
        assert one.device.type == "remote_accelerator"
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one.cpu(), other)


def test_custom_op_is_recorded_whole(device_with_library):
    with djinn.capture() as captured:
        out = library.scale(values(device=device_with_library), 3.0) + 1
    assert set(captured.graph.by_op) >= {"scale", "add"}
    assert torch.equal(out.cpu(), values() * 3 + 1)


def test_capture_without_session_records_custom_op(device_with_library):
    djinn.shut_down()
    with djinn.capture() as captured:
        torch.ops.djinn_library.pick(torch.ones(4, 3), torch.tensor([1]))
    assert not port.is_open()
    assert "pick" in captured.graph.by_op


def test_custom_op_gradients_equal_cpu(device_with_library):
    def program(device):
        x = values(device=device).requires_grad_()
        y = library.scale(x.sin(), 0.5)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return (y.detach(), grad.detach(), *torch.autograd.grad(grad.sum(), x))

    assert_equals_cpu(program)


def test_mutating_op_increments_version_once(device_with_library):
    def program(device):
        x, y = values(device=device), values(device=device)
        view, before = x[1:], x._version
        library.add_to(x, [y, x[0]], 2.0)
        assert x._version == before + 2, "x and the view of it are written"
        return x, y, view

    assert_equals_cpu(program)


def test_op_with_writes_and_several_results(device_with_library):
    def program(device):
        x, y = values(device=device), values(device=device)
        return (*library.add_and_sum(x), x, *library.add_and_sum(x, y), x)

    assert_equals_cpu(program)


def test_custom_op_takes_and_returns_lists(device_with_library):
    assert_equals_cpu(lambda device: library.pieces([values(device=device), values(device=device).t().contiguous()], 2))


def test_data_dependent_shapes_are_read(device_with_library):
    assert_equals_cpu(
        lambda device: (library.positive(values(device=device)), library.without_fake(values(device=device)))
    )


def test_library_metadata_needs_no_round_trip(device_with_library):
    index = torch.tensor([2, 0])
    djinn.reset_stats()
    x, at = values(device=device_with_library), index.to(device_with_library)
    made = torch.ops.djinn_library.pick(x, at)
    assert made.shape == (2, 3)
    assert djinn.stats()["round_trips"] == 0
    assert torch.equal(made.cpu(), values()[index])


def test_custom_out_overload_writes_out_tensor(device_with_library):
    def program(device):
        x, index, out = values(device=device), torch.tensor([2, 0], device=device), torch.empty(2, 3, device=device)
        torch.ops.djinn_library.pick.out(x, index, out=out)
        return out, torch.ops.djinn_library.halve_(x), x

    assert_equals_cpu(program)


def test_result_never_aliases_argument(device_with_library):
    x = values(device=device_with_library)
    kept = torch.ops.djinn_library.same(x)
    x.zero_()
    assert torch.equal(kept.cpu(), values())


def test_failed_library_check_fails_only_its_op(device_with_library):
    x = values(device=device_with_library)
    with pytest.raises(ValueError, match="index must lie in 0 to 3"):
        torch.ops.djinn_library.pick(x, torch.tensor([4], device=device_with_library)).cpu()
    assert torch.equal(x.cpu(), values())


def test_autocast_casts_as_registered_for_the_cpu(device_with_library):
    def program(device):
        x = values(device=device)
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            return (library.scale(x, 2.0).float(),)

    library.scale(values(), 1.0)
    with torch.autocast("remote_accelerator", dtype=torch.bfloat16):
        half = values(device=device_with_library).half()
        assert torch.ops.djinn_library.pick(half, torch.tensor([1], device=device_with_library)).dtype is torch.float16


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own, also on the CPU
def test_vmap_uses_the_registered_rule_and_a_loop_without_one(device_with_library):
    def program(device):
        x = values(device=device)
        return torch.vmap(lambda row: library.scale(row, 2.0))(x), torch.vmap(library.without_fake)(x)

    assert_equals_cpu(program)


def test_random_op_uses_session_generator(device_with_library):
    def program(device):
        torch.manual_seed(3)
        return library.noise(values(device=device)), torch.rand(2, device=device)

    assert_equals_cpu(program)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own
def test_compiled_function_calls_custom_op(device_with_library):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: library.scale(x.sin(), 2.0) + 1)
    torch.testing.assert_close(compiled(values(device=device_with_library)).cpu(), values().sin() * 2 + 1)


def test_op_defined_later_is_recorded_whole(device_with_library):
    """A server offers the op under a name that this process does not have yet."""
    before = port.offered
    port.offered = {**before, "djinn_custom::late": "djinn_custom::late(Tensor x) -> Tensor"}
    port.interception.reconsider()
    late = torch.library.custom_op("djinn_custom::late", mutates_args=())(_late)
    late.register_fake(torch.empty_like)
    with djinn.capture() as captured:
        late(values(device=device_with_library))
    assert "late" in captured.graph.by_op
    djinn.shut_down()  # with what no real server runs
    assert torch.equal(late(values(device=device_with_library)).cpu(), values() * 5), (
        "decomposed for a server without it"
    )


def _late(x: torch.Tensor) -> torch.Tensor:
    return x * 5


def test_different_schema_is_refused(device_with_library):
    before = port.offered
    port.offered = {**before, "djinn_custom::scale": "djinn_custom::scale(Tensor x) -> Tensor"}
    try:
        port.interception.reconsider()
        with pytest.raises(
            UnsupportedOperation, match=r"djinn_custom::scale .* its schema here is .*factor.* Install the same version"
        ):
            library.scale(values(device=device_with_library), 2.0)
    finally:
        port.offered = before
        port.interception.reconsider()


def test_disallowed_op_is_refused_with_advice(device_with_library):
    with pytest.raises(
        UnsupportedOperation, match=r"djinn_library::hidden .*`djinn serve --operators trusting`"
    ) as raised:
        torch.ops.djinn_library.hidden(values(device=device_with_library))
    assert raised.traceback[-1].path.name in {"_ops.py", Path(__file__).name}


FIRST = """
import custom_op_library as library, djinn, torch

DEVICE = "remote_accelerator:0"
x = torch.arange(3.0, device=DEVICE)
try:
    torch.ops.djinn_library.hidden(x)
except djinn.errors.UnsupportedOperation:
    print("refused at the op")
djinn.shut_down()
djinn.configure(operators=["module:custom_op_library"])
x = torch.arange(3.0, device=DEVICE)
print(library.scale(x, 2.0).tolist())
"""


def test_first_op_waits_for_offered_ops(python, plain_environment, library_folder, tmp_path):
    (script := tmp_path / "first.py").write_text(FIRST)
    environment = plain_environment | {"PYTHONPATH": library_folder}
    done = python.run("-W", "ignore", script, cwd=tmp_path, env=environment)
    assert (done.stdout, done.returncode) == ("refused at the op\n[0.0, 2.0, 4.0]\n", 0), done.stderr


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("trusting", r"--operators trusting: .*trusting@TENANT"),
        ("nothing", r"no plugin offers an operator library .*installed: tests, trusting"),
        ("module:no_such_module", r"importing the module 'no_such_module' .*ModuleNotFoundError"),
        ("module:json", r"the module json defines no op"),
        ("module:custom_op_library@", r"--operators module:custom_op_library@: .*Name a tenant after @"),
        ("tests@", r"--operators tests@: .*Name a tenant after @"),
        ("trusting@ alice", r"' alice' cannot be the name of a tenant"),
    ],
)
def test_server_refuses_unknown_libraries(chosen, said):
    with pytest.raises(StartupError, match=said):
        CustomOperators([chosen], [library.Library(), library.Trusting()])


def test_own_executor_runs_any_library():
    CustomOperators(["trusting"], [library.Trusting()], tenants=False)


def test_engine_executor_runs_any_library(library_folder, monkeypatch):
    """Such an executor listens for other machines, as a gateway's executors do."""
    monkeypatch.syspath_prepend(library_folder)
    plugins = ["tcp", "custom_op_library", HeldPlugin(HeldEngine())]
    with configured(plugins=plugins, engine="held", threads=1, operators=["trusting"]):
        djinn.init()
        assert torch.equal(torch.ops.djinn_library.hidden(values(device=DEVICE)).cpu(), values() + 1)


@pytest.mark.parametrize("network", [None, NetworkConfig()])
def test_tenant_executor_refuses_trusting_libraries(network, library_folder, monkeypatch):
    monkeypatch.syspath_prepend(library_folder)
    config = ExecutorConfig("cpu", network, 1, operators=("trusting",), plugins=Selection(("tcp", "custom_op_library")))
    with ExecutorProcess(config) as executor, pytest.raises(StartupError, match=r"trusting@TENANT"):
        executor.wait_ready(60.0)


# --- hostile clients ----------------------------------------------------------------------------------------------


def test_disallowed_names_are_refused_in_any_spelling(server, tokens):
    with talking(server.url("tcp"), tokens[1]["bob"]) as talk:
        assert {"djinn_custom::scale", "djinn_library::pick.out"} < talk.allowed
        for registered in (
            "djinn_library::hidden",
            "prims::sin",
            "djinn_custom::hidden",
            "profiler::_record_function_exit",
        ):
            assert talk.run(registered).failures, "the process has this op, and nobody allowed it"
        found = try_names(talk, 3000, seed=5)
        assert set(found) == {"UnsupportedOperation"}
        assert not talk.run("djinn_library::same").failures


def test_tenant_has_own_ops(server, tokens):
    with connect_tenant(server, tokens, "alice"):
        djinn.init()
        assert library.Library.operators | {"djinn_library::hidden"} <= set(port.offered)
        assert torch.equal(torch.ops.djinn_library.hidden(values(device=DEVICE)).cpu(), values() + 1)
