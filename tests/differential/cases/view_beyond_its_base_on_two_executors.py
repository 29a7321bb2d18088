"""A view that reaches beyond the tensor that it is made of has the elements of the storage, on whichever executor it is."""

t1 = torch.randn((2, 3, 1), device=D, requires_grad=True)
t4 = torch.tensor([0.5, -1.25, 3.0, 2.0]).to(D)
t4.eq_(True)
t8 = torch.addcmul(t1, t1, t1, value=0.5)
t9 = t8.float().xlogy(t8)
t10 = in_threads(lambda: t9.add_(1))
t30 = torch.randperm(5, device=D)
t31 = t8.select(1, -1)
t32 = t30.take(torch.tensor([1, 3], device=D))
t33 = t31.as_strided((2, 2), (1, 1))
t35 = torch.tensor(3) + t33
