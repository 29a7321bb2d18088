"""transformers' warning about a missing attention mask, shown when the needed tokens arrive, without a wait per forward pass.

Without a mask, models check whether the first or the last token is padding, and warn once. A decoding step has one token,
which the model generated, so this adapter skips its check.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from djinn.compat import LazyTensor
from djinn_client.interception.async_fetch import call_when_fetched

Warn = Callable[[Any, torch.Tensor, torch.Tensor | None], None]


def adapt_models(module: Any) -> None:
    """Adapt `transformers.modeling_utils`: the check for padding without an attention mask does not wait."""
    model = module.PreTrainedModel
    model.warn_if_padding_and_no_attention_mask = _deferred_warning(model.warn_if_padding_and_no_attention_mask)


def _deferred_warning(warn: Warn) -> Warn:
    @functools.wraps(warn)
    def warn_later(self: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        asks = attention_mask is None and self.config.pad_token_id is not None
        if torch.compiler.is_compiling() or not asks or not isinstance(input_ids, LazyTensor) or input_ids.dim() != 2:
            warn(self, input_ids, attention_mask)
        elif input_ids.shape[1] > 1:
            ends: Any = input_ids[:, :: input_ids.shape[1] - 1]
            call_when_fetched([ends], lambda fetched: warn(self, fetched[0], None))

    return warn_later
