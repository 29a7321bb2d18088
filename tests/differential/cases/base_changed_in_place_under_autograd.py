"""Views of a tensor whose metadata was changed in place are written and differentiated as before."""

a = torch.arange(1.0, 10, device=D, requires_grad=True)
m = torch.arange(9.0, device=D).view(3, 3)
b = (a * 2).view(3, 3).clone()
v = b[0]
w = b.view(-1)
b.t_()
(v * m[1] + v).sum().backward()
w.sum().backward()
b *= m
(v * m[1] + w[3:6] + b).sum().backward()
d = torch.zeros(3, 3, device=D)
y = d[:, :2]
d.t_()
y.copy_(a[:6].view(3, 2))
(d * m).sum().backward()
