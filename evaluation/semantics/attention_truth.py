"""Ground truth of attention, from configurations and modules: heads and attended inputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from djinn.planning import Graph, Node
from evaluation.semantics.ground_truth import ModuleRun

_CROSS = ("cross", "encoder_attn", "EncDecAttention", "encoder_decoder", "encoder_attention", "multihead_attn",
          "token_to_image", "image_to_token")  # fmt: skip


def facts_of(graph: Graph, runs: Sequence[ModuleRun], index: int, core: int) -> dict[str, object]:
    """Return the ground truth of the attention with the weighting node `core`, in the run with that index."""
    within = [run for run in runs[index:] if core in run.span]
    modules, paths = [r.module for r in within], ".".join(r.path for r in within)
    said = [m.is_cross_attention for m in modules if isinstance(getattr(m, "is_cross_attention", None), bool)]
    cross = said[-1] if said else any(word in paths for word in _CROSS)
    facts: dict[str, object] = (
        {"kind": "cross"} if cross else {"kind": "self"} if "self" in paths.lower() or said else {}
    )
    facts |= _heads(modules)
    causal = [m.is_causal for m in modules if isinstance(getattr(m, "is_causal", None), bool)]
    queries = _queries(graph, graph.nodes[core], facts.get("heads"))
    # Some are causal by a mask at each call, although the attribute is False. In encoders the attribute is right.
    if (
        causal
        and queries > 1
        and not cross
        and (causal[-1] or "encoder" in paths or "vision" in paths)
        and "text_model" not in paths
    ):
        facts["causal"] = causal[-1]
    return facts


def _heads(modules: Sequence[nn.Module]) -> dict[str, object]:
    heads = _stated(modules, ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads"))
    if not heads:
        return {}
    latent = _stated(modules, ("kv_lora_rank",))
    grouped = _stated(modules, ("num_key_value_heads", "num_kv_heads"))
    kv_heads = heads if latent else grouped or heads
    found: dict[str, object] = {"heads": heads, "kv_heads": kv_heads}
    width = _stated(modules[-1:], ("qk_head_dim", "head_dim", "head_size", "attention_head_size", "key_value_proj_dim"))
    return found | ({"head_size": width} if width else {})


def _stated(modules: Sequence[nn.Module], names: tuple[str, ...]) -> int | None:
    """Return the first of these attributes of the innermost module or its configuration."""
    for module in reversed(modules):
        for source in (module, getattr(module, "config", None)):
            for name in names:
                value = getattr(source, name, None)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
    return None


def _queries(graph: Graph, weighing: Node, heads: object) -> int:
    """Return the number of queries, from the shape of the weights. Query heads may be folded into queries."""
    shape = graph.meta(weighing.inputs[0]).shape
    folded = "attention" in weighing.operation and isinstance(heads, int) and len(shape) == 4 and shape[1] < heads
    return shape[-2] * shape[1] // heads if folded and isinstance(heads, int) else shape[-2]
