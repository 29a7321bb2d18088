"""Arguments that kernels of PyTorch take on trust, checked before they are called.

Eager PyTorch calls most kernels with what it has computed itself, gradients above all, and some look no further: given a gradient of
another shape, or an index beyond the end, they read and write memory that is not the tensor's. A client can say anything, so each such
op has a rule here. What the rules must catch is found by `tests/fuzz/run_ops.py`.
"""
