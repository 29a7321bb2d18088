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


def make_plugin(*bases: type, **members: Any) -> Any:
    """Return an object with these members. Functions become methods."""
    return type("Made", bases, {"name": "made"} | members)()


def expect_failure(check: Callable[[], None], message: str) -> None:
    with pytest.raises((AssertionError, InvalidStage, pytest.fail.Exception)) as caught:
        check()
    assert message in str(caught.value)


def make_pattern(nodes: Callable[[Any], tuple[int, ...]], **fields: Any) -> Any:
    def match(self: Any, graph: Any, candidates: Any) -> list[PatternMatch]:
        facts = {"pattern": "made", "confidence": 0.9, "reason": "so", "nodes": nodes(candidates)} | fields
        return [PatternMatch(**facts)] if candidates else []

    return make_plugin(Pattern, operations=frozenset({"mm"}), match=match)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (make_pattern(lambda candidates: (999,)), "nodes that the graph does not have"),
        (make_pattern(lambda candidates: (candidates[0].id,), pattern="other"), "`pattern` of a match is 'other'"),
        (make_pattern(lambda candidates: (candidates[0].id,), reason=""), "a match has no reason"),
        (make_pattern(lambda candidates: (candidates[0].id + 1,)), "a match has none of ['mm']"),
        (make_pattern(lambda candidates: (candidates[-1].id, candidates[0].id)), "not in order"),
    ],
)
def test_suite_catches_invalid_matches(pattern: Any, message: str) -> None:
    expect_failure(lambda: testing.PatternConformance().test_matches_cover_nodes_of_the_graph(pattern, GRAPHS), message)


def test_suite_catches_invalid_patterns() -> None:
    suite = testing.PatternConformance()
    spelt = make_plugin(Pattern, operations=frozenset({"aten::mm"}), match=lambda self, graph, candidates: [])
    expect_failure(lambda: suite.test_pattern_has_every_member(spelt), "names without namespace")
    expect_failure(
        lambda: suite.test_pattern_has_every_member(make_plugin(match=1)), "derive its class from djinn.hooks.Pattern"
    )
    blind = make_plugin(Pattern, operations=frozenset({"mm"}), match=lambda self, graph, candidates: [])
    expect_failure(
        lambda: suite.test_expected_graphs_are_matched(blind, {"mlp": GRAPHS["perceptron"]}),
        "does not match the graph 'mlp'",
    )
    calls: list[int] = []

    def match_with_new_reason(self: Any, graph: Any, candidates: Any) -> list[PatternMatch]:
        calls.append(1)
        return [PatternMatch("made", (candidates[0].id,), 0.5, f"call {len(calls)}")]

    expect_failure(
        lambda: suite.test_match_is_deterministic(
            make_plugin(Pattern, operations=frozenset({"mm"}), match=match_with_new_reason), GRAPHS
        ),
        "different matches",
    )


def test_suite_catches_invalid_cost_models() -> None:
    suite = testing.CostModelConformance()

    def model(estimate: Callable[..., Any]) -> Any:
        return make_plugin(CostModel, estimate=estimate)

    negative = model(lambda self, graph, node, device: CostEstimate(1.0, 0, 0, -1.0))
    expect_failure(lambda: suite.test_estimates_are_finite_and_deterministic(negative, GRAPHS), "negative")
    divides = model(lambda self, graph, node, device: CostEstimate(1.0, 0, 0, 1.0 / device.flops))
    with pytest.raises(ZeroDivisionError):
        suite.test_estimates_are_finite_and_deterministic(divides, GRAPHS)
    shrinking = model(
        lambda self, graph, node, device: CostEstimate(1.0, 0, 0, 1.0 / graph.meta(node.outputs[0]).numel)
    )
    expect_failure(lambda: suite.test_more_work_costs_no_less(shrinking), "larger tensors have a shorter time")


def make_optimization(rewrite: Callable[[Any], Rewrite], **members: Any) -> Any:
    return make_plugin(
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
        expect_failure(lambda: suite.test_rewrites_are_legal(make_optimization(rewrite), GRAPHS), message)  # noqa: B023
    unused = make_optimization(lambda context: first_of(context, lambda node: node.operation == "neg"))
    suite.test_rewrites_are_legal(unused, GRAPHS)
    expect_failure(lambda: suite.test_rewrites_keep_held_values(unused, GRAPHS), "the client still holds")
    itself = make_optimization(lambda context: Rewrite(), after=frozenset({"made"}))
    expect_failure(lambda: suite.test_optimization_has_every_member(itself), "its own name")


@pytest.fixture(scope="module")
def programs() -> Any:
    return testing.sample_programs()


def make_substitution(operation: str, compute: Callable[..., torch.Tensor], applied: bool = True) -> Any:
    """Return an optimization that computes each `operation` with other code."""

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
    suite.test_rewrites_are_legal(make_substitution(operation, wrong), GRAPHS)  # no rule is broken
    expect_failure(
        lambda: suite.test_rewritten_program_computes_equal_results(make_substitution(operation, wrong), {}, programs),
        message,
    )
    suite.test_rewritten_program_computes_equal_results(make_substitution(operation, right), GRAPHS, programs)
    assert testing.compare_results(make_substitution(operation, right), programs["perceptron"]).applied
    inputs = {v: torch.zeros(programs["perceptron"].graph.meta(v).shape) for v in programs["perceptron"].graph.inputs}
    assert testing.compare_results(make_substitution("relu", torch.abs), programs["perceptron"], inputs).applied


def test_suite_catches_unrecordable_substitutions(programs: Any) -> None:
    suite = testing.OptimizationConformance()
    for compute, message in (
        (lambda x: x.double(), "returns a torch.float64"),
        (lambda x: x if x.sum() > 0 else -x, "needs data"),
        (torch.rand_like, "draws random numbers"),
    ):
        with pytest.raises(InvalidStage, match=message):
            suite.test_rewritten_program_computes_equal_results(make_substitution("relu", compute), {}, programs)


def test_suite_catches_result_changing_rewrites(programs: Any) -> None:
    suite = testing.OptimizationConformance()

    def replace_second_linear(context: Any) -> Rewrite:
        nodes = context.graph.nodes
        first, second, *_ = context.graph.by_op.get("linear", (0, 0))
        if first == second or context.graph.meta(nodes[first].outputs[0]) is not context.graph.meta(
            nodes[second].outputs[0]
        ):
            return Rewrite()
        return Rewrite(drop=frozenset({second}), replace={nodes[second].outputs[0]: nodes[first].outputs[0]})

    fused = make_optimization(replace_second_linear)
    fused.optimize = lambda context: OptimizationResult("made", bool(c := replace_second_linear(context)), "so", c)
    graphs = {"projections": programs["projections"].graph}
    suite.test_rewrites_are_legal(fused, graphs)  # no rule is broken
    expect_failure(lambda: suite.test_rewritten_program_computes_equal_results(fused, graphs, {}), "after its rewrite")


def test_suite_skips_untried_optimization(programs: Any) -> None:
    suite = testing.OptimizationConformance()
    with pytest.raises(pytest.skip.Exception, match="override the fixture `programs`"):
        suite.test_rewritten_program_computes_equal_results(
            make_substitution("relu", torch.relu, applied=False), GRAPHS, programs
        )


def test_suite_catches_invalid_placements() -> None:
    suite = testing.PlacementPolicyConformance()

    def place(self: Any, context: Any) -> Placement:
        placement = SingleDevice().place(context)
        return attrs.evolve(placement, decisions=placement.decisions[1:])

    expect_failure(
        lambda: suite.test_placements_are_legal(make_plugin(PlacementPolicy, place=place), GRAPHS, 1), "are not placed"
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
            suite.test_unusual_devices_are_handled(make_plugin(PlacementPolicy, place=by_share), GRAPHS, situation)
    lying = make_plugin(PlacementPolicy, place=by_size, tolerates_growth=True)
    expect_failure(lambda: suite.test_size_independent_policy_places_alike(lying, perceptron), "tolerates_growth")
    expect_failure(
        lambda: suite.test_replaced_values_are_respected(make_plugin(PlacementPolicy, place=unmapped), 2),
        "not in the plan",
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
    nothing = make_plugin(Scheduler, priority=lambda self, context: None)
    expect_failure(lambda: suite.test_schedules_are_legal(nothing, GRAPHS, 2), "return a NodePriority")
    calls = itertools.count()
    fickle = make_plugin(Scheduler, priority=lambda self, context: NodePriority(lambda node: -next(calls) % 7, "so"))
    expect_failure(lambda: suite.test_schedules_are_legal(fickle, GRAPHS, 2), "two different schedules")
    expect_failure(
        lambda: suite.test_scheduler_has_every_member(make_plugin(PlacementPolicy, place=nothing)), "no Scheduler"
    )


class LossyDevice(CpuDevice):
    """A device that loses the last byte, shares one generator, and opens any index."""

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
    suite, runtime = testing.DeviceConformance(), LossyDevice().open(0)
    expect_failure(lambda: suite.test_data_survive_a_round_trip(runtime), "changed on their way")
    expect_failure(lambda: suite.test_generator_follows_its_seed(runtime), "")
    expect_failure(lambda: suite.test_memory_reports_bytes(runtime), "")
    expect_failure(lambda: suite.test_missing_device_raises_startup_error(LossyDevice()), "DID NOT RAISE")


def test_suite_catches_wrong_compilers() -> None:
    suite, cpu = testing.CompilerConformance(), torch.device("cpu")

    def frozen(self: Any, context: Any) -> Any:
        results = context.graph_module(*context.inputs)
        return lambda inputs: results

    def copying(self: Any, context: Any) -> Any:
        return lambda inputs: context.graph_module(*[tensor.clone() for tensor in inputs])

    expect_failure(lambda: suite.test_compiled_results_match(make_plugin(compile=frozen), cpu), "not close")
    expect_failure(lambda: suite.test_in_place_writes_reach_the_input(make_plugin(compile=copying), cpu), "not close")


def test_suite_catches_wrong_authenticators() -> None:
    suite, wrong = testing.AuthenticatorConformance(), testing.wrong_credentials()
    alice = Credentials("a-token-of-alice-1")

    def of(answer: Any, **members: Any) -> Any:
        return make_plugin(authenticate=lambda self, shown: answer(shown), **members)

    open_door = of(lambda _: Identity("alice"))
    expect_failure(lambda: suite.test_invalid_credentials_are_refused(open_door, wrong), "must be a Denial or None")
    parrot = of(lambda shown: Denial(f"no: {shown.token}"))
    expect_failure(
        lambda: suite.test_invalid_credentials_are_refused(parrot, wrong), "contains a part of the credentials"
    )
    deaf = of(lambda _: None)
    expect_failure(lambda: suite.test_valid_credentials_are_accepted(deaf, {"alice": alice}), "must be an Identity")
    leaking = of(lambda shown: Identity("alice", shown.token), is_valid=lambda self, key: True)
    expect_failure(
        lambda: suite.test_valid_credentials_are_accepted(leaking, {"alice": alice}),
        "contains a part of the credentials",
    )
    forgetful = make_plugin(Authenticator, authenticate=lambda self, shown: Identity("alice", "1"))
    expect_failure(lambda: suite.test_valid_credentials_are_accepted(forgetful, {"alice": alice}), "refuses `key`")
    trusting = of(lambda _: None, is_valid=lambda self, key: True)
    expect_failure(lambda: suite.test_unknown_keys_are_invalid(trusting), "accepts the unknown key")


def test_suite_catches_wrong_assignment_policies() -> None:
    suite, assignments = testing.AssignmentPolicyConformance(), testing.sample_assignments()
    turns = itertools.count()
    for answer, said in [
        (99, "99 is not one of"),
        (None, "None is not one of"),
        (AssignmentRefusal(""), "has no reason"),
    ]:
        wrong = make_plugin(assign=lambda self, request, answer=answer: answer)
        expect_failure(
            lambda wrong=wrong: suite.test_assign_returns_an_offered_executor_or_a_refusal(wrong, assignments), said
        )
    position = make_plugin(assign=lambda self, request: len(request.executors) - 1)
    expect_failure(
        lambda: suite.test_assign_returns_an_offered_executor_or_a_refusal(position, assignments),
        "by its number: 0 is not one of",
    )
    turning = make_plugin(assign=lambda self, request: next(turns))
    expect_failure(lambda: suite.test_assign_is_deterministic(turning, assignments), "different results")
    expect_failure(
        lambda: suite.test_policy_has_every_member(make_plugin(decide=None)),
        "derive its class from djinn.hooks.AssignmentPolicy",
    )


class Careless(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(HTTPStatus.OK if self.path == "/metrics" else HTTPStatus.NOT_FOUND)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.mark.parametrize(
    ("route", "said"), [("/metrics", "is answered for an invalid token"), ("/gone", "does not answer")]
)
def test_suite_catches_unauthenticated_operations(route: str, said: str) -> None:
    suite = testing.OperationsServerConformance()

    class CarelessOperations(OperationsServer):
        name, routes = "careless", (route,)

        def start(self, server: Any, address: Any) -> str:
            self.listener = ThreadingHTTPServer((address.host, address.port), Careless)
            threading.Thread(target=self.listener.serve_forever, daemon=True).start()
            return f"http://127.0.0.1:{self.listener.server_port}"

        def close(self) -> None:
            self.listener.shutdown()
            self.listener.server_close()

    expect_failure(lambda: suite.test_routes_need_a_valid_token(CarelessOperations()), said)


def test_suite_catches_overridden_connection_members() -> None:
    class Colliding(SocketConnection):
        def __init__(self, sock: socket.socket) -> None:
            super().__init__(sock, Limits(), "the other end")
            self._end_reason = True  # type: ignore[assignment]

    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(AssertionError, match="`_end_reason` of Colliding is a bool"):
        check_own_names(Colliding(ours))


def test_suite_catches_incomplete_observers() -> None:
    suite = testing.ObserverConformance()

    class Strict(Observer):
        name = "strict"

        def observe(self, event: Event) -> None:
            assert event.fields["duration"] >= 0, "no duration"

    for process in ("client", "gateway", "executor"):
        with pytest.raises(KeyError):
            suite.test_observer_accepts_every_event(Strict(), process)


def test_suite_catches_observers_without_process() -> None:
    suite = testing.ObserverConformance()

    class Nowhere(Observer):
        name = "nowhere"
        processes = frozenset({"server"})

        def observe(self, event: Event) -> None: ...

    expect_failure(lambda: suite.test_observer_has_every_member(Nowhere()), "`processes` has ['server']")


def test_suite_catches_empty_registrations() -> None:
    stock = [CpuDevice()]

    class Plugin:
        name = "plugin"
        djinn_api_version = "2.0"

        @hookimpl
        def djinn_register_devices(self) -> Any:
            return [stock.pop()] if stock else []

    expect_failure(lambda: testing.PluginConformance().test_hooks_are_repeatable(Plugin()), "")


def test_suite_names_missing_fixture() -> None:
    expect_failure(lambda: missing(testing.PatternConformance(), "pattern", "yours"), "needs a fixture `pattern`")
