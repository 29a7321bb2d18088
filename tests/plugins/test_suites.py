"""The conformance suites pass what is right and catch what is wrong."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs
import pytest
import torch

from djinn import testing
from djinn.hooks import (
    AssignmentRefusal,
    Authenticator,
    CostModel,
    Credentials,
    Denial,
    DeviceRuntime,
    Event,
    Identity,
    Limits,
    NodePriority,
    Observer,
    OperationsServer,
    Optimization,
    Pattern,
    PlacementPolicy,
    Scheduler,
    SocketConnection,
    hookimpl,
)
from djinn.planning import CostEstimate, OptimizationResult, PatternMatch, Placement, Rewrite, Substitution
from djinn.testing.samples import perceptron
from djinn.testing.suite import missing
from djinn.testing.transports import check_own_names
from djinn_core.errors import InvalidStage
from djinn_core.planning.builtins.placement import SingleDevice
from djinn_core.planning.builtins.scheduling import Sequential
from djinn_core.planning.stages.verify import check_placement
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_server.builtins.cpu import CpuDevice
from djinn_server.gateway.assignment import LeastLoaded

GRAPHS = testing.sample_graphs()


class TestCpu(testing.DeviceConformance):
    @pytest.fixture
    def device(self) -> Any:
        return CpuDevice()


class TestLeastLoaded(testing.AssignmentPolicyConformance):
    @pytest.fixture
    def policy(self) -> Any:
        return LeastLoaded()


def test_built_in_plugins_are_loaded_by_registry() -> None:
    registry = load_registry(Selection(plugins=(), strict=True), builtins=builtin_plugins())
    assert {row.name: row.kind for row in registry.rows if row.status == "active"} == {
        "native": "interception",
        "costs": "cost_models",
        "placement": "placement_policies",
        "scheduling": "schedulers",
        "local": "transports",
        "cpu": "devices",
        "weights": "weight_sources",
        "safetensors_files": "weight_formats",
    }


def _cost_models() -> tuple[Any, ...]:
    return load_registry(Selection(plugins=()), builtins=builtin_plugins(), entry_points=[]).cost_models


class TestCostModels(testing.CostModelConformance):
    @pytest.fixture(params=_cost_models(), ids=lambda model: model.name)
    def cost_model(self, request: pytest.FixtureRequest) -> Any:
        return request.param


class TestSingle(testing.PlacementPolicyConformance):
    @pytest.fixture
    def policy(self) -> Any:
        return SingleDevice()


class TestSequential(testing.SchedulerConformance):
    @pytest.fixture
    def scheduler(self) -> Any:
        return Sequential()


def made(*bases: type, **members: Any) -> Any:
    """An object with these members; functions become methods."""
    return type("Made", bases, {"name": "made"} | members)()


def expect_failure(check: Callable[[], None], message: str) -> None:
    with pytest.raises((AssertionError, InvalidStage, pytest.fail.Exception)) as caught:
        check()
    assert message in str(caught.value)


def matching(nodes: Callable[[Any], tuple[int, ...]], **fields: Any) -> Any:
    def match(self: Any, graph: Any, candidates: Any) -> list[PatternMatch]:
        facts = {"pattern": "made", "confidence": 0.9, "reason": "so", "nodes": nodes(candidates)} | fields
        return [PatternMatch(**facts)] if candidates else []

    return made(Pattern, operations=frozenset({"mm"}), match=match)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (matching(lambda candidates: (999,)), "nodes that the graph does not have"),
        (matching(lambda candidates: (candidates[0].id,), pattern="other"), "says that it is of 'other'"),
        (matching(lambda candidates: (candidates[0].id,), reason=""), "without a reason"),
        (matching(lambda candidates: (candidates[0].id + 1,)), "without any of ['mm']"),
        (matching(lambda candidates: (candidates[-1].id, candidates[0].id)), "not in order"),
    ],
)
def test_suite_catches_invalid_matches(pattern: Any, message: str) -> None:
    expect_failure(lambda: testing.PatternConformance().test_its_matches_fit_the_graph(pattern, GRAPHS), message)


def test_suite_catches_invalid_patterns() -> None:
    suite = testing.PatternConformance()
    spelt = made(Pattern, operations=frozenset({"aten::mm"}), match=lambda self, graph, candidates: [])
    expect_failure(lambda: suite.test_it_is_a_pattern(spelt), "names without namespace")
    expect_failure(lambda: suite.test_it_is_a_pattern(made(match=1)), "derive its class from djinn.hooks.Pattern")
    blind = made(Pattern, operations=frozenset({"mm"}), match=lambda self, graph, candidates: [])
    expect_failure(
        lambda: suite.test_it_recognises_what_it_should(blind, {"mlp": GRAPHS["perceptron"]}),
        "does not recognise 'mlp'",
    )
    calls: list[int] = []

    def fickle(self: Any, graph: Any, candidates: Any) -> list[PatternMatch]:
        calls.append(1)
        return [PatternMatch("made", (candidates[0].id,), 0.5, f"call {len(calls)}")]

    expect_failure(
        lambda: suite.test_it_depends_on_nothing_but_the_graph(
            made(Pattern, operations=frozenset({"mm"}), match=fickle), GRAPHS
        ),
        "two results",
    )


def test_suite_catches_invalid_cost_models() -> None:
    suite = testing.CostModelConformance()

    def model(estimate: Callable[..., Any]) -> Any:
        return made(CostModel, estimate=estimate)

    negative = model(lambda self, graph, node, device: CostEstimate(1.0, 0, 0, -1.0))
    expect_failure(lambda: suite.test_its_estimates_are_sane(negative, GRAPHS), "negative")
    divides = model(lambda self, graph, node, device: CostEstimate(1.0, 0, 0, 1.0 / device.flops))
    with pytest.raises(ZeroDivisionError):
        suite.test_its_estimates_are_sane(divides, GRAPHS)
    shrinking = model(
        lambda self, graph, node, device: CostEstimate(1.0, 0, 0, 1.0 / graph.meta(node.outputs[0]).numel)
    )
    expect_failure(lambda: suite.test_more_work_costs_no_less(shrinking), "less time for more work")


def optimizing(rewrite: Callable[[Any], Rewrite], **members: Any) -> Any:
    return made(
        Optimization,
        optimize=lambda self, context: OptimizationResult("made", True, "so", rewrite(context)),
        **members,
    )


def test_suite_catches_result_changing_optimizations() -> None:
    suite = testing.OptimizationConformance()

    def first_of(context: Any, chosen: Callable[[Any], bool]) -> Rewrite:
        return Rewrite(drop=frozenset([node.id for node in context.graph.nodes if chosen(node)][:1]))

    cases = {
        "advances the random state": lambda context: first_of(context, lambda node: node.random),
        "can be seen later": lambda context: first_of(context, lambda node: node.writes),
        "is still used": lambda context: first_of(context, lambda node: node.operation == "mm"),
    }
    for message, rewrite in cases.items():
        expect_failure(lambda: suite.test_it_changes_no_result(optimizing(rewrite), GRAPHS), message)  # noqa: B023
    unused = optimizing(lambda context: first_of(context, lambda node: node.operation == "neg"))
    suite.test_it_changes_no_result(unused, GRAPHS)
    expect_failure(lambda: suite.test_it_keeps_what_somebody_still_holds(unused, GRAPHS), "the client still holds")
    itself = optimizing(lambda context: Rewrite(), after=frozenset({"made"}))
    expect_failure(lambda: suite.test_it_is_an_optimization(itself), "waits for itself")


@pytest.fixture(scope="module")
def programs() -> Any:
    return testing.sample_programs()


def substituting(operation: str, compute: Callable[..., torch.Tensor], applied: bool = True) -> Any:
    """An optimization that computes each `operation` with other code."""

    def rewrite(context: Any) -> Rewrite:
        nodes = [context.graph.nodes[i] for i in context.graph.by_op.get(operation, ())] if applied else []
        return Rewrite(
            substitutions=tuple(
                Substitution(frozenset({n.id}), n.inputs, n.outputs, lambda given: [compute(*given)]) for n in nodes
            )
        )

    class Substituting(Optimization):
        name = "made"

        def optimize(self, context: Any) -> OptimizationResult:
            change = rewrite(context)
            return OptimizationResult("made", bool(change), "so", change)

    return Substituting()


@pytest.mark.parametrize(
    ("operation", "right", "wrong", "message"),
    [
        ("relu", lambda x: x.clamp_min(0), lambda x: x.clamp_min(0.01), "aten::relu"),
        ("relu", lambda x: x.clamp_min(0), torch.nn.functional.gelu, "not close"),
        # What depends on weights alone is computed beforehand.
        (
            "linear",
            lambda x, w, b=0.0: x @ (2 * w).t() / 2 + b,
            lambda x, w, b=0.0: x @ (2 * w).t() + b,
            "aten::linear",
        ),
    ],
    ids=["a bound", "another function", "of weights"],
)
def test_suite_catches_result_changing_substitutions(
    programs: Any, operation: str, right: Any, wrong: Any, message: str
) -> None:
    suite = testing.OptimizationConformance()
    suite.test_it_changes_no_result(substituting(operation, wrong), GRAPHS)  # no rule is broken
    expect_failure(
        lambda: suite.test_its_results_are_the_same_when_it_runs(substituting(operation, wrong), {}, programs), message
    )
    suite.test_its_results_are_the_same_when_it_runs(substituting(operation, right), GRAPHS, programs)
    assert testing.compare_results(substituting(operation, right), programs["perceptron"]).applied
    inputs = {v: torch.zeros(programs["perceptron"].graph.meta(v).shape) for v in programs["perceptron"].graph.inputs}
    assert testing.compare_results(substituting("relu", torch.abs), programs["perceptron"], inputs).applied


def test_suite_catches_unrecordable_substitutions(programs: Any) -> None:
    suite = testing.OptimizationConformance()
    for compute, message in (
        (lambda x: x.double(), "returns a torch.float64"),
        (lambda x: x if x.sum() > 0 else -x, "needs data"),
        (torch.rand_like, "draws random numbers"),
    ):
        with pytest.raises(InvalidStage, match=message):
            suite.test_its_results_are_the_same_when_it_runs(substituting("relu", compute), {}, programs)


def test_suite_catches_result_changing_rewrites(programs: Any) -> None:
    suite = testing.OptimizationConformance()

    def one_for_the_other(context: Any) -> Rewrite:
        nodes = context.graph.nodes
        first, second, *_ = context.graph.by_op.get("linear", (0, 0))
        if first == second or context.graph.meta(nodes[first].outputs[0]) is not context.graph.meta(
            nodes[second].outputs[0]
        ):
            return Rewrite()
        return Rewrite(drop=frozenset({second}), replace={nodes[second].outputs[0]: nodes[first].outputs[0]})

    fused = optimizing(one_for_the_other)
    fused.optimize = lambda context: OptimizationResult("made", bool(c := one_for_the_other(context)), "so", c)
    graphs = {"projections": programs["projections"].graph}
    suite.test_it_changes_no_result(fused, graphs)  # no rule is broken
    expect_failure(lambda: suite.test_its_results_are_the_same_when_it_runs(fused, graphs, {}), "after its rewrite")


def test_suite_skips_untried_optimization(programs: Any) -> None:
    suite = testing.OptimizationConformance()
    with pytest.raises(pytest.skip.Exception, match="override the fixture `programs`"):
        suite.test_its_results_are_the_same_when_it_runs(
            substituting("relu", torch.relu, applied=False), GRAPHS, programs
        )


def test_suite_catches_invalid_placements() -> None:
    suite = testing.PlacementPolicyConformance()

    def place(self: Any, context: Any) -> Placement:
        placement = SingleDevice().place(context)
        return attrs.evolve(placement, decisions=placement.decisions[1:])

    expect_failure(
        lambda: suite.test_its_placements_hold(made(PlacementPolicy, place=place), GRAPHS, 1), "are not placed"
    )


def test_suite_catches_faulty_policies() -> None:
    suite = testing.PlacementPolicyConformance()

    def by_share(self: Any, context: Any) -> Placement:
        assert all(1 / device.memory_free for device in context.topology.devices)
        return SingleDevice().place(context)

    def by_size(self: Any, context: Any) -> Placement:
        large = sum(context.graph.meta(value).nbytes for value in context.graph.inputs) > 1 << 16
        devices = context.topology.devices[::-1] if large else context.topology.devices
        topology = attrs.evolve(context.topology, devices=devices)
        return SingleDevice().place(attrs.evolve(context, topology=topology))

    def unmapped(self: Any, context: Any) -> Placement:
        return SingleDevice().place(attrs.evolve(context, plan=testing.placement_context(context.graph).plan))

    for situation, error in (("unknown", TypeError), ("nothing free", ZeroDivisionError)):
        with pytest.raises(error):
            suite.test_it_copes_with(made(PlacementPolicy, place=by_share), GRAPHS, situation)
    lying = made(PlacementPolicy, place=by_size, tolerates_growth=True)
    expect_failure(lambda: suite.test_it_tolerates_growth_if_it_says_so(lying, perceptron), "tolerates_growth")
    expect_failure(
        lambda: suite.test_it_reads_what_stands_for_a_value(made(PlacementPolicy, place=unmapped), 2), "not in the plan"
    )


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_scheduler_suite_placement_is_legal(devices: int) -> None:
    used = set()
    for graph in GRAPHS.values():
        context = testing.placement_context(graph, devices)
        placement = testing.scheduling_context(graph, devices).placement
        check_placement(context, placement, "spread")
        used |= set(placement.devices)
    assert len(used) == devices


def test_suite_catches_invalid_priorities() -> None:
    suite = testing.SchedulerConformance()
    nothing = made(Scheduler, priority=lambda self, context: None)
    expect_failure(lambda: suite.test_its_schedules_hold(nothing, GRAPHS, 2), "return a NodePriority")
    calls = itertools.count()
    fickle = made(Scheduler, priority=lambda self, context: NodePriority(lambda node: -next(calls) % 7, "so"))
    expect_failure(lambda: suite.test_its_schedules_hold(fickle, GRAPHS, 2), "two results")
    expect_failure(lambda: suite.test_it_is_a_scheduler(made(PlacementPolicy, place=nothing)), "no Scheduler")


class Lossy(CpuDevice):
    """Loses the last byte, shares one generator, and opens anything."""

    def open(self, index: int) -> Any:
        return LossyRuntime(torch.device("cpu"))


class LossyRuntime(DeviceRuntime):
    def receive(self, data: torch.Tensor) -> torch.Tensor:
        return data[:-1] if len(data) > 1 else data

    def generator(self) -> torch.Generator:
        return torch.default_generator

    def memory(self) -> dict[str, int]:
        return {"total": 1, "free": 2, "allocated": 0}


def test_suite_catches_lossy_devices() -> None:
    suite, runtime = testing.DeviceConformance(), Lossy().open(0)
    expect_failure(lambda: suite.test_bytes_come_back_as_they_went(runtime), "came back as others")
    expect_failure(lambda: suite.test_random_numbers_follow_the_seed(runtime), "")
    expect_failure(lambda: suite.test_memory_is_told_in_bytes(runtime), "")
    expect_failure(lambda: suite.test_a_device_that_is_not_there(Lossy()), "DID NOT RAISE")


def test_suite_catches_wrong_compilers() -> None:
    suite, cpu = testing.CompilerConformance(), torch.device("cpu")

    def frozen(self: Any, context: Any) -> Any:
        results = context.graph_module(*context.inputs)
        return lambda inputs: results

    def copying(self: Any, context: Any) -> Any:
        return lambda inputs: context.graph_module(*[tensor.clone() for tensor in inputs])

    expect_failure(lambda: suite.test_what_it_compiles_gives_the_same(made(compile=frozen), cpu), "not close")
    expect_failure(lambda: suite.test_it_respects_writes(made(compile=copying), cpu), "not close")


def test_suite_catches_wrong_authenticators() -> None:
    suite, wrong = testing.AuthenticatorConformance(), testing.wrong_credentials()
    alice = Credentials("a-token-of-alice-1")

    def of(answer: Any, **members: Any) -> Any:
        return made(authenticate=lambda self, shown: answer(shown), **members)

    open_door = of(lambda _: Identity("alice"))
    expect_failure(lambda: suite.test_it_refuses_wrong_credentials(open_door, wrong), "must be a Denial or None")
    parrot = of(lambda shown: Denial(f"no: {shown.token}"))
    expect_failure(lambda: suite.test_it_refuses_wrong_credentials(parrot, wrong), "a part of what was shown")
    deaf = of(lambda _: None)
    expect_failure(lambda: suite.test_it_knows_good_credentials(deaf, {"alice": alice}), "must be an Identity")
    leaking = of(lambda shown: Identity("alice", shown.token), is_valid=lambda self, key: True)
    expect_failure(lambda: suite.test_it_knows_good_credentials(leaking, {"alice": alice}), "has a secret")
    forgetful = made(Authenticator, authenticate=lambda self, shown: Identity("alice", "1"))
    expect_failure(lambda: suite.test_it_knows_good_credentials(forgetful, {"alice": alice}), "would be ended")
    trusting = of(lambda _: None, is_valid=lambda self, key: True)
    expect_failure(lambda: suite.test_it_knows_no_strange_key(trusting), "accepts the unknown key")


def test_suite_catches_wrong_assignment_policies() -> None:
    suite, assignments = testing.AssignmentPolicyConformance(), testing.sample_assignments()
    turns = itertools.count()
    for answer, said in [(99, "99 is none of"), (None, "None is none of"), (AssignmentRefusal(""), "says why")]:
        wrong = made(assign=lambda self, request, answer=answer: answer)
        expect_failure(lambda wrong=wrong: suite.test_it_names_an_executor_that_it_was_shown(wrong, assignments), said)
    position = made(assign=lambda self, request: len(request.executors) - 1)
    expect_failure(
        lambda: suite.test_it_names_an_executor_that_it_was_shown(position, assignments), "by its number: 0 is none of"
    )
    turning = made(assign=lambda self, request: next(turns))
    expect_failure(lambda: suite.test_it_decides_the_same_again(turning, assignments), "two results")
    expect_failure(
        lambda: suite.test_it_is_an_assignment_policy(made(decide=None)),
        "derive its class from djinn.hooks.AssignmentPolicy",
    )


class Careless(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(HTTPStatus.OK if self.path == "/metrics" else HTTPStatus.NOT_FOUND)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.mark.parametrize(("route", "said"), [("/metrics", "is answered for a wrong token"), ("/gone", "not there")])
def test_suite_catches_unauthenticated_operations(route: str, said: str) -> None:
    suite = testing.OperationsServerConformance()

    class Shown(OperationsServer):
        name, routes = "careless", (route,)

        def start(self, server: Any, address: Any) -> str:
            self.listener = ThreadingHTTPServer((address.host, address.port), Careless)
            threading.Thread(target=self.listener.serve_forever, daemon=True).start()
            return f"http://127.0.0.1:{self.listener.server_port}"

        def close(self) -> None:
            self.listener.shutdown()
            self.listener.server_close()

    expect_failure(lambda: suite.test_only_a_good_token_shows_a_route(Shown()), said)


def test_suite_catches_overridden_connection_members() -> None:
    class Colliding(SocketConnection):
        def __init__(self, sock: socket.socket) -> None:
            super().__init__(sock, Limits(), "the other end")
            self._ended = True  # type: ignore[assignment]

    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(AssertionError, match="`_ended` of Colliding is a bool"):
        check_own_names(Colliding(ours))


def test_suite_catches_incomplete_observers() -> None:
    suite = testing.ObserverConformance()

    class Strict(Observer):
        name = "strict"

        def observe(self, event: Event) -> None:
            assert event.fields["duration"] >= 0, "no duration"

    for process in ("client", "gateway", "executor"):
        with pytest.raises(KeyError):
            suite.test_it_takes_every_event(Strict(), process)


def test_suite_catches_observers_without_process() -> None:
    suite = testing.ObserverConformance()

    class Nowhere(Observer):
        name = "nowhere"
        processes = frozenset({"server"})

        def observe(self, event: Event) -> None: ...

    expect_failure(lambda: suite.test_it_is_an_observer(Nowhere()), "there are no processes ['server']")


def test_suite_catches_empty_registrations() -> None:
    stock = [CpuDevice()]

    class Plugin:
        name = "plugin"
        djinn_api_version = "2.0"

        @hookimpl
        def djinn_register_devices(self) -> Any:
            return [stock.pop()] if stock else []

    expect_failure(lambda: testing.PluginConformance().test_it_registers_the_same_twice(Plugin()), "")


def test_suite_names_missing_fixture() -> None:
    expect_failure(lambda: missing(testing.PatternConformance(), "pattern", "yours"), "needs a fixture `pattern`")
