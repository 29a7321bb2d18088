"""Reasons why a test passes on the CPU but not remotely, by traceback patterns."""

from __future__ import annotations

import re

# The first match counts: (pattern, reason).
_REASONS = (
    (r"cannot run on [a-z ]+ tensors of", "the device does not support this op for tensors of this layout"),
    (r"in test_to_padded_tensor_compile", "the test reads inductor's code, and inductor compiles no remote tensors"),
    (r"Unsupported device in DLTensor|Unknown device type", "DLPack shares memory, and the device's memory is in another process"),
    (r"in test_tensor_storage_type|torch\.FloatTensor\)|`torch\.cpu\.amp", "the test expects a class or name that only the CPU or CUDA has"),
    (r"in test_sparse_compressed_constructor\n(?s:.*)device\(type='cpu'\)", "the test makes a CPU tensor, and skips itself only on CUDA"),
    (r"in test_transformerencoderlayer", "the test expects this layer's fast path, which only the CPU and CUDA have"),
    (r"in test_fftfreq_out", "PyTorch resizes an out= in Python, which gives another warning"),
    (r"in test_boolean_assignment_value_mismatch|in test_trivial_fancy_out_of_bounds", "the error depends on data: it is raised at the next sync point"),
    (r"_is_cow_tensor|in test_cow_input|_lazy_clone", "the executor copies lazy clones, and the client does not report shared memory"),
    (r"in test_grad_scal", "the test expects a class or name that only the CPU or CUDA has"),
    (r"in test_advancedindex|all elements of std", "the error depends on data: it is raised at the next sync point"),
)  # fmt: skip
# the same for tests that time out
_SLOW = re.compile(r"in test_linspace|in test_scatter_add_one_dim_deterministic")
UNKNOWN = "not done"
_COMPILED = [(re.compile(pattern, re.MULTILINE), reason) for pattern, reason in _REASONS]


def reason_of(text: str, outcome: str) -> str:
    """Return the reason of an outcome that differs from the CPU's, by its traceback `text`."""
    if outcome == "hangs" and _SLOW.search(text):
        return "an op for each of 60,000 to 1,000,000 elements exceeds the time limit"
    if outcome != "failed":
        return outcome
    return next((reason for pattern, reason in _COMPILED if pattern.search(text)), UNKNOWN)
