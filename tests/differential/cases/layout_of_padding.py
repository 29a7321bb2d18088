"""Padding keeps channels last."""

a = torch.randn(2, 3, 4, 4, device=D).to(memory_format=torch.channels_last)
b = F.pad(a, (1, 1, 1, 1), "reflect")
c = F.pad(a, (1, 1, 1, 1), "replicate")
d = F.pad(a, (-1, -1, -1, -1), "replicate")
e = torch.randn(2, 3, 4, 4, 4, device=D).to(memory_format=torch.channels_last_3d)
f = F.pad(e, (1, 1, 1, 1, 1, 1), "reflect")
g = F.pad(e, (1, 1, 1, 1, 1, 1), "replicate")
h = F.pad(a.mT, (1, 1, 1, 1), "reflect")
