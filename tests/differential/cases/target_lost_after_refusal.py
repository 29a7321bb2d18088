"""If the executor is asked about an op and refuses it, the targets keep their values."""

a = torch.tensor([True, False, True, True], device=D)
b = a.as_strided((2, 2), (1, 1))
torch.arange(5, out=b)
print(a)
c = torch.ones(3, dtype=torch.bool, device=D)
torch.masked_select(torch.ones(4, device=D), torch.ones(4, dtype=torch.bool, device=D), out=c)
torch.nonzero(torch.ones(4, device=D), out=c)
e = torch.ones(2, 2, dtype=torch.int32, device=D).t()
torch.linalg.inv(torch.eye(3, device=D).t(), out=e)
g = torch.empty(0, dtype=torch.long, device=D)
torch.nonzero(torch.ones(2, 2, device=D).t(), out=g)
