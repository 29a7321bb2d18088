"""`roll` along one dimension keeps channels last."""

a = torch.randn(2, 3, 4, 4, device=D).to(memory_format=torch.channels_last)
b = a.roll(1, -3)
c = a.roll(1)
d = a.mT.roll((1, 2), (0, 1))
e = torch.randn(3, 4, device=D)[:, ::2].t().roll(1, 0)
