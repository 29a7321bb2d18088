"""Mistakes that people make, each with the tensors that it takes: what eager PyTorch says to them, we must say."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _tensors(device):
    """Return the tensors that the mistakes are made with."""
    x = torch.arange(6.0).reshape(2, 3).to(device)
    return x, x.long(), torch.arange(24.0).reshape(2, 3, 2, 2).to(device)


def _leaf(x):
    return x.clone().requires_grad_()


def _in_place_before_backward(x):
    weight = _leaf(x)
    y = weight.exp()
    y.add_(1)
    return y


def _view_of_leaf(x):
    weight = _leaf(x)
    weight[0].zero_()


class _Twice(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.fc = torch.nn.Linear(3, 4, device=device)

    def forward(self, x):
        return self.fc(self.fc(x))


# name -> what is done with a 2x3 float tensor, a 2x3 int64 tensor, and a 2x3x2x2 float tensor
SHAPES = {
    "add": lambda x, i, n: x + x.new_ones(4),
    "complex into out": lambda x, i, n: torch.floor(
        x.to(torch.complex64), out=torch.empty_like(x, dtype=torch.complex64)
    ),
    "mm inner": lambda x, i, n: x @ x,
    "mm rank": lambda x, i, n: torch.mm(x, x[0]),
    "mv": lambda x, i, n: torch.mv(x, x.new_ones(2)),
    "bmm rank": lambda x, i, n: torch.bmm(x, x),
    "bmm batch": lambda x, i, n: torch.bmm(n[0], n[0, :2].transpose(1, 2)),
    "dot": lambda x, i, n: torch.dot(x[0], x.flatten()),
    "addmm": lambda x, i, n: torch.addmm(x, x, x),
    "einsum": lambda x, i, n: torch.einsum("ij,jk->ik", x, x),
    "view size": lambda x, i, n: x.view(4, 2),
    "view stride": lambda x, i, n: x.t().view(-1),
    "view unknown": lambda x, i, n: x.view(-1, -1),
    "reshape": lambda x, i, n: x.reshape(4, 2),
    "expand": lambda x, i, n: x.expand(5, 5),
    "squeeze dim": lambda x, i, n: x.squeeze(4),
    "unsqueeze dim": lambda x, i, n: x.unsqueeze(5),
    "transpose dim": lambda x, i, n: x.transpose(0, 3),
    "permute": lambda x, i, n: x.permute(0, 0),
    "t of 4 dims": lambda x, i, n: n.t(),
    "cat sizes": lambda x, i, n: torch.cat([x, x.new_ones(2, 2)]),
    "cat nothing": lambda x, i, n: torch.cat([]),
    "stack": lambda x, i, n: torch.stack([x, x[:, :2]]),
    "split": lambda x, i, n: x.split([1, 2, 3], dim=1),
    "chunk": lambda x, i, n: x.chunk(0),
    "unflatten": lambda x, i, n: x.unflatten(1, (2, 2)),
    "narrow": lambda x, i, n: x.narrow(1, 2, 5),
    "select": lambda x, i, n: x.select(0, 9),
    "subscript": lambda x, i, n: x[5],
    "subscripts": lambda x, i, n: x[0, 0, 0],
    "mask": lambda x, i, n: x[torch.ones(3, dtype=torch.bool, device=x.device)],
    "index rank": lambda x, i, n: x.index_select(0, i),
    "gather rank": lambda x, i, n: x.gather(0, i[0]),
    "scatter dtype": lambda x, i, n: x.scatter(0, x, 1.0),
    "sum dim": lambda x, i, n: x.sum(3),
    "softmax dim": lambda x, i, n: F.softmax(x, dim=2),
    "max dim": lambda x, i, n: x.max(dim=7),
    "max of nothing": lambda x, i, n: x[:0].max(),
    "topk": lambda x, i, n: x.topk(9),
    "linear": lambda x, i, n: F.linear(x, x.new_ones(4, 4)),
    "conv channels": lambda x, i, n: F.conv2d(n, n.new_ones(4, 5, 1, 1)),
    "conv rank": lambda x, i, n: F.conv2d(x, x),
    "conv kernel": lambda x, i, n: F.conv2d(n, n.new_ones(4, 3, 5, 5)),
    "pool": lambda x, i, n: F.max_pool2d(n, 5),
    "layer norm": lambda x, i, n: F.layer_norm(x, (4,)),
    "group norm": lambda x, i, n: F.group_norm(n, 2),
    "batch norm": lambda x, i, n: F.batch_norm(x, x.new_ones(4), x.new_ones(4)),
    "pad": lambda x, i, n: F.pad(x, (1, 1, 1)),
    "cross entropy": lambda x, i, n: F.cross_entropy(x, i[0]),
    "mse": lambda x, i, n: F.mse_loss(x, x.new_ones(5)),
    "attention": lambda x, i, n: F.scaled_dot_product_attention(n, n, n[..., :1, :1].expand(2, 3, 3, 1)),
    "module": lambda x, i, n: torch.nn.Linear(4, 4, device=x.device)(x),
    "inside a module": lambda x, i, n: _Twice(x.device)(x),
    "lstm": lambda x, i, n: torch.nn.LSTM(4, 4, device=x.device)(x),
    "load_state_dict": lambda x, i, n: torch.nn.Linear(3, 3, device=x.device).load_state_dict({"weight": x}),
    "linalg": lambda x, i, n: torch.linalg.inv(x),
    "cholesky of ints": lambda x, i, n: torch.linalg.cholesky(i[:, :2]),
    "negative size": lambda x, i, n: torch.zeros(-1, device=x.device),
    "arange": lambda x, i, n: torch.arange(0, 5, -1, device=x.device),
    "copy": lambda x, i, n: x.copy_(x.new_ones(5)),
    "as_strided": lambda x, i, n: x.as_strided((2, 2), (-1, 1)),
}
DTYPES = {
    "mean of ints": lambda x, i, n: i.mean(),
    "ints in mm": lambda x, i, n: x @ i.t(),
    "half and float": lambda x, i, n: F.linear(x, x.half()),
    "float index": lambda x, i, n: x[x],
    "float embedding": lambda x, i, n: F.embedding(x, x),
    "float target": lambda x, i, n: F.nll_loss(x, x[:, 0]),
    "int target": lambda x, i, n: F.binary_cross_entropy(x.sigmoid(), i),
    "cast in place": lambda x, i, n: i.add_(1.5),
    "divide in place": lambda x, i, n: i.div_(2),
    "bool in place": lambda x, i, n: (x > 1).mul_(2),
    "bitwise": lambda x, i, n: x & 1,
    "invert": lambda x, i, n: ~x,
    "minus of bools": lambda x, i, n: (x > 1) - (x > 2),
    "negative bool": lambda x, i, n: -(x > 1),
    "softmax of ints": lambda x, i, n: F.softmax(i, dim=0),
    "normal of ints": lambda x, i, n: torch.randn(2, dtype=torch.int64, device=x.device),
    "where": lambda x, i, n: torch.where(x, x, x),
    "masked_fill": lambda x, i, n: x.masked_fill(x, 0.0),
    "gradient of ints": lambda x, i, n: i.requires_grad_(),
    "out": lambda x, i, n: torch.add(x, x, out=i),
}
ARGUMENTS = {
    "no tensor": lambda x, i, n: torch.mm(x, 3),
    "a list": lambda x, i, n: torch.add(x, [1, 2, 3]),
    "text": lambda x, i, n: x + "1",
    "none": lambda x, i, n: x * None,
    "no such argument": lambda x, i, n: x.sum(axes=1),
    "text as dim": lambda x, i, n: x.sum("a"),
    "text as size": lambda x, i, n: torch.zeros("a", device=x.device),
    "dtype": lambda x, i, n: x.to("float"),
    "no such method": lambda x, i, n: x.frobnicate(),
    "truth": lambda x, i, n: bool(x),
    "number": lambda x, i, n: float(x),
    "item": lambda x, i, n: x.item(),
    "index": lambda x, i, n: [1, 2, 3][x[0, 0]],
    "iterate 0 dims": lambda x, i, n: list(x[0, 0]),
    "len of 0 dims": lambda x, i, n: len(x[0, 0]),
    "text as subscript": lambda x, i, n: x["a"],
    "reduction": lambda x, i, n: F.mse_loss(x, x, reduction="avg"),
    "dropout": lambda x, i, n: F.dropout(x, 1.5),
    "zero step": lambda x, i, n: x[::0],
    "negative step": lambda x, i, n: x[::-1],
}
AUTOGRAD = {
    "not a scalar": lambda x, i, n: (_leaf(x) * 2).backward(),
    "no gradient": lambda x, i, n: x.sum().backward(),
    "twice": lambda x, i, n: [loss.backward() for loss in [_leaf(x).exp().sum()] * 2],
    "leaf in place": lambda x, i, n: _leaf(x).add_(1),
    "view of leaf": lambda x, i, n: _view_of_leaf(x),
    "changed": lambda x, i, n: _in_place_before_backward(x).sum().backward(),
    "gradient shape": lambda x, i, n: (_leaf(x) * 2).backward(x.new_ones(4)),
    "unused": lambda x, i, n: torch.autograd.grad(_leaf(x).sum(), _leaf(x)),
    "assigned gradient": lambda x, i, n: setattr(_leaf(x), "grad", x.new_ones(4)),
    "assigned dtype": lambda x, i, n: setattr(_leaf(x), "grad", i),
    "numpy": lambda x, i, n: _leaf(x).cpu().numpy(),
    "deepcopy": lambda x, i, n: __import__("copy").deepcopy(_leaf(x) * 2),
    "inference": lambda x, i, n: _inference(x).requires_grad_(),
    "no optimizer parameters": lambda x, i, n: torch.optim.SGD([], lr=0.1),
    "not a leaf": lambda x, i, n: torch.optim.SGD([_leaf(x) * 2], lr=0.1),
    "double backward": lambda x, i, n: torch.autograd.grad(torch.autograd.grad(_leaf(x).exp().sum(), [x]), [x]),
    "jacobian": lambda x, i, n: torch.func.grad(lambda a: a * 2)(x),
}


@torch.inference_mode()
def _inference(x):
    return x * 2


MISTAKES = {
    f"{kind}: {name}": mistake
    for kind, table in {"shape": SHAPES, "dtype": DTYPES, "argument": ARGUMENTS, "autograd": AUTOGRAD}.items()
    for name, mistake in table.items()
}


def make(name, device):
    """Make the mistake on `device`. Return the exception, or None if none was raised."""
    tensors = _tensors(device)
    try:
        MISTAKES[name](*tensors)
    except Exception as error:
        return error
    return None
