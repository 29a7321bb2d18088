"""A copy that reaches beyond the tensor that it is made of has the elements of the storage, on whichever executor it is made."""

a = torch.arange(6.0, device=D).reshape(2, 3) + 0
z = torch.ones(3, device=D).sum()
s = a.sum().item()
b = a.select(1, 1)
y = torch.ones(2, device=D) * 2
c = torch.as_strided_copy(b, (2, 2), (1, 1))
d = c + 1
