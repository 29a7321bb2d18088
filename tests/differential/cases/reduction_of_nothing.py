"""Reductions refuse an empty dimension at the op."""

a = torch.ones(2, 0, device=D)
b = a.max(1)
b = a.min(1)
b = a.median(1)
b = a.nanmedian(-1)
b = a.mode()
b = a.argmax(1)
b = a.max(0)
b = a.index_select(1, torch.tensor([0], device=D))
b = a.index_select(0, torch.tensor([0], device=D))
