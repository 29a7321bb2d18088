"""Colours of the phases."""

from __future__ import annotations

# Distinguishable with colour blindness, on white, and next to each other: fill, line.
_COLOURS = {
    "forward": ("#dbe7f6", "#3b6ea8"),
    "llm_prefill": ("#dbe7f6", "#3b6ea8"),
    "llm_decode": ("#fde3c8", "#c46a12"),
    "vision_encoding": ("#d7efe3", "#1f8a5b"),
    "vision_decoding": ("#e6efc9", "#71821c"),
    "multimodal_fusion": ("#f7dcea", "#b23a7c"),
    "training": ("#e6e0f5", "#6c4bb0"),
    "training_forward": ("#dbe7f6", "#3b6ea8"),
    "training_backward": ("#fde3c8", "#c46a12"),
    "training_optimizer": ("#e6e0f5", "#6c4bb0"),
}
_OTHER = ("#ececec", "#777777")
MIXED = "several phases"  # colour of a box with ops of several phases


def colours(phase: str) -> tuple[str, str]:
    """Return the fill and the line colour of a phase."""
    return _COLOURS.get(phase, _OTHER)
