"""`as_strided_scatter` counts its offset from the start of the storage, on whichever executor it runs."""

a = torch.arange(6.0, device=D).reshape(2, 3) + 0
z = torch.ones(3, device=D).sum()
s = a.sum().item()
b = a.select(1, 1)
y = torch.ones(2, device=D) * 2
c = torch.as_strided_scatter(b, y, (2,), (1,), 1)
d = torch.as_strided_scatter(b, y, (2,), (3,))
e = torch.as_strided_scatter(b, y, (2,), (1,), 2)
f = torch.as_strided_scatter(b, y, (3,), (1,), 1)
g = torch.as_strided_scatter(b, y, (2,), (1,), 7)
