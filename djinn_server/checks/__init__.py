"""Validation of arguments that PyTorch kernels do not check themselves, before the kernels are called.

Eager PyTorch calls most kernels with values that PyTorch computed, above all gradients. Some kernels do not check such
values: a gradient of another shape, or an index out of bounds, makes them access memory outside the tensor. A client
can send any arguments, so each such op has a rule here. `evaluation/fuzz/run_ops.py` finds the cases that the rules
must catch.
"""
