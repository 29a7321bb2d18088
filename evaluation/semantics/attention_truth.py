"""Ground truth of attention, from configurations and modules: heads, what it attends to, its window, its projections."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from djinn.planning import Graph, Node
from evaluation.semantics.ground_truth import ModuleRun
from evaluation.semantics.module_runs import ancestors

_CROSS = ("cross", "encoder_attn", "EncDecAttention", "encoder_decoder", "encoder_attention", "multihead_attn",
          "token_to_image", "image_to_token")  # fmt: skip
_PROJECTING = frozenset({"addmm", "bmm", "convolution", "linear", "matmul", "mm"})
# The last parts of paths of modules that project, by what for. A layer for several of them has all their names.
_ROLES = {
    "query": (
        "q_proj",
        "query",
        "q_lin",
        "to_q",
        "q",
        "q_b_proj",
        "query_proj",
        "in_proj",
        "wq",
        "q_attn",
        "add_q_proj",
    ),
    "key": (
        "k_proj",
        "key",
        "k_lin",
        "to_k",
        "k",
        "kv_b_proj",
        "key_proj",
        "kv",
        "in_proj",
        "wk",
        "add_k_proj",
        "kv_a_proj_with_mqa",
    ),
    "value": ("v_proj", "value", "v_lin", "to_v", "v", "kv_b_proj", "value_proj", "kv", "in_proj", "wv", "add_v_proj"),
    "output": ("o_proj", "out_proj", "out_lin", "o", "output.dense", "to_out.0", "wo", "attn_out", "to_add_out"),
}
_FOR_ALL = ("query_key_value", "qkv_proj", "qkv", "Wqkv", "to_qkv", "in_proj", "attn.c_attn", "attention.c_attn")


def facts_of(graph: Graph, runs: Sequence[ModuleRun], index: int, core: int) -> dict[str, object]:
    """Ground truth of the attention whose weighing is the node `core`, in the run of that index."""
    within = [run for run in runs[index:] if core in run.span]
    modules, paths = [r.module for r in within], ".".join(r.path for r in within)
    said = [m.is_cross_attention for m in modules if isinstance(getattr(m, "is_cross_attention", None), bool)]
    cross = said[-1] if said else any(word in paths for word in _CROSS)
    facts: dict[str, object] = (
        {"kind": "cross"} if cross else {"kind": "self"} if "self" in paths.lower() or said else {}
    )
    facts |= _heads(modules)
    causal = [m.is_causal for m in modules if isinstance(getattr(m, "is_causal", None), bool)]
    queries, keys = _lengths(graph, graph.nodes[core], facts.get("heads"))
    # Some are told at each call, by a mask; then the attribute says no. In encoders it means it.
    if (
        causal
        and queries > 1
        and not cross
        and (causal[-1] or "encoder" in paths or "vision" in paths)
        and "text_model" not in paths
    ):
        facts["causal"] = causal[-1]
    return facts | (_reach(modules, keys) if queries > 1 and not cross else {})


def _heads(modules: Sequence[nn.Module]) -> dict[str, object]:
    heads = _stated(modules, ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads"))
    if not heads:
        return {}
    latent = _stated(modules, ("kv_lora_rank",))
    grouped = _stated(modules, ("num_key_value_heads", "num_kv_heads"))
    kv_heads = heads if latent else grouped or heads
    found: dict[str, object] = {"heads": heads, "kv_heads": kv_heads}
    sharing = "multi-head" if kv_heads == heads else "multi-query" if kv_heads == 1 else "grouped-query"
    found["sharing"] = "latent" if latent else sharing
    width = _stated(modules[-1:], ("qk_head_dim", "head_dim", "head_size", "attention_head_size", "key_value_proj_dim"))
    return found | ({"head_size": width} if width else {})


def _reach(modules: Sequence[nn.Module], keys: int) -> dict[str, object]:
    """Attention window, where the modules say so and there are more keys than that."""
    for module in reversed(modules):
        config = getattr(module, "config", None)
        if getattr(module, "attention_type", None) in {"global", "local"}:  # GPT-Neo
            window = config.window_size if module.attention_type == "local" else None
        elif hasattr(module, "sliding_window"):
            window = module.sliding_window
        elif getattr(config, "layer_types", None) is None and hasattr(config, "sliding_window"):
            window = config.sliding_window
        else:
            continue
        if not isinstance(window, int):
            return {"reach": "full"}
        if getattr(module, "is_causal", None) is False:
            window = 2 * window - 1  # as many on the other side, as kernels count
        return {"reach": "sliding", "window": window} if keys > window else {}
    return {}


def _stated(modules: Sequence[nn.Module], names: tuple[str, ...]) -> int | None:
    """The first of these attributes that the innermost module has, or its configuration."""
    for module in reversed(modules):
        for source in (module, getattr(module, "config", None)):
            for name in names:
                value = getattr(source, name, None)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
    return None


def _lengths(graph: Graph, weighing: Node, heads: object) -> tuple[int, int]:
    """Numbers of queries and keys, from the shapes of what is weighed. Query heads may lie folded beside queries."""
    shapes = [graph.meta(v).shape for v in weighing.inputs[:2]]
    if "attention" not in weighing.operation:
        return shapes[0][-2], shapes[0][-1]
    query, key = shapes
    folded = isinstance(heads, int) and len(query) == 4 and query[1] < heads
    return query[-2] * query[1] // heads if folded else query[-2], key[-2]


def projections_of(graph: Graph, runs: Sequence[ModuleRun], index: int, core: int) -> dict[str, object]:
    """By role, the products of the modules that project for an attention; of those inside its module only."""
    layers = [i for i in range(index + 1, len(runs)) if index in ancestors(runs, i)]
    paths = {i: runs[i].path for i in layers if not any(runs[j].parent == i for j in layers)}
    projections: dict[str, object] = {}
    for role, names in _ROLES.items():
        before = [i for i in paths if (runs[i].start > core) == (role == "output")]
        ends = names if role == "output" else (*names, *_FOR_ALL)
        found = [i for i in before if any(f".{paths[i]}".endswith(f".{name}") for name in ends)]
        nodes = {n for i in found for n in runs[i].span if graph.nodes[n].operation in _PROJECTING}
        if nodes:
            projections[f"{role}_projection"] = frozenset(nodes)
    return projections
