"""Convolutions keep channels last where the CPU's kernels do."""

a = torch.randn(2, 4, 3, device=D).mT
w = torch.randn(2, 3, 1, device=D)
b = F.conv1d(a, w)
c = F.conv_transpose1d(a, torch.randn(3, 2, 3, device=D))
d = F.conv1d(torch.randn(2, 3, 4, device=D), torch.randn(2, 3, 3, device=D).mT.contiguous().mT)
e = torch.randn(2, 4, 4, 4, 4, device=D).to(memory_format=torch.channels_last_3d)
f = F.conv3d(e, torch.randn(2, 4, 1, 1, 1, device=D))
g = F.conv3d(e, torch.randn(2, 4, 3, 3, 3, device=D))
h = F.conv_transpose3d(e, torch.randn(4, 2, 3, 3, 3, device=D))
i = F.conv3d(e.double(), torch.randn(2, 4, 3, 3, 3, device=D, dtype=torch.float64))
