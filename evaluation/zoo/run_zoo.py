"""Every architecture of the zoo, local and on a server process: `python -m evaluation zoo`.

Exits with 1 if one differs from local.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import attrs
from rich.console import Console
from rich.progress import track
from rich.table import Table

from evaluation.zoo.catalogue import SHORT_FORM, ZOO
from evaluation.zoo.likeness import Likeness, Verdict, compare
from evaluation.zoo.reporting import made_by, markdown, versions
from evaluation.zoo.serving import serving

COLUMNS = (
    "architecture",
    "kind",
    "parameters",
    "ops",
    "round trips",
    "forward",
    "step",
    "tokens",
    "here (s)",
    "remote (s)",
)


def main() -> int:
    """Compare the requested architectures, print a table and, if requested, write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names of architectures, separated by commas")
    parser.add_argument("--short", action="store_true", help="run only the architectures of the default test suite")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--markdown", type=Path, help="also write the table to this page")
    parser.add_argument("--device", default="cpu", help="device of both sides, such as cuda:0")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else SHORT_FORM if options.short else tuple(ZOO)
    console = Console(width=160)
    with warnings.catch_warnings(), serving(device=options.device):
        warnings.simplefilter("ignore")
        verdicts = [judge(name, options.device) for name in track(names, "comparing", console=console)]
    show(verdicts, console)
    if options.json:
        options.json.write_text(json.dumps(report(verdicts), indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(page(verdicts))
    return int(not all(verdict.equal for verdict in verdicts))


def judge(name: str, device: str) -> Verdict:
    """Return the verdict on one architecture. An exception becomes its `error`."""
    try:
        return compare(ZOO[name], device)
    except Exception as error:  # any failure is a row of the table
        return Verdict(name, ZOO[name].kind, error=f"{type(error).__name__}: {error}")


def cells(verdict: Verdict) -> tuple[str, ...]:
    """Return one row of the table."""
    counts = (f"{verdict.parameters:,}", str(verdict.ops), str(verdict.round_trips))
    tokens = {None: "", True: "same", False: "DIFFER"}[verdict.tokens]
    times = (f"{verdict.here:.2f}", f"{verdict.remote:.2f}")
    return (verdict.name, verdict.kind, *counts, word(verdict.forward), word(verdict.step), tokens, *times)


def word(likeness: Likeness) -> str:
    """Return the degree of equality: bitwise, or the largest difference in units of PyTorch's tolerance."""
    if likeness.bitwise:
        return "bitwise"
    return f"{'equal' if likeness.close else 'DIFFERS'} ({likeness.distance:.2g})"


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return the counts of equal and of bitwise equal architectures."""
    equal, forward = sum(v.equal for v in verdicts), sum(v.forward.bitwise for v in verdicts)
    step, trips = sum(v.step.bitwise for v in verdicts), sum(v.round_trips == 0 for v in verdicts)
    return (
        f"{len(verdicts)} architectures: {equal} equal. Bitwise: {forward} forward, {step} training step. "
        f"{sum(v.tokens is True for v in verdicts)} of {sum(v.tokens is not None for v in verdicts)} write the same tokens. "
        f"{trips} need no reply from the server in the forward pass."
    )


def show(verdicts: Sequence[Verdict], console: Console) -> None:
    """Print the table, the differences, and the totals."""
    table = Table(*COLUMNS)
    for verdict in verdicts:
        table.add_row(*cells(verdict))
    console.print(table)
    for verdict in verdicts:
        if not verdict.equal:
            reason = (
                verdict.error
                or f"{verdict.forward.worst} (forward), {verdict.step.worst} (step), tokens: {verdict.tokens}"
            )
            console.print(f"{verdict.name}: {reason}", markup=False)
    console.print(summary(verdicts))


def report(verdicts: Sequence[Verdict]) -> dict[str, object]:
    """Return all results, for `--json`."""
    return {"made with": versions(), "summary": summary(verdicts), "results": [attrs.asdict(v) for v in verdicts]}


def page(verdicts: Sequence[Verdict]) -> str:
    """Return the table as a page of the documentation."""
    table = markdown(COLUMNS, map(cells, verdicts))
    return "\n".join([INTRODUCTION, made_by("python -m evaluation zoo"), "", summary(verdicts), "", table, ""])


INTRODUCTION = """# The zoo

This page compares small models of transformers and diffusers, locally and on a server process. Each model runs a forward pass in
evaluation mode and one training step with dropout (SGD with momentum and weight decay). Outputs, loss, every gradient, and every
parameter and buffer after the step are compared with the tolerances of `torch.testing.assert_close`. Language models then generate
seven tokens greedily. "bitwise" means that no bit differs. Otherwise the table has the largest difference in units of the tolerance.
Ops and round trips are those of the forward pass. Times are wall-clock times of both passes on one thread, and the machine may have
had other work. Remote times include shape inference and planning for a new model.

Bits differ if another kernel computes the same result:

- Recurrent layers in the training step: Djinn decomposes them ([decision 6](../../docs/decisions/0006-decompose-composite-ops.md)).
- Products with a parameter that requires gradients, in the forward pass: local PyTorch then folds dimensions, and the executor's
  tensors never require gradients.
- `nn.MultiheadAttention` in evaluation mode: local PyTorch uses one fused kernel.

The causes of two other differences are unknown: GRU and packed LSTM in evaluation mode, and gradients of models that mostly have
convolutions.

Layer drop is off, because it draws from the CPU's random state. On a local CPU, dropout draws from the same state. On an accelerator,
it does not. Noise is added to all parameters, because parameters that begin as zeros hide errors.
"""

if __name__ == "__main__":
    sys.exit(main())
