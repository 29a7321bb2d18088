"""Ops without a kernel for bools refuse them at the op."""

a = torch.tensor([True, False], device=D)
b = a.argmax()
b = a.argmin(0)
b = a.topk(1)
