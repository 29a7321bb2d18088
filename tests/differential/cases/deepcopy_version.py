"""A deep copy has the version that `set_` gives it."""

a = torch.ones(2, device=D)
b = __import__("copy").deepcopy(a)
d = __import__("copy").deepcopy(nn.Parameter(a))
e = __import__("copy").deepcopy(nn.BatchNorm1d(2, device=D))
