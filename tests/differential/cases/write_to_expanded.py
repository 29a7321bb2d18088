"""An op that refuses to write to elements that share memory leaves them as they are."""

a = torch.ones(3, 1, device=D).expand(3, 3)
a.abs_()
a.add_(1)
a.normal_()
a.addmm_(a, a)
torch.add(a, 1, out=a)
a.index_fill_(0, torch.tensor([0], device=D), 1.0)
a.cumsum_(0)
b = a.sum().item()
