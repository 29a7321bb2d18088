"""Reasons why a test passes on the CPU but not remotely, by traceback patterns."""

from __future__ import annotations

import re

# The first match counts: (pattern, reason).
_REASONS = (
    (r"cannot run on [a-z ]+ tensors of", "PyTorch's op for tensors of this layout is not on the list of those that the device has"),
    (r"in test_to_padded_tensor_compile", "the test reads code that inductor made, which makes none for remote tensors"),
    (r"Unsupported device in DLTensor|Unknown device type", "DLPack shares memory, and that of the device is elsewhere"),
    (r"in test_tensor_storage_type|torch\.FloatTensor\)|`torch\.cpu\.amp", "the test wants a class or a name of the CPU's or CUDA's"),
    (r"in test_sparse_compressed_constructor\n(?s:.*)device\(type='cpu'\)", "the test makes a tensor of the CPU, and leaves that out for CUDA by its name"),
    (r"in test_transformerencoderlayer", "the test expects the fast path of this layer on the CPU and on CUDA alone"),
    (r"in test_fftfreq_out", "another warning: PyTorch resizes an out= in Python here"),
    (r"in test_boolean_assignment_value_mismatch|in test_trivial_fancy_out_of_bounds", "the error depends on data: it is raised at the next sync point"),
    (r"_is_cow_tensor|in test_cow_input|_lazy_clone", "lazy clones are copied when the executor runs them, and the client does not say that they share memory"),
    (r"in test_grad_scal", "the test wants a class or a name of the CPU's or CUDA's"),
    (r"in test_advancedindex|all elements of std", "the error depends on data: it is raised at the next sync point"),
)  # fmt: skip
# the same for tests that time out
_SLOW = re.compile(r"in test_linspace|in test_scatter_add_one_dim_deterministic")
UNKNOWN = "not done"
_COMPILED = [(re.compile(pattern, re.MULTILINE), reason) for pattern, reason in _REASONS]


def reason_of(text: str, outcome: str) -> str:
    """Return the reason of a result, from its traceback."""
    if outcome == "hangs" and _SLOW.search(text):
        return "60,000 to 1,000,000 single elements, each an op of its own, take more than the limit"
    if outcome != "failed":
        return outcome
    return next((reason for pattern, reason in _COMPILED if pattern.search(text)), UNKNOWN)
