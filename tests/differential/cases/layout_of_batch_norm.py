"""Batch norms return row-major results, or channels last."""

a = torch.randn(3, 2, device=D).t()
b = F.batch_norm(a, None, None, training=True)
c = torch.randn(2, 3, 4, 4, device=D)
d = F.batch_norm(c.to(memory_format=torch.channels_last), None, None, training=True)
e = F.batch_norm(c.mT, None, None, training=True)
f = F.batch_norm(c[..., 1:], torch.zeros(3, device=D), torch.ones(3, device=D))
g = nn.BatchNorm2d(3, device=D)(c.mT)
