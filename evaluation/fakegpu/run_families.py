"""Launches of decoding, by family of transformers, with and without graphs.

    python -m evaluation decoding [--families NAME...] [--settings NAME...] [--tokens 80] [--json]

Each model generates greedily, locally and on `fakegpu`. The figures are growths of the device's counters per token, for the last `LAST` tokens.
The peak is that of the device's memory while the hot model generates all tokens. `--graphs` is used with `exact=False`.
The settings vary the cache, the batch and the search of one family.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

import djinn
from djinn_fakegpu.remote_control import RemoteControl
from evaluation.fakegpu.decoding_families import FAMILIES
from evaluation.fakegpu.run_fakegpu import REMOTE, count_increases, counters, serving

LAST: Final = 20
PROMPT: Final = 12
ASSISTANT_NOISE: Final = 0.002  # added to the weights of the assistant
LAUNCH: Final = 0.1  # simulated seconds: templates are hot after few runs
# Options of `generate`, and rows of the batch, by setting.
SETTINGS: Final[Mapping[str, tuple[int, dict[str, Any]]]] = {
    "dynamic": (1, {}),
    "batch of 8": (8, {}),
    "padding": (8, {}),
    "static": (1, {"cache_implementation": "static"}),
    "offloaded": (1, {"cache_implementation": "offloaded"}),
    "beams": (1, {"num_beams": 4}),
    "assisted": (1, {}),
    "prompt lookup": (1, {"prompt_lookup_num_tokens": 3}),
    "eager attention": (1, {}),
}
Figures = dict[str, float]


def generate(model: Any, count: int, setting: str, most: int | None = None) -> torch.Tensor:
    """Return `count` tokens that a model generates. `most`: number of tokens for which beam search reserves memory."""
    from transformers import StoppingCriteriaList

    rows, options = SETTINGS[setting]
    ids = torch.randint(3, 90, (rows, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if setting == "padding":
        for item in range(rows):
            mask[item, :item], ids[item, :item] = 0, 0
    device = next(model.parameters()).device
    if device.type == "cpu" and setting == "offloaded":
        options = {}  # transformers needs an accelerator for it
    settings = {"attention_mask": mask.to(device), "do_sample": False, "pad_token_id": 0, **options}
    if setting == "assisted":
        settings["assistant_model"] = assistant_of(model)
    if setting == "beams":
        settings["stopping_criteria"] = StoppingCriteriaList([partial(_is_done, length=PROMPT + count)])
        count = most or count
    with torch.no_grad():
        output = model.generate(ids.to(device), max_new_tokens=count, **settings)
    return output.cpu()  # type: ignore[no-any-return]


def _is_done(ids: torch.Tensor, _: object, *, length: int) -> torch.Tensor:
    return torch.full((len(ids),), ids.shape[1] >= length, dtype=torch.bool, device=ids.device)


def assistant_of(model: Any) -> Any:
    """Return an assistant model that predicts most tokens like `model`."""
    assistant = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_((torch.randn(weight.shape, generator=generator) * ASSISTANT_NOISE).to(weight.device))
    return assistant


def first_difference(here: torch.Tensor, there: torch.Tensor) -> int | None:
    """Return the index of the first token that differs, or None if all tokens are equal."""
    if here.shape != there.shape:
        return min(here.shape[1], there.shape[1])
    unlike = (here != there).any(0).nonzero()
    return int(unlike[0]) if len(unlike) else None


def figures_of(name: str, setting: str, tokens: int) -> Figures:
    """Return the figures of one family."""
    here = FAMILIES[name].make()
    if setting == "eager attention":
        here.set_attn_implementation("eager")
    here.generation_config.eos_token_id = None
    there = copy.deepcopy(here).to(REMOTE)
    expected = generate(here, tokens, setting)
    differs = first_difference(expected, generate(there, tokens, setting))  # templates become hot
    generate(there, tokens, setting)
    shorter = count_increases(lambda: generate(there, tokens - LAST, setting, tokens))
    torch.get_device_module("remote_accelerator").reset_peak_memory_stats()
    results: list[torch.Tensor] = []
    longer = count_increases(lambda: results.append(generate(there, tokens, setting)))
    differs = first_difference(expected, results[0]) if differs is None else differs
    each = {
        label: (longer(label) - shorter(label)) / LAST
        for label in ("launches", "graph_launches", "ops_outside_graphs", "synchronizations")
    }
    return {**each, "peak_kib": counters()["peak"] / 2**10, "differs_at": -1 if differs is None else differs}


def measure(pairs: Sequence[tuple[str, str]], tokens: int, *options: str) -> dict[str, Figures]:
    """Return the figures of families and settings on a new server with these options."""
    results: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="djinn-families-") as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        with serving(Path(folder), environment, *options) as server:
            RemoteControl(Path(folder)).configure(launch=LAUNCH)
            settings: dict[str, Any] = {"servers": [server.url("tcp")], "token": server.token, "disable": ("local",)}
            for name, setting in pairs:
                djinn.configure(**settings, exact=False)  # a session for each, so that the peak is that of a model
                label = name if setting == "dynamic" else f"{name}, {setting}"
                results[label] = figures_of(name, setting, tokens)
                djinn.shut_down()
    return results


def row(label: str, before: Figures, after: Figures) -> str:
    """Return a line of the table."""
    names: tuple[Callable[[Figures], float], ...] = (
        lambda figures: figures["launches"] + figures["graph_launches"],
        lambda figures: figures["ops_outside_graphs"],
        lambda figures: figures["synchronizations"],
    )
    numbers = " | ".join(f"{figure(before):.1f} -> {figure(after):.1f}" for figure in names)
    numbers += f" | {before['peak_kib']:.0f} -> {after['peak_kib']:.0f}"
    same = "same" if after["differs_at"] < 0 else f"differ at {after['differs_at']:.0f}"
    return f"| {label} | {numbers} | {same} |"


def main() -> None:
    """Parse the command line, run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=[*FAMILIES])
    parser.add_argument("--settings", nargs="*", default=["dynamic"])
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pairs = [(name, setting) for name in options.families for setting in options.settings]
    before = measure(pairs, options.tokens)
    after = measure(pairs, options.tokens, "--graphs")
    print("| family | launches per token | ops outside of graphs | synchronizations | peak KiB | tokens |")
    print("| --- | --- | --- | --- | --- | --- |")
    for label, figures in before.items():
        print(row(label, figures, after[label]), flush=True)
    if options.json:
        print(json.dumps({"before": before, "after": after}))


if __name__ == "__main__":
    main()
