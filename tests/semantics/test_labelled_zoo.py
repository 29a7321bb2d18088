"""The labels of a few architectures are what they ought to be, and the score can tell right from wrong.

All the others: `python -m evaluation semantics`.
"""

from __future__ import annotations

from collections import Counter

import attrs
import pytest

import djinn
from djinn.planning import DataResidency, ExecutionPhase, Modality, PatternMatch, WorkloadType
from djinn_core.ir.graph import Graph
from djinn_core.planning.builtins.flops import flops_of
from evaluation.semantics.labelled_zoo import LABELLED, PLAIN, ZOO, labelled
from evaluation.semantics.phase_truth import workloads_of
from evaluation.semantics.scoring import NAMES, JudgedMatch, Sum, least, of_pattern, score

# One architecture of each family: the situation in which it is looked at, and how many instances of each pattern it has.
EXPECTED = {
    "gpt2": ("static_decode", {"attention": 2, "kv_cache": 2, "mlp": 2, "embedding": 1}),
    "qwen2_moe": ("decode", {"attention": 2, "kv_cache": 2, "embedding": 1}),
    "mamba": ("forward", {"embedding": 1}),
    "bert": ("forward", {"attention": 2, "mlp": 2, "embedding": 1}),
    "t5": ("prefill", {"attention": 6, "kv_cache": 4, "mlp": 4, "embedding": 2}),
    "resnet": ("train", {"convolution": 6}),
    "clip": ("forward", {"attention": 4, "mlp": 4, "convolution": 1, "embedding": 1, "fusion": 1}),
    "dlrm": ("train", {"embedding_bag": 5, "mlp": 2}),
    "gru_tagger": ("forward", {"embedding": 1}),
    "perceptron": ("train", {"mlp": 1}),
}  # fmt: skip


@pytest.fixture(scope="module")
def labelled_program():
    """Return a function that returns the labelled program of an entry. It records each program once."""
    found = {}

    def record(name):
        if name not in found:
            situation = EXPECTED[name][0]
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(LABELLED, name, attrs.evolve(LABELLED[name], situations=(situation,)))
                programs = {program.situation: program for program in labelled(name, count_flops=True)}
            found[name] = programs[situation]
        return found[name]

    return record


@pytest.mark.parametrize("name", EXPECTED)
def test_labelled_instances_match_configuration(embedded, labelled_program, name):
    assert Counter(i.pattern for i in labelled_program(name).truth.instances if i.required) == EXPECTED[name][1]


@pytest.mark.parametrize("name", EXPECTED)
def test_labels_refer_to_program_nodes(embedded, labelled_program, name):
    program = labelled_program(name)
    nodes = range(len(program.program))
    assert set(program.truth.phases) <= set(nodes)
    for instance in program.truth.instances:
        assert instance.core
        assert instance.core <= set(nodes)
        assert instance.core <= instance.span or instance.values
    products = {i for i in nodes if program.program.calls[i].op.split("::")[1].split(".")[0] in {"addmm", "linear"}}
    known = frozenset().union(*(i.core | i.span for i in program.truth.instances))
    forward = {i for i in products if not program.program.is_backward(i)}
    assert forward <= known, "a layer that no rule knows"


def test_training_phases_are_ordered(embedded, labelled_program):
    program = labelled_program("resnet")
    phases = [phase for node in range(len(program.program)) for phase in program.truth.phases[node]]
    order = [ExecutionPhase.TRAINING_FORWARD, ExecutionPhase.TRAINING_BACKWARD, ExecutionPhase.TRAINING_OPTIMIZER]
    assert list(dict.fromkeys(phases)) == order
    assert phases == sorted(phases, key=order.index)
    residency = Counter(program.truth.residency.values())
    assert residency[DataResidency.GRADIENT] == 20
    assert residency[DataResidency.OPTIMIZER_STATE] == 40
    assert residency[DataResidency.INPUT] == 2


def test_clip_has_two_modalities_and_fusion(embedded, labelled_program):
    truth = labelled_program("clip").truth
    (fusion,) = (i for i in truth.instances if i.pattern == "fusion")
    assert {truth.modalities[n] for n in fusion.core} == {Modality.MULTIMODAL_FUSION}
    before = {m for n, m in truth.modalities.items() if n < min(fusion.core)}
    assert before == {Modality.TEXT, Modality.VISION}
    assert truth.phases[min(n for n, m in truth.modalities.items() if m is Modality.VISION)] == {
        ExecutionPhase.VISION_ENCODING
    }


def match_of(instance, nodes=None, shift=0):
    """Return a correct match of an instance, or a match of other nodes."""
    return PatternMatch(
        pattern=min(NAMES[instance.pattern]),
        nodes=tuple(sorted(n + shift for n in nodes or instance.core)),
        confidence=0.9,
        reason="it was told",
        residency={(storage + shift) << 32: DataResidency.STATEFUL_KV_CACHE for storage in instance.values},
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_score_separates_perfect_and_shifted_matches(embedded, labelled_program, name):
    instances = labelled_program(name).truth.instances
    required = [i for i in instances if i.required]
    for pattern in {i.pattern for i in required}:
        mine = [i for i in required if i.pattern == pattern]
        right = of_pattern(pattern, instances, map(match_of, mine))
        assert not right.missed
        assert all(judged.right for judged in right.judged)
        beside = of_pattern(pattern, mine, [match_of(i, shift=1000) for i in mine])
        assert len(beside.missed) == len(mine)
        assert not any(judged.right for judged in beside.judged)


def test_score_penalizes_duplicate_and_oversized_matches(embedded, labelled_program):
    program = labelled_program("bert")
    instances = program.truth.instances
    first, second = (i for i in instances if i.pattern == "attention")
    twice = of_pattern("attention", instances, [match_of(first), match_of(first), match_of(second)])
    assert [judged.right for judged in twice.judged] == [True, False, True]
    everything = of_pattern("attention", instances, [match_of(first, range(len(program.program)))])
    assert not everything.judged[0].right
    assert len(everything.missed) == 2
    both = of_pattern("attention", instances, [match_of(first, [*first.span, *second.span])])
    assert not both.judged[0].right
    wide = of_pattern("attention", instances, [match_of(first, [*first.core, *range(40)])])
    assert not wide.judged[0].right


def test_optional_instances_are_not_scored(embedded, labelled_program):
    instances = labelled_program("bert").truth.instances
    position = next(i for i in instances if i.pattern == "embedding" and not i.required)
    judged = of_pattern("embedding", instances, [match_of(position)])
    assert judged.judged[0].right is None
    assert [i.required for i in judged.missed] == [True]


def test_confidence_is_calibrated():
    def judge_match(confidence, right):
        return JudgedMatch(PatternMatch("mlp", (0,), confidence, "it was told"), right)

    total = Sum()
    total.judged["attention"] += [judge_match(0.95, True)] * 3 + [judge_match(0.91, False)] + [judge_match(0.95, None)]
    total.judged["mlp"] += [judge_match(1.0, True), judge_match(0.4, False)]
    assert total.calibration("attention") == pytest.approx((0.94, 0.75))
    assert total.calibration() == pytest.approx((5.16 / 6, 4 / 6))
    assert total.calibration("fusion") is None


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "clip", "resnet"])
def test_attention_and_kv_caches_are_recognised(embedded, labelled_program, name):
    program = labelled_program(name)
    profile = djinn.plan(attrs.evolve(program.program, modules=(), sites=()), until="annotate").profile
    found = score(program, profile)
    for pattern in ("attention", "kv_cache"):
        assert not found.patterns[pattern].missed
        assert all(judged.right for judged in found.patterns[pattern].judged)
    assert found.workload


@pytest.mark.parametrize("name", EXPECTED)
def test_embedding_bags_are_recognised(embedded, labelled_program, name):
    program = labelled_program(name)
    profile = djinn.plan(attrs.evolve(program.program, modules=(), sites=()), until="annotate").profile
    found = score(program, profile)
    assert not found.patterns["embedding_bag"].missed
    assert all(judged.right for judged in found.patterns["embedding_bag"].judged)


@pytest.mark.parametrize("name", ["bert", "resnet", "dlrm", "perceptron", "qwen2_moe"])
def test_labelled_flops_equal_pytorch_counter(embedded, labelled_program, name):
    program = labelled_program(name)
    graph = Graph(program.program)
    assert program.flops == sum(flops_of(graph, node) for node in graph.nodes)


def test_workload_types_by_family_and_situation():
    assert workloads_of("vision", "train") == {WorkloadType.TRAINING}
    assert WorkloadType.LLM in workloads_of("illustrated decoder", "decode")
    assert WorkloadType.LLM not in workloads_of("illustrated decoder", "prefill")


def test_lower_confidence_bound_equals_formula():
    assert least(0, 0) is None
    assert least(190, 190) == pytest.approx(0.980, abs=0.001)  # no mistake in 190
    assert least(90, 100) == pytest.approx(0.8256, abs=0.001)


def test_models_of_all_entries_are_known():
    assert set(LABELLED) <= {*ZOO, *PLAIN}
