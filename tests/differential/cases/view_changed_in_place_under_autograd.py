"""A view whose metadata was changed in place is written and differentiated with the metadata that it has."""

a = torch.arange(1.0, 10, device=D, requires_grad=True)
b = (a * 2).view(3, 3).clone()
v = b.view(3, 3)
v.transpose_(0, 1)
v *= torch.arange(1.0, 10, device=D).view(3, 3)
(v * torch.arange(9.0, device=D).view(3, 3)).sum().backward()
c = (a * 2).clone()
w = c.view(-1)
w.unsqueeze_(0)
x = w[..., 1:]
x *= 2
w.squeeze_(0)
(w * c).sum().backward()
d = torch.zeros(3, 3, device=D)
y = d[:, :2]
y.t_()
z = y[0]
z.copy_(a[:3])
(d * d).sum().backward()
e = a.detach().requires_grad_()
with torch.no_grad():
    u = e.view(3, 3)
    u.t_()
    u.mul_(2)
with torch.no_grad():
    t = e.view(3, 3)
t.t_()
t *= 2
f = (a * 2).view(3, 3).clone()
g = f.view(3, 3)
g.retain_grad()
g.t_()
(g * torch.arange(9.0, device=D).view(3, 3)).sum().backward()
h = (a * 2).clone()
i = h.view(3, 3)
with torch.no_grad():
    i.t_()
    i.mul_(2)
(i * torch.arange(9.0, device=D).view(3, 3)).sum().backward()
