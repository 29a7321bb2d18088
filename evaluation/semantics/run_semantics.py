"""Accuracy of the stage `annotate` on a labelled zoo of architectures: patterns, phases, workload types, FLOPs.

    python -m evaluation semantics [--json] [--only gpt2,vit] [--misses] [--no-flops]

The ground truth comes from how models are built and called (`evaluation/semantics/README.md`), never from the matchers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator

import attrs
import torch

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import djinn
from djinn.planning import Tier, WorkloadProfile
from djinn_client.runtime.client import registry
from djinn_core.ir.graph import Graph
from djinn_core.ir.program import Program
from djinn_core.planning.builtins.flops import flops_of
from djinn_core.planning.stages.annotate import annotate
from evaluation.semantics.ground_truth import Labelled
from evaluation.semantics.labelled_zoo import LABELLED, labelled
from evaluation.semantics.scoring import NAMES, Score, Sum, least, score, share


@attrs.define
class Tally:
    """All results.

    Attributes:
        structural: scores of analyses by structure alone, without modules and source lines. full: scores of full analyses.
        counted: for each program, whether its workload type is right by counts of ops alone.
        programs, nodes: numbers of analysed programs and nodes.
        flops: number of programs whose FLOPs were compared. differing: descriptions of programs whose FLOPs differ.
        broken: entries that could not be recorded, with the reason.
    """

    structural: Sum = attrs.field(factory=Sum)
    full: Sum = attrs.field(factory=Sum)
    counted: list[bool] = attrs.field(factory=list)
    programs: int = 0
    nodes: int = 0
    flops: int = 0
    differing: list[str] = attrs.field(factory=list)
    broken: list[str] = attrs.field(factory=list)


def main() -> int:
    """Score the requested entries. Exit with 1 if one could not be recorded."""
    options = _options()
    torch.set_num_threads(1)
    tally, start = Tally(), time.process_time()
    for name in options.only.split(",") if options.only else LABELLED:
        _take(tally, name, options.misses, options.flops)
    _show(tally, time.process_time() - start)
    if options.json:
        print(json.dumps(figures(tally)))
    return int(bool(tally.broken))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--only", default="", help="names of entries, separated by commas")
    parser.add_argument("--misses", action="store_true", help="print the errors of each program")
    parser.add_argument("--no-flops", dest="flops", action="store_false", help="do not compare FLOPs")
    return parser.parse_args()


def _take(tally: Tally, name: str, misses: bool, flops: bool) -> None:
    try:
        for program in labelled(name, flops):
            _judge(tally, program, misses)
    except Exception as error:
        tally.broken.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")


def _judge(tally: Tally, program: Labelled, misses: bool) -> None:
    graph = Graph(attrs.evolve(program.program, modules=(), sites=()))
    structural = annotate(graph, registry().patterns, tiers=frozenset({Tier.STRUCTURE}))
    result = score(program, structural)
    tally.structural.add(program.situation, result)
    tally.full.add(program.situation, score(program, analysed(program.program)))
    tally.counted.append(annotate(graph, (), tiers=frozenset({Tier.OPERATIONS})).workload in program.truth.workloads)
    tally.programs += 1
    tally.nodes += len(program.program)
    if program.flops is not None:
        tally.flops += 1
        flops = sum(flops_of(graph, node) for node in graph.nodes)
        if flops != program.flops:
            line = f"{program.architecture} {program.situation}: {flops:.0f} FLOPs, PyTorch counts {program.flops}"
            tally.differing.append(line)
    if misses:
        for line in wrong(program, result, structural, graph):
            print(f"{program.architecture} {program.situation}: {line}")


def analysed(program: Program) -> WorkloadProfile:
    """Return the workload profile of a program, the result of the stage `annotate`."""
    profile = djinn.plan(program, until="annotate").profile
    assert profile is not None
    return profile


def wrong(program: Labelled, found: Score, profile: WorkloadProfile, graph: Graph) -> Iterator[str]:
    """Yield descriptions of the errors in a profile."""
    if not found.workload:
        names = ", ".join(sorted(w.value for w in program.truth.workloads))
        yield f"workload {profile.workload.value}, not {names}: {'; '.join(profile.reasons)}"
    for name, pattern in found.patterns.items():
        for judgement in pattern.judged:
            if judgement.right is False:
                yield f"{name} matched wrongly ({judgement.match.confidence}): {judgement.match.reason}"
        for missed in pattern.missed:
            ops = ", ".join(f"{n} {graph.nodes[n].operation}" for n in sorted(missed.core)[:4])
            yield f"{name} missed in {missed.where or 'the model'}: {ops}"
    phases: dict[str, list[int]] = {}
    for node in found.wrong_phases:
        right = "/".join(sorted(p.value for p in program.truth.phases[node]))
        phases.setdefault(f"phase {profile.phases[node].value}, not {right}", []).append(node)
    for text, nodes in phases.items():
        yield f"{text}: {len(nodes)} nodes, first {nodes[0]} {graph.nodes[nodes[0]].operation}"


def figures(tally: Tally) -> dict[str, object]:
    """Return the metrics of the run by name, for `--json`. A metric that was not measured is None."""
    score = tally.structural
    precision = {name: score.precision(name) for name in NAMES}
    recall = {name: score.recall(name) for name in NAMES}
    return {
        "pattern_precision_min": _least(*precision.values()),
        "pattern_recall_min": _least(*recall.values()),
        "phase_accuracy": _least(tally.full.phase_accuracy(*_WITHOUT_TRAINING), tally.full.phase_accuracy("train")),
        "workload_accuracy": _mean(tally.full.workloads),
        "structural_accuracy": _mean(score.workloads),
        "flops_mismatches": len(tally.differing),
        "pattern_precision": precision,
        "pattern_precision_least": {n: least(*_counts([j.right for j in score.judged[n]])) for n in NAMES},
        "pattern_recall_least": {n: least(score.found[n], score.found[n] + score.missed[n]) for n in NAMES},
        "pattern_recall": recall,
        "phase_accuracy_inference": tally.full.phase_accuracy(*_WITHOUT_TRAINING),
        "phase_accuracy_training": tally.full.phase_accuracy("train"),
        "structural_phase_accuracy": _least(score.phase_accuracy(*_WITHOUT_TRAINING), score.phase_accuracy("train")),
        "operations_accuracy": _mean(tally.counted),
        "residency_accuracy": share(score.residencies),
        "modality_accuracy": share(score.modalities),
        "calibration": {name: score.calibration(name) for name in NAMES},
        "architectures": len(LABELLED),
        "programs": tally.programs,
        "flops_compared": tally.flops,
        "broken": len(tally.broken),
    }


def _counts(answers: list[bool | None]) -> tuple[int, int]:
    closed = [answer for answer in answers if answer is not None]
    return sum(closed), len(closed)


_WITHOUT_TRAINING = (
    "forward",
    "prefill",
    "decode",
    "static_decode",
    "quantised_decode",
    "eager_forward",
    "eager_decode",
)


def _least(*shares: float | None) -> float | None:
    return min((s for s in shares if s is not None), default=None)


def _mean(answers: list[bool]) -> float | None:
    return sum(answers) / len(answers) if answers else None


def _show(tally: Tally, seconds: float) -> None:
    score = tally.structural
    print(f"\n{tally.programs} programs, {tally.nodes:,} nodes, {seconds:.0f} s of processor time")
    header = (
        f"{'instances':>10}{'found':>8}{'recall':>8}{'least':>7}{'matches':>9}{'right':>8}{'precision':>10}{'least':>7}"
    )
    print(f"\n{'pattern':16}{header}{'open':>7}   (least: the lower bound of Wilson's 95 % interval)")
    for name in NAMES:
        verdicts = [j.right for j in score.judged[name]]
        closed = [r for r in verdicts if r is not None]
        count = score.found[name] + score.missed[name]
        recall = f"{_format_score(score.recall(name)):>8}{_format_score(least(score.found[name], count)):>7}"
        precision = f"{_format_score(score.precision(name)):>10}{_format_score(least(sum(closed), len(closed))):>7}"
        counts = f"{count:10}{score.found[name]:8}{recall}{len(closed):9}{sum(closed):8}"
        print(f"{name:16}{counts}{precision}{len(verdicts) - len(closed):7}")
    result, instances = sum(score.found.values()), sum(score.found.values()) + sum(score.missed.values())
    closed = [j.right for name in NAMES for j in score.judged[name] if j.right is not None]
    print(
        f"{'all':16}{instances:10}{result:8}{_format_score(result / max(instances, 1)):>8}{_format_score(least(result, instances)):>7}"
        f"{len(closed):9}{sum(closed):8}{_format_score(_mean(closed)):>10}{_format_score(least(sum(closed), len(closed))):>7}"
    )
    print(f"\n{'phases':16}" + "  ".join(f"{s} {_format_score(tally.full.phase_accuracy(s))}" for s in score.phases))
    tiers = {"structure": score.workloads, "operations": tally.counted, "all tiers": tally.full.workloads}
    print(f"{'workload type':16}" + "  ".join(f"{tier} {_format_score(_mean(right))}" for tier, right in tiers.items()))
    print(
        f"{'residency':16}{_format_score(share(score.residencies))}  modality {_format_score(share(score.modalities))}"
    )
    print(f"{'FLOPs':16}{len(tally.differing)} of {tally.flops} programs differ")
    for line in (*tally.differing[:20], *tally.broken):
        print(f"  {line}")
    _show_calibration(score)


def _show_calibration(score: Sum) -> None:
    print(f"\n{'confidence':16}{'stated':>8}{'right':>8}")
    for name in NAMES:
        if (result := score.calibration(name)) is not None:
            print(f"{name:16}{_format_score(result[0]):>8}{_format_score(result[1]):>8}")


def _format_score(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
