"""`stack` refuses to write to what it reads."""

a = torch.ones(2, device=D)
torch.stack([a, a], out=a)
b = torch.ones(2, 2, device=D)
torch.stack([b[0], b[1]], out=b)
