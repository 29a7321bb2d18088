"""A view of more than the storage holds is refused at the op."""

a = torch.ones(2, device=D)
b = a.as_strided((2, 2), (1, 1))
c = a[1:].as_strided((2,), (1,))
d = torch.as_strided_copy(a, (2, 2), (1, 1))
e = a.as_strided((0,), (5,), 77)
