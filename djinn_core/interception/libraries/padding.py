"""transformers' advice to pass an attention mask: given when the answer comes, in place of waiting for it in every forward pass.

Without a mask its models look whether the first or the last token is padding, to warn once. A decoding step has one token,
which the model itself has made: nothing is asked there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch

from djinn_core.errors import DjinnError
from djinn_core.interception.async_fetch import Pending, fetch_later
from djinn_core.interception.tensors import pending_copies
from djinn_core.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.logs import get_logger

Warn = Callable[[Any, torch.Tensor, torch.Tensor | None], None]

_log = get_logger("djinn.interception")


@attrs.frozen
class _Question:
    """Pending check for padding in tokens that are being fetched."""

    model: Any
    ends: Pending
    warn: Warn

    def done(self) -> bool:
        """As `Copy.done`."""
        return self.ends.done()

    def land(self, strict: bool) -> None:
        """Warn, if there is reason to."""
        del strict
        try:
            self.warn(self.model, self.ends.result()[0], None)
        except DjinnError as error:  # the model's own use of the tokens raises it
            _log.debug("tokens could not be looked at", reason=str(error))


def adapt(module: Any) -> None:
    """`transformers.modeling_utils`."""
    model = module.PreTrainedModel
    model.warn_if_padding_and_no_attention_mask = _later(model.warn_if_padding_and_no_attention_mask)


def _later(warn: Warn) -> Warn:
    @functools.wraps(warn)
    def warn_later(self: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        asks = attention_mask is None and self.config.pad_token_id is not None
        if torch.compiler.is_compiling() or not asks or not isinstance(input_ids, LazyTensor) or input_ids.dim() != 2:
            warn(self, input_ids, attention_mask)
        elif input_ids.shape[1] > 1:
            ends: Any = input_ids[:, :: input_ids.shape[1] - 1]
            pending_copies.on_their_way.append(_Question(self, fetch_later([ends]), warn))
            pending_copies.land_what_came()

    return warn_later
