"""A tensor that has views can be detached in place after its metadata was changed in place."""

a = torch.arange(1.0, 10, device=D, requires_grad=True)
b = a * 2
v = b.view(3, 3)[:2]
v.mul_(3)
b.unsqueeze_(0)
b.detach_()
b.mul_(2)
c = torch.arange(6.0, device=D).view(2, 3).clone()
w = c[0]
c.t_()
c.detach_()
c.add_(1)
(v.detach() + 1).sum()
