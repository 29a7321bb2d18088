"""Random numbers lie row by row, however their parameters lie."""

a = torch.rand(4, 3, device=D).t()
b = torch.poisson(a)
c = torch._standard_gamma(a + 1)
d = torch.normal(a, a + 1)
e = torch.normal(1.0, a + 1)
