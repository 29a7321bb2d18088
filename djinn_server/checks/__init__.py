"""Validate arguments that PyTorch kernels do not check, before the kernels are called.

Eager PyTorch calls most kernels with values that it computed itself, above all gradients. Some kernels do not check these
values. A gradient of another shape, or an index out of bounds, makes them access memory outside of the tensor. A client
can send any arguments, so each such op has a rule here. `evaluation/fuzz/run_ops.py` finds the cases that rules must
catch.
"""
