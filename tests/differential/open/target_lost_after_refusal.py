"""Still open: if the executor is asked about an op and refuses it, what the op would have written is unusable."""

a = torch.tensor([True, False, True, True], device=D)
b = a.as_strided((2, 2), (1, 1))
torch.arange(5, out=b)
print(a)
