"""Conditions under which late stop checks have no observable effect. Otherwise `generate()` waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

import djinn
from djinn_client.interception.tap import taps
from djinn_client.torch_dispatch import forward_hooks
from djinn_integrations.late_stop.caches import can_be_cut

# The results of these depend only on the tokens and their scores.
_CRITERIA: Final = frozenset({"EosTokenCriteria", "MaxLengthCriteria", "StopStringCriteria"})
_PROCESSORS: Final = frozenset(
    {
        "AlternatingCodebooksLogitsProcessor",
        "BarkEosPrioritizerLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    }
)
_OWN_HOOKS: Final = ("accelerate", "djinn_client", "transformers")


def why_not(model: Any, processors: Any, criteria: Any, config: Any, synced: bool) -> str:
    """Return the reason why the stop checks of this `generate()` call cannot be late; empty if they can."""
    if synced or getattr(config, "is_assistant", False):
        return "other processes or models wait for each step"
    if djinn.compat.is_capturing() or taps.recorded:
        return "the program is being captured or verified"
    if model.training:
        return "the model is in training mode"
    for thing in (processors, criteria):
        if type(thing).__name__ not in {"LogitsProcessorList", "StoppingCriteriaList"} or not _own(thing):
            return f"{type(thing).__name__} may have state"
    strange = [t for t in processors if not (_own(t) and type(t).__name__ in _PROCESSORS)]
    strange += [t for t in criteria if not (_own(t) and type(t).__name__ in _CRITERIA)]
    if strange:
        return f"{type(strange[0]).__name__} may have state"
    return next(_reasons_in(model), "")


def why_not_with(model: Any, config: Any, cache: Any, outlives: bool) -> str:
    """Return the reason why this cache, which may outlive the call, prevents late checks; empty if it does not."""
    if cache is None or not outlives:
        return ""
    if not can_be_cut(cache):
        return f"writes of surplus steps to a {type(cache).__name__} cannot be undone"
    if not _pads_are_tokens(model, config):
        return "the padding token is not in the vocabulary, so surplus steps would fail"
    return ""


def longest_late(model: Any) -> float:
    """Return the length from which `generate()` waits for each stop check: `max_position_embeddings`, or infinity."""
    config = model.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None)
    return most if isinstance(most, int) else float("inf")


def _reasons_in(model: torch.nn.Module) -> Iterator[str]:
    for module in model.modules():
        for hook in forward_hooks(module):
            if getattr(hook, "__module__", "").partition(".")[0] not in _OWN_HOOKS:
                yield f"a hook of {type(module).__name__} would see surplus steps"
        kinds = getattr(module, "rope_type", None)
        if any("dynamic" in str(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
            yield f"{type(module).__name__} remembers how long sequences were"


def _pads_are_tokens(model: Any, config: Any) -> bool:
    """Return True if the padding token of finished rows is in the vocabulary, so that the model can run on it."""
    if config.eos_token_id is None:
        return True
    ends = config.eos_token_id
    padding = config.pad_token_id
    if padding is None:
        padding = ends[0] if isinstance(ends, list) else ends
    embeddings = model.get_input_embeddings()
    count = getattr(getattr(embeddings, "weight", None), "shape", (0,))[0]
    return isinstance(padding, int) and 0 <= padding < count


def _own(thing: Any) -> bool:
    return type(thing).__module__.startswith("transformers.generation.")
