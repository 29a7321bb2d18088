"""Conditions under which late stop checks have no observable effect. If they do not hold, `generate()` waits for each check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

import djinn
from djinn_client.interception.tap import taps
from djinn_client.torch_dispatch import forward_hooks
from djinn_integrations.late_stop.caches import can_be_cut

# Classes whose results depend only on the tokens and their scores.
_CRITERIA: Final = frozenset({"EosTokenCriteria", "MaxLengthCriteria", "StopStringCriteria"})
_LOGITS_PROCESSORS: Final = frozenset(
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


def late_check_obstacle(model: Any, processors: Any, criteria: Any, config: Any, is_synchronized: bool) -> str:
    """Return why the stop checks of a `generate()` call cannot be late, or an empty string if they can.

    Args:
        model: the model.
        processors: logits processors of the call.
        criteria: stopping criteria of the call.
        config: the generation configuration.
        is_synchronized: True if other processes must run the same number of steps.
    """
    if is_synchronized or getattr(config, "is_assistant", False):
        return "other processes or models wait for each step"
    if djinn.compat.is_capturing() or taps.recorded:
        return "the program is being captured or verified"
    if model.training:
        return "the model is in training mode"
    for item in (processors, criteria):
        if type(item).__name__ not in {"LogitsProcessorList", "StoppingCriteriaList"} or not _is_of_transformers(item):
            return f"{type(item).__name__} may have state that surplus steps would change"
    unknown_classes = [t for t in processors if not (_is_of_transformers(t) and type(t).__name__ in _LOGITS_PROCESSORS)]
    unknown_classes += [t for t in criteria if not (_is_of_transformers(t) and type(t).__name__ in _CRITERIA)]
    if unknown_classes:
        return f"{type(unknown_classes[0]).__name__} may have state that surplus steps would change"
    return next(_reasons_in(model), "")


def cache_obstacle(model: Any, config: Any, cache: Any, outlives: bool) -> str:
    """Return why a cache prevents late checks, or an empty string if it does not.

    `outlives`: True if the caller can use the cache after `generate()`.
    """
    if cache is None or not outlives:
        return ""
    if not can_be_cut(cache):
        return f"surplus steps cannot be removed from a {type(cache).__name__}"
    if not _pads_are_tokens(model, config):
        return "the padding token is not in the vocabulary, so surplus steps would fail"
    return ""


def max_late_length(model: Any) -> float:
    """Return the sequence length from which `generate()` waits for each stop check: the model's maximum, or infinity."""
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
            yield f"{type(module).__name__} stores the length of sequences"


def _pads_are_tokens(model: Any, config: Any) -> bool:
    """Return True if the vocabulary has the padding token of finished sequences, so that the model can run on it."""
    if config.eos_token_id is None:
        return True
    ends = config.eos_token_id
    padding = config.pad_token_id
    if padding is None:
        padding = ends[0] if isinstance(ends, list) else ends
    embeddings = model.get_input_embeddings()
    count = getattr(getattr(embeddings, "weight", None), "shape", (0,))[0]
    return isinstance(padding, int) and 0 <= padding < count


def _is_of_transformers(item: Any) -> bool:
    return type(item).__module__.startswith("transformers.generation.")
