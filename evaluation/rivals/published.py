"""Published figures of other projects for the programs of `evaluation.rivals`, or for similar ones."""

from __future__ import annotations

import attrs


@attrs.frozen
class Published:
    """A figure of another project.

    Attributes:
        system: name of the project.
        program: a name in `counting.PROGRAMS`, or a description of a program that is not among them.
        hardware: hardware and link of the measurement.
        figure: messages, waits, bytes or seconds, as published.
        messages: number of messages of the client, or None if it was not published.
        source: repository and file or thread, with the date of the measurement.
    """

    system: str
    program: str
    hardware: str
    figure: str
    source: str
    messages: int | None = None


_NOTES = "github.com/ymcrcat/rgpu, docs/performance-notes.md, 2026-09-14"
PUBLISHED = (
    Published("rgpu, op by op", "nanogpt", "Mac to an A40, 116 ms, batch 64 x 256", "139,931 messages, 5 waits, 70.9 MB up, 20.8 s", _NOTES, 139_931),
    Published("rgpu, graphs", "nanogpt", "Mac to its own GPU, 0 ms, batch 8 x 64", "44,880 messages, 48.0 MB, 8.3 s", _NOTES, 44_880),
    Published("rgpu", "resnet18", "Mac to an A40, 44.7 ms", "1 wait and 90 to 106 ms a step", "github.com/ymcrcat/rgpu, README.md, 2026-09"),
    Published(
        "rgpu, CUDA driver", "ResNet-18 inference, batch 1", "laptop to a 3090, 34.6 ms", "49 waits, 1,632 ms; as a CUDA graph 2 waits, 70 ms",
        "github.com/ymcrcat/rgpu, docs/PRODUCT_SPEC.md, 2026-09-11",
    ),
    Published(
        "Lupine, CUDA driver", "makemore training step", "RTX 4090, 30 ms", "196 ms, then 105 ms, then 42.6 ms a step; 6 waits at first",
        "lupinemachines/lupine#469 and #478, 2026-08-09",
    ),
    Published(
        "llama.cpp RPC", "TinyLlama 1.1B F16, 64 tokens", "T1200 laptop; GTX 1660 over gigabit", "63 tokens/s local, 60 over loopback; 42 over gigabit",
        "ggml-org/llama.cpp#6829, 2024-05-10",
    ),
    Published(
        "tinygrad remote", "BERT and ResNet step, Llama decoding", "its own machine", "1,111 ms (native 1,115); 3,077 ms (2,132); 21.3 tokens/s (23.0)",
        "tinygrad/tinygrad#10235, 2025-05-09",
    ),
)  # fmt: skip
