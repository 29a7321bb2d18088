"""A value that several threads use is not freed before the last of them has used it."""

t = torch.ones(3, 3, device=D)
r = in_threads(lambda: t @ t.mT, lambda: t @ t.mT, lambda: t.sum())
u = in_threads(lambda: t.add_(1))
