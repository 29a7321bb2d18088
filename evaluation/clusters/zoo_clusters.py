"""Programs of the models in `evaluation/zoo` for random clusters: an evaluation and a training step each, recorded
without a server.
"""

from __future__ import annotations

import random

import attrs
import torch

import djinn
from djinn import DjinnError
from evaluation.clusters.clusters import POLICIES, Tally, plan_request, random_request
from evaluation.zoo.catalogue import ZOO
from evaluation.zoo.likeness import loss_of, move_inputs

EACH = 2  # number of policies per cluster
REMOTE = "remote_accelerator:0"


@attrs.define
class Programs:
    """Recorded programs by name (`graphs`), and models that cannot be recorded without a server (`left_out`)."""

    graphs: dict = attrs.field(factory=dict)
    left_out: list = attrs.field(factory=list)


def record(names=None):
    """Return the programs of all models, or of the named ones."""
    results = Programs()
    for name in names or ZOO:
        torch.manual_seed(0)
        model, inputs = ZOO[name].make()
        try:
            with djinn.capture() as evaluated, torch.no_grad():
                model.to(REMOTE)
                input_tensor = move_inputs(inputs, REMOTE)
                outputs = model.eval()(**input_tensor)
            results.graphs[name] = evaluated.graph
            with djinn.capture() as trained:
                outputs = loss_of(model.train()(**input_tensor))
                outputs.backward()
            results.graphs[f"{name}, training"] = trained.graph
        except (DjinnError, RuntimeError, ValueError, TypeError) as error:
            results.left_out.append(f"{name}: {type(error).__name__}: {error}"[:120])
        del model, inputs
        outputs = None
    return results


def search_zoo(graphs, seed, count):
    """Plan random programs for `count` random clusters, each with a few random policies."""
    tally, names = Tally(), sorted(graphs)
    for number in range(seed, seed + count):
        chance = random.Random(number)
        name = chance.choice(names)
        request = random_request(chance, graphs[name], kinds=("cuda",))
        modules = sorted({m.split(".")[0] for n in graphs[name].nodes if (m := n.module)})
        ids = [d.id for d in request.topology.devices]
        pins = tuple((m, chance.choice(ids)) for m in chance.sample(modules, min(1, len(modules))))
        policies = chance.sample(POLICIES, EACH)
        plan_request(tally, f"{number} {name}", graphs[name], attrs.evolve(request, pins=pins), policies)
    return tally
