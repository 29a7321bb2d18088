"""Deep copies of tensors that share memory share memory, and are no views."""

import copy

x = torch.ones(3, 4, device=D)
y = x[1:]
c = copy.deepcopy([x, y])
c[1].add_(1)
d = copy.deepcopy([y, x])
d[1].mul_(3)
e = copy.deepcopy(y)
n = nn.Linear(2, 2, device=D)
n2 = copy.deepcopy(n)
f = copy.deepcopy({"a": x[0], "b": x[:, 1]})
