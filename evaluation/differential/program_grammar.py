"""Grammar of random programs: statement templates, filled with the tensors that the program holds."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import torch

from evaluation.differential.program_runs import Facts, Runner

HOLE = re.compile(r"\{([a-z]+)(\d*)(?::([a-z]+\d*))?\}")
LARGEST = 400  # maximum elements of a kept tensor
HELD = 10  # maximum number of kept tensors
WILD = 0.03  # share of holes filled arbitrarily, so that some ops are rejected

MAKE = """
{n} = torch.arange({size}, device=D)
{n} = torch.arange(12.0, device=D).view(3, 4)
{n} = torch.randn({shape}, device=D)
{n} = torch.randn({shape}, device=D, dtype=torch.float64)
{n} = torch.randn({shape}, device=D, requires_grad=True)
{n} = torch.randn({shape}, device=D).requires_grad_()
{n} = torch.randint(-4, 9, {shape}, device=D)
{n} = torch.tensor([0.5, -1.25, 3.0, 2.0]).to(D)
{n} = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype={dtype}).to(D)
{n} = torch.ones({shape}, dtype={dtype}, device=D)
{n} = torch.full({shape}, {s}, device=D)
{n} = torch.eye(3, 4, device=D)
{n} = torch.linspace(-1, 1, 5, device=D)
{n} = torch.zeros_like({t})
{n} = torch.rand_like({f})
{n} = {t}.new_ones({shape})
{n} = {t}.new_full({shape}, {i})
{n} = torch.tensor({s}, device=D)
{n} = torch.tensor([True, False, True], device=D)
{n} = torch.randn(2, 3, 4, 4, device=D).to(memory_format=torch.channels_last)
{n} = torch.complex({f}.float(), {f}.float())
{n} = nn.Parameter(torch.randn({shape}, device=D))
{n} = torch.ones({shape}).to(D, {dtype})
{n} = torch.empty_strided((3, 2), (1, 3), device=D).fill_({s})
{n} = torch.randperm(5, device=D)
{n} = torch.bernoulli(torch.full({shape}, 0.5, device=D))
"""

VIEW = """
{n} = {t}.narrow({d:t}, 0, 1)
{n} = {t}[..., ::2]
{n} = {t}[1:]
{n} = {t}[..., :-1]
{n} = {t}[0]
{n} = {t}[None]
{n} = {t}.select({d:t}, -1)
{n} = {t}.transpose({d:t}, {d2:t})
{n} = {t}.mT
{n} = {t}.t()
{n} = {t}.reshape(-1)
{n} = {t}.view(-1)
{n} = {t}.view({t}.shape)
{n} = {t}.flatten()
{n} = {t}.unsqueeze({d:t})
{n} = {t}.squeeze()
{n} = {t}.expand(2, *{t}.shape)
{n} = {t}.movedim({d:t}, {d2:t})
{n} = {t}.diagonal()
{n} = {t}.unfold({d:t}, 2, 1)
{n}, *{n2} = {t}.chunk(2)
{n}, *{n2} = {t}.unbind()
{n}, {n2} = {t}.split([1, {t}.shape[0] - 1])
{n} = {t}.as_strided((2, 2), (1, 1))
{n} = {t}.view(torch.int32)
{n} = {t}.view(torch.uint8)
{n} = {t}.detach()
{n} = {t}.data
{n} = {t}.alias() if hasattr({t}, "alias") else {t}.view_as({t})
{n} = {t}.real
{n} = {t}.conj()
{n} = {t}.imag
{n} = torch.view_as_real({c})
{n} = {t}.to(D)
{n} = {t}.contiguous()
{n} = {t}.swapaxes(0, -1)
{n} = {t}.permute(*reversed(range({t}.dim())))
{n} = {t}.expand_as({t2})
{n} = {t}.broadcast_to(2, *{t}.shape)
{n} = {t}.ravel()
{n} = {t}.unflatten(0, (-1, 1))
{n} = torch.atleast_2d({t})
{n} = {t}.view_as({t})
"""

POINTWISE = """
{n} = {t} + {b:t}
{n} = {t} - {s}
{n} = {t} * {b:t}
{n} = {f} / {b:f}
{n} = {t} // 2
{n} = {t} % 3
{n} = {s} - {t}
{n} = {f} ** 2
{n} = torch.maximum({t}, {b:t})
{n} = torch.where({mask:t}, {t}, {s})
{n} = torch.where({mask:t}, {t}, {b:t})
{n} = {f}.exp()
{n} = {f}.tanh()
{n} = {f}.sigmoid()
{n} = {f}.clamp(-1, 1)
{n} = {t}.clamp(min=0)
{n} = {t}.abs()
{n} = -{t}
{n} = {f}.relu()
{n} = F.gelu({f})
{n} = F.silu({f})
{n} = F.leaky_relu({f}, 0.1)
{n} = {t}.eq({b:t})
{n} = {t} > {b:t}
{n} = {t}.isnan()
{n} = {t}.sign()
{n} = {t}.square()
{n} = {f}.abs().sqrt()
{n} = {f}.sin().cos()
{n} = {f}.round()
{n} = torch.lerp({f}, {f}.detach() * 2, 0.25)
{n} = torch.addcmul({f}, {f}, {f}, value=0.5)
{n} = ~{mask:t}
{n} = {mask:t} & {mask:t}
{n} = torch.logical_or({t}, {t})
{n} = F.dropout({f}, 0.5)
{n} = torch.add({t}, {b:t}, alpha=2)
{n} = {t} * torch.tensor(2.5)
{n} = torch.tensor(3) + {t}
{n} = torch.maximum({t}, torch.tensor(1.5, dtype=torch.float64))
{n} = torch.heaviside({f}, {f})
{n} = torch.atan2({f}, {b:f})
{n} = {f}.masked_fill({mask:f}, {s})
{n} = {f}.nan_to_num()
{n} = torch.hypot({f}, {f})
{n} = {c} * {c}
{n} = {c}.abs()
{n} = {f}.softmax({d:f})
{n} = {f}.log_softmax({d:f})
{n} = {f}.frexp()
{n} = {f}.logit(0.1)
{n} = torch.isin({t}, {t2})
{n} = {t}.float().xlogy({f})
"""

REDUCE = """
{n} = {t}.sum()
{n} = {t}.sum({d:t}, keepdim=True)
{n} = {f}.mean({d:f})
{n} = {f}.mean()
{n} = {t}.prod()
{n} = {t}.amax({d:t})
{n}, {n2} = {f}.max({d:f})
{n}, {n2} = {f}.sort({d:f}, stable=True)
{n}, {n2} = {f}.topk(1, {d:f})
{n} = {t}.argmax()
{n} = {f}.argsort(stable=True)
{n} = {t}.cumsum({d:t})
{n} = {f}.cumprod({d:f})
{n} = {t}.any()
{n} = {t}.all({d:t})
{n} = {f}.std({d:f}, correction=0)
{n} = torch.var_mean({f}, correction=0)
{n} = {f}.norm()
{n} = {f}.norm(dim={d:f})
{n} = torch.linalg.vector_norm({f}, 1)
{n} = {f}.logsumexp({d:f})
{n} = {t}.count_nonzero()
{n} = {f}.median({d:f})
{n} = torch.aminmax({f})
{n} = {t}.unique()
{n} = {t}.unique(return_inverse=True, return_counts=True)
{n} = {t}.flip({d:t})
{n} = {t}.roll(1, {d:t})
{n} = {f}.diff()
{n} = {k}.bincount(minlength=4)
{n} = {f}.quantile(0.5)
{n} = {f}.cummax({d:f})
{n} = {t}.tile(2)
{n} = {t}.repeat_interleave(2)
{n} = {m}.tril()
{n} = {f}.histc(4)
{n} = {f}.mode({d:f})
{n} = {f}.kthvalue(1)
{n} = {f}.renorm(2, 0, 1.0)
{n} = torch.trapezoid({f})
"""

COMBINE = """
{n} = torch.cat([{t}, {t} * 2])
{n} = torch.cat([{t}, {t2}], -1)
{n} = torch.stack([{t}, {t}], {d:t})
{n} = {m} @ {m}.mT
{n} = {m}.mT @ {m}
{n} = {m}.mv({m}.sum(0))
{n} = torch.addmm({m} @ {m}.t(), {m}, {m}.t(), beta=0.5)
{n} = torch.einsum("ij,kj->ik", {m}, {m})
{n} = F.linear({f}, {f}.reshape(1, -1)[:, : {f}.shape[-1]])
{n} = F.layer_norm({f}, {f}.shape[-1:])
{n} = F.conv2d({p}, {p}[:1])
{n} = F.max_pool2d({p}, 2)
{n} = F.avg_pool2d({p}, 2)
{n} = F.interpolate({p}, scale_factor=2)
{n} = F.pad({f}, (1, 1))
{n} = F.mse_loss({f}, {f}.detach() * 0.5)
{n} = F.cross_entropy({m}, {m}.detach().argmax(1))
{n} = F.one_hot({k}.abs() % 5, 5)
{n} = F.embedding({k}.abs() % {m}.shape[0], {m})
{n} = F.batch_norm({m}, None, None, training=True)
{n} = F.scaled_dot_product_attention({m}[None], {m}[None], {m}[None])
{n} = torch.outer({f}.reshape(-1)[:4], {f2}.reshape(-1)[:3])
{n} = torch.bmm({m}[None], {m}.mT[None])
{n} = torch.tril_indices(3, 3, device=D)
{n} = torch.meshgrid({f}.reshape(-1)[:3], {f}.reshape(-1)[:2], indexing="ij")
{n} = torch.broadcast_tensors({t}, {t}[..., :1])
{n} = torch.cdist({m}, {m})
{n} = F.group_norm({p}, 1)
{n} = F.normalize({f}, dim={d:f})
{n} = torch.kron({m}[:1], {m}[:2, :2])
{n} = torch.block_diag({m}, {m})
{n} = torch.bucketize({f}, torch.tensor([-1.0, 0.0, 1.0], device=D))
{n} = torch.searchsorted(torch.arange(4.0, device=D), {f}.float())
{n} = torch.combinations({f}.reshape(-1)[:4])
{n} = torch.cartesian_prod({f}.reshape(-1)[:2], {f}.reshape(-1)[:3])
{n} = torch.linalg.solve_ex({m} @ {m}.mT + torch.eye({m}.shape[0], device=D, dtype={m}.dtype), {m})
"""

CAST = """
{n} = {t}.to({dtype})
{n} = {t}.to({t2}.dtype)
{n} = {t}.type_as({t2})
{n} = {t}.double()
{n} = {t}.half()
{n} = {t}.bool()
{n} = {t}.long()
{n} = {t}.bfloat16().float()
{n} = {t}.clone()
{n} = {t}.to({dtype}, copy=True)
{n} = {t}.clone(memory_format=torch.contiguous_format)
{n} = {p}.contiguous(memory_format=torch.channels_last)
{n} = {t}.detach().cpu().clone().to(D)
{n} = torch.promote_types({t}.dtype, {t2}.dtype)
{n} = torch.result_type({t}, {s})
{n} = {t}.new_tensor([1, 2])
{n} = torch.empty_like({t}).copy_({t})
{n} = __import__("copy").deepcopy({t}.detach())
"""

INDEX = """
{n} = {t}[{mask:t}]
{n} = {t}[{index:t}]
{n} = {t}[..., {lastindex:t}]
{n} = {t}[{index:t}, None]
{n} = {t}[:, {lastindex:t}]
{n} = {t}.index_select(0, {index:t})
{n} = {t}.take({index:t})
{n} = {t}.gather(0, torch.zeros_like({t}, dtype=torch.long))
{n} = {t}.nonzero()
{n} = {t}.masked_select({mask:t})
{n} = torch.take_along_dim({f}, {f}.detach().argsort({d:f}, stable=True), {d:f})
{n} = {t}.scatter(0, torch.zeros_like({t}, dtype=torch.long), {s})
{n} = {t}.index_fill(0, {index:t}, {i})
{n} = {t}.index_add(0, {index:t}, {t}[{index:t}])
{n} = torch.nonzero({t}, as_tuple=True)
{n} = {t}.argwhere()
{n} = {f}.index_reduce(0, {index:f}, {f}[{index:f}], "amax")
{n} = {f}.scatter_reduce(0, torch.zeros_like({f}, dtype=torch.long), {f}, "sum")
{n} = {t}.select_scatter({t}[0] * 2, 0, 0)
{n} = {t}.slice_scatter({t}[:1] * 2, 0, 0, 1)
{n} = {t}.masked_scatter({mask:t}, {t})
"""

WRITE = """
{w}.add_({s})
{w}.add_({b:w})
{w}.mul_({s})
{w}.mul_({b:w})
{w}.sub_({b:w}, alpha=2)
{wf}.div_(2)
{w}.zero_()
{w}.fill_({i})
{w}.copy_({b:w})
{w}.neg_()
{wf}.relu_()
{wf}.exp_()
{wf}.clamp_(-1, 1)
{wf}.tanh_()
{w}[..., :1] = {i}
{w}[0] = {i}
{w}[{mask:w}] = {i}
{w}[{index:w}] = {i}
{w}[{index:w}] += 1
{w}[..., 1:] *= 2
{w}[{mask:w}] *= 2
{w} += {b:w}
{w} *= {s}
{w}.masked_fill_({mask:w}, {i})
{w}.index_fill_(0, {index:w}, {i})
{w}.index_copy_(0, {index:w}, {w}.detach()[{index:w}].clone())
{w}.index_add_(0, {index:w}, {w}.detach()[{index:w}].clone())
{w}.scatter_(0, torch.zeros_like({w}, dtype=torch.long), {i})
{w}.index_put_(({index:w},), torch.tensor({i}, device=D).to({w}.dtype), accumulate=True)
{w}.transpose_({d:w}, {d2:w})
{w}.squeeze_()
{w}.unsqueeze_(0)
{w}.t_()
{wf}.normal_()
{wf}.uniform_()
{w}.random_(0, 5)
{wf}.lerp_({wf}.detach() * 2, 0.5)
{wf}.addcmul_({wf}.detach(), {wf}.detach())
{w}.copy_(torch.full({w}.shape, {i}))
{wf}.data = {wf}.detach().clone() * 2
{w}.data.mul_(2)
{w}.detach().add_(1)
{w}.detach_()
{w}.masked_scatter_({mask:w}, {w}.detach().clone())
{w}.cumsum_({d:w})
{w}.put_({index:w}, {w}.detach().flatten()[{index:w}])
{wf}.clamp_min_(0).sub_(1).mul_(0.5)
{w}.eq_({s})
{w}.triu_()
{wf}.bernoulli_(0.5)
{w}.swapaxes_(0, -1)
{w}.set_({w}.detach().clone())
F.relu({wf}, inplace=True)
F.dropout({wf}, 0.5, inplace=True)
{wf}.renorm_(2, 0, 1.0)
{w}.logical_not_()
{w}.floor_divide_(2)
{w}.remainder_(3)
{w}.fmod_(2)
{wf}.addmm_({wf}.detach(), {wf}.detach())
{w}.fill_diagonal_({i})
{w}.resize_(2, 2).fill_({i})
{w}[0], {w}[-1] = {w}[-1].clone(), {w}[0].clone()
{w}[..., :1].mul_({b:w})
{w}.mul_(torch.tensor(2))
{w}[...] = torch.tensor(True)
"""

OUT = """
{n} = torch.add({t}, 1, out=torch.empty_like({t}))
{n} = torch.mul({t}, 3, out=torch.empty(0, dtype={t}.dtype, device=D))
torch.neg({w}, out={w})
torch.add({t}, {b:t}, out={w})
torch.exp({f}, out={wf})
torch.mul({t}, 2, out={w})
torch.cat([{t}, {t}], out={w})
{n} = torch.sum({t}, {d:t}, out={w})
{n} = torch.max({f}, 0, out=(torch.empty(0, dtype={f}.dtype, device=D), torch.empty(0, dtype=torch.long, device=D)))
{n} = torch.mm({m}, {m}.mT, out=torch.empty(0, dtype={m}.dtype, device=D))
{n} = torch.zeros(*{f}.shape, 2, dtype={f}.dtype, device=D); torch.sin({f}.detach(), out={n}[..., 1])
{n} = torch.ones({t}.mT.shape, dtype={t}.dtype, device=D).mT; torch.add({t}, {t}, out={n})
torch.index_select({t}, 0, {index:t}, out={w})
torch.gt({t}, 0, out={w})
torch.clamp({t}, 0, 1, out={w})
torch.sort({f}, stable=True, out=(torch.empty_like({f}), torch.empty({f}.shape, dtype=torch.long, device=D)))
torch.arange(5, out={w})
torch.stack([{t}, {t}], out={w})
torch.cumsum({t}, 0, out={w})
torch.where({mask:t}, {t}, {t}, out={w})
torch.softmax({f}, -1, out={w})
{n} = torch.mul({t}, 2, out=torch.zeros({t}.shape, dtype={dtype}, device=D))
"""

FOREACH = """
torch._foreach_add_([{wf}, {wf2}], 1.0)
torch._foreach_mul_([{wf}], {s})
{n} = torch._foreach_add([{f}, {f2}], 2.0)
{n} = torch._foreach_mul([{f}, {f2}], [2.0, 3.0])
{n} = torch._foreach_norm([{f}, {f2}])
torch._foreach_addcmul_([{wf}], [{wf}.detach()], [{wf}.detach()], value=0.5)
torch._foreach_copy_([{wf}], [{wf}.detach() * 3])
{n} = torch._foreach_sqrt([{f}.abs()])
torch._foreach_zero_([{wf}])
torch._foreach_lerp_([{wf}], [{wf}.detach() + 1], 0.5)
torch._foreach_clamp_min_([{wf}], 0.0)
{n} = torch._foreach_maximum([{f}, {f2}], 0.0)
torch._foreach_neg_([{wf}, {wf2}])
torch._foreach_div_([{wf}], [{wf}.detach().abs() + 1])
{n} = torch._foreach_pow([{f}], 2)
"""

AUTOGRAD = """
({g} * 2).sum().backward()
{g}.square().sum().backward(retain_graph=True)
{g}.sum().backward()
{g}.backward(torch.ones_like({g}))
{n} = torch.autograd.grad(({leaf} * {leaf}).sum(), {leaf})
{n}, = torch.autograd.grad(({leaf} ** 3).sum(), {leaf}, create_graph=True)
torch.autograd.grad(({leaf} ** 3).sum(), {leaf}, create_graph=True)[0].sum().backward()
{n}, = torch.autograd.grad({g}.sum(), {leaf}, allow_unused=True)
{n}, = torch.autograd.grad({g}.sum(), {leaf}, retain_graph=True)
{leaf}.grad = None
{n} = {leaf}.grad
{leaf}.grad.zero_()
{n} = {f}.detach().requires_grad_()
{n} = {f}.detach().clone().requires_grad_()
{g}.retain_grad()
{g}.detach_()
{g}.requires_grad_(False)
with torch.no_grad(): {leaf}.mul_(0.5)
with torch.no_grad(): {leaf}.sub_({leaf}.detach() * 0.1)
with torch.no_grad(): {n} = {g} * 2
with torch.inference_mode(): {n} = ({f} * 2).sum().item()
{g}.register_hook(lambda gradient: gradient * 2)
{n} = torch.utils.checkpoint.checkpoint(lambda x: (x * 2).tanh(), {g}, use_reentrant=False)
{n} = torch.func.grad(lambda x: (x ** 2).sum())({f}.detach())
{n} = torch.func.vmap(lambda x: x * 2)({f}.detach())
{n} = torch.func.jvp(torch.sin, ({f}.detach(),), ({f}.detach(),))
{n} = {g}.grad_fn.next_functions[0][0].name()
torch.autograd.backward([{g}.sum(), {leaf}.sum()])
{n} = {leaf} * {leaf}; {n}.add_(1); {n}.sum().backward()
{n} = {leaf}.exp(); {n}.mul_(2)
{n} = {leaf}.clone(); {n}[0].mul_(3); {n}.sum().backward()
{n} = {leaf}.clone(); {n2} = {n}.view(-1)[:2]; {n2}.mul_(3); {n}.square().sum().backward()
nn.utils.clip_grad_norm_([{leaf}], 0.5)
{n} = torch.autograd.functional.hessian(lambda x: (x ** 3).sum(), {f}.detach().flatten()[:3])
"""

OPTIMIZE = """
{o} = torch.optim.SGD([{leaf}], lr=0.1)
{o} = torch.optim.SGD([{leaf}, {leaf2}], lr=0.1, momentum=0.9, nesterov=True)
{o} = torch.optim.Adam([{leaf}], lr=0.01, foreach=False)
{o} = torch.optim.AdamW([{leaf}], lr=0.01)
{o} = torch.optim.RMSprop([{leaf}], lr=0.01)
{o} = torch.optim.Adagrad([{leaf}], lr=0.01)
{leaf}.square().sum().backward(); {opt}.step()
{leaf}.sum().backward(); {opt}.step(); {opt}.zero_grad()
{opt}.zero_grad(set_to_none=False)
{opt}.step()
{n} = nn.Linear(4, 2, device=D); {n}(torch.ones(3, 4, device=D)).sum().backward()
{n} = nn.BatchNorm1d(3, device=D); {n}(torch.randn(4, 3, device=D)).square().sum().backward()
{n} = nn.Sequential(nn.Linear(3, 4, device=D), nn.ReLU(), nn.Linear(4, 1, device=D))(torch.ones(2, 3, device=D))
{n} = nn.MultiheadAttention(4, 2, batch_first=True, device=D).eval()(*[torch.ones(1, 3, 4, device=D)] * 3)
{n} = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, device=D)(torch.randn(2, 3, 4, device=D))
"""

READ = """
{n} = {t}.sum().item()
{n} = {t}.tolist()
print({t})
{h} = {t}.detach().cpu().clone()
{n} = bool({t}.any())
{n} = {t}.reshape(-1)[:1].tolist()
print([{t}, {t2}])
print({t}.shape, {t}.dtype, {t}.is_contiguous(), {t}.numel())
{n} = str({f}.mean())
{n} = f"{{{f}.sum():.3f}}"
{n} = torch.equal({t}, {t2})
{n} = torch.allclose({f}, {f})
{n} = int({k}.sum())
{n} = len({t})
{n} = float({f}.norm())
{n} = {t}.detach().cpu().clone().numpy().tolist()
{n} = [x.item() for x in {t}.flatten()[:3]]
{n} = 1 if {t}.sum() > 0 else 2
{n} = torch.is_nonzero({t}.sum())
{n} = {t}.untyped_storage().nbytes()
{n} = {t}.is_set_to({t2})
{n} = {t}.data_ptr() == {t2}.data_ptr()
{n} = {t} in [{t}]
{n} = hash({t}) == hash({t2})
{h} = {t}.detach().to("cpu", non_blocking=True).sum()
"""

THREADS = """
{n} = in_threads(lambda: {f} * 2 + 1, lambda: {t}.clone().add_(1))
{n} = in_threads(lambda: {w}.add_(1))
{n} = in_threads(lambda: {t}.sum().item(), lambda: {f}.exp().sum().item())
in_threads(lambda: ({g} * 3).sum().backward())
{n} = in_threads(lambda: {m} @ {m}.mT, lambda: {m} @ {m}.mT, lambda: {m}.sum())
"""

RANDOM = """
torch.manual_seed({i})
{n} = torch.initial_seed()
torch.rand(3, device=D)
{n} = torch.multinomial({f}.detach().float().abs().flatten() + 1, 2)
{n} = torch.normal({f}.detach(), 1.0)
{n} = torch.poisson({f}.detach().abs())
"""

# relative frequency of each kind of statement
KINDS = {
    "MAKE": 3, "VIEW": 5, "POINTWISE": 5, "REDUCE": 3, "COMBINE": 2, "CAST": 2, "INDEX": 3, "WRITE": 7, "OUT": 2,
    "FOREACH": 1, "AUTOGRAD": 5, "OPTIMIZE": 1, "READ": 2, "THREADS": 1, "RANDOM": 1,
}  # fmt: skip
TEMPLATES = {kind: globals()[kind].strip().splitlines() for kind in KINDS}


class Generator:
    """Generator of a program, which runs on the CPU meanwhile. The tensors that it holds decide the next statement."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.runner = Runner("cpu")
        self.count = 0
        self.taken: set[str] = set()  # names in other holes of the same kind

    def program(self) -> tuple[list[str], list[Facts]]:
        """Return the statements, and the facts on the CPU after each and at the end."""
        statements: list[str] = []
        facts: list[Facts] = []
        kinds, weights = list(KINDS), list(KINDS.values())

        def add(statement: str) -> None:
            statements.append(statement)
            facts.append(self.runner.step(statement))

        torch.manual_seed(0)
        with self.runner.listening():
            for _ in range(4):
                add(self._filled(self.rng.choice(TEMPLATES["MAKE"][:9])))
            for _ in range(self.rng.randint(55, 75)):
                add(self._filled(self.rng.choice(TEMPLATES[self.rng.choices(kinds, weights)[0]])))
                if deletion := self._dropped():
                    add("del " + ", ".join(deletion))
            facts.append(self.runner.finish())
        return statements, facts

    def _dropped(self) -> list[str]:
        names = self.runner.names
        large = [n for n, t in names.items() if isinstance(t, torch.Tensor) and t.numel() > LARGEST]
        references = [n for n in names if re.fullmatch(r"[a-z]\d+", n)]
        many = self.rng.sample(references, len(references) - HELD) if len(references) > HELD + 3 else []
        return sorted({*large, *many})

    def _filled(self, template: str) -> str:
        picked: dict[str, str] = {}

        def fill(match: re.Match[str]) -> str:
            if match[0] not in picked:
                kind, number, of = match.groups()
                arguments = (picked[f"{{{of}}}"],) if of else ()
                self.taken = {picked.get(f"{{{kind}}}", "")} if number else set()
                picked[match[0]] = HOLES[kind](self, *arguments)
            return picked[match[0]]

        # {{ and }} are literal braces
        text = template.replace("{{", "\0").replace("}}", "\1")
        # holes with references are filled first
        for match in HOLE.finditer(text):
            if match[3] and f"{{{match[3]}}}" not in picked:
                fill(HOLE.fullmatch(f"{{{match[3]}}}"))  # type: ignore[arg-type]
        return HOLE.sub(fill, text).replace("\0", "{").replace("\1", "}")

    # --- values for holes ---------------------------------------------------------------------------------------------

    def named(self, name: str) -> torch.Tensor:
        return self.runner.names[name]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(n, t) for n, t in self.runner.names.items() if n[0] == "t" and _is_usable(t)]

    def pick(self, fits: Callable[[torch.Tensor], bool], otherwise: str) -> str:
        """Return the name of a tensor that fits or, rarely, of any tensor. If there is none, return `otherwise`."""
        wild = self.rng.random() < WILD
        names = [n for n, t in self.tensors() if n not in self.taken and (wild or fits(t))]
        if names:
            # prefer newer ones
            return names[min(int(self.rng.triangular(0, len(names), len(names))), len(names) - 1)]
        return otherwise

    def new(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def host(self) -> str:
        """Return a new name for a tensor on the CPU."""
        self.count += 1
        return f"h{self.count}"

    def optimizer(self) -> str:
        self.count += 1
        return f"o{self.count}"

    def known_optimizer(self) -> str:
        optimizers = [n for n, o in self.runner.names.items() if isinstance(o, torch.optim.Optimizer)]
        return self.rng.choice(optimizers) if optimizers else "torch.optim.SGD([torch.ones(2, device=D)])"

    def shape(self) -> str:
        return str(tuple(self.rng.choice((1, 2, 3, 3, 4)) for _ in range(self.rng.choice((0, 1, 2, 2, 2, 3)))))

    def dim(self, name: str) -> str:
        dims = self.named(name).dim() if name in self.runner.names else 2
        return str(self.rng.randrange(-dims, dims) if dims else 0)

    def broadcastable(self, name: str) -> str:
        if name not in self.runner.names or self.rng.random() < 0.25:
            return self.scalar()
        shape = self.named(name).shape
        return self.pick(lambda t: _broadcasts(t.shape, shape), self.scalar())

    def scalar(self) -> str:
        return self.rng.choice(("2", "0.5", "-1", "3", "1.5", "0", "True", "-0.0"))

    def mask(self, name: str) -> str:
        if name not in self.runner.names:
            return f"{name}.bool()"
        tensor = self.named(name)
        if tensor.dtype == torch.bool:
            return self.rng.choice((f"~{name}", f"{name}.clone()", name))
        text = f"({name}.abs() > 1)" if tensor.is_complex() else self.rng.choice((f"({name} > 0)", f"({name} != 1)"))
        fitting = [n for n, t in self.tensors() if t.dtype == torch.bool and t.shape == tensor.shape]
        return self.rng.choice(fitting) if fitting and self.rng.random() < 0.3 else text

    def index(self, name: str, dim: int = 0) -> str:
        size = self.named(name).shape[dim] if name in self.runner.names and self.named(name).dim() else 1
        size = max(size, 1)
        places = [self.rng.randrange(size) for _ in range(self.rng.choice((1, 2, 2)))]
        places = sorted(set(places))  # duplicate indices have no defined order
        if self.rng.random() < 0.3:
            fitting = [
                n
                for n, t in self.tensors()
                if t.dtype == torch.int64
                and t.dim() == 1
                and t.numel()
                and int(t.min()) >= 0
                and int(t.max()) < size
                and len(t.unique()) == len(t)
            ]
            if fitting:
                return self.rng.choice(fitting)
        return f"torch.tensor({places}, device=D)"


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, to) == to
    except RuntimeError:
        return False


def _is_usable(held: object) -> bool:
    """Return True for a tensor, except a view that autograd does not allow to use."""
    if not isinstance(held, torch.Tensor):
        return False
    try:
        return held.is_leaf in {True, False}
    except RuntimeError:
        return False


def _overlaps(tensor: torch.Tensor) -> bool:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and step < 1 for size, step in steps)


def _writable(tensor: torch.Tensor) -> bool:
    return not _overlaps(tensor) and (not tensor.requires_grad or tensor.grad_fn is not None)


def _floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype in {torch.float32, torch.float64}


NEW = "torch.ones(3, 4, device=D)"
HOLES: dict[str, Callable[..., str]] = {
    "n": Generator.new,
    "h": Generator.host,
    "o": Generator.optimizer,
    "opt": Generator.known_optimizer,
    "t": lambda g: g.pick(lambda t: True, NEW),
    "f": lambda g: g.pick(_floating, NEW),
    "c": lambda g: g.pick(torch.Tensor.is_complex, "torch.ones(2, 3, device=D, dtype=torch.cfloat)"),
    "k": lambda g: g.pick(lambda t: t.dtype == torch.int64 and t.dim() == 1, "torch.arange(4, device=D)"),
    "w": lambda g: g.pick(_writable, NEW),
    "wf": lambda g: g.pick(lambda t: _writable(t) and _floating(t), NEW),
    "m": lambda g: g.pick(lambda t: _floating(t) and t.dim() == 2 and t.numel() > 0, NEW),
    "p": lambda g: g.pick(lambda t: _floating(t) and t.dim() == 4, "torch.ones(2, 3, 4, 4, device=D)"),
    "g": lambda g: g.pick(lambda t: t.requires_grad, "torch.ones(3, device=D, requires_grad=True)"),
    "leaf": lambda g: g.pick(lambda t: t.requires_grad and t.is_leaf, "torch.ones(3, device=D, requires_grad=True)"),
    "b": Generator.broadcastable,
    "d": Generator.dim,
    "s": Generator.scalar,
    "i": lambda g: str(g.rng.randrange(-2, 8)),
    "size": lambda g: str(g.rng.choice((1, 4, 6))),
    "shape": Generator.shape,
    "mask": Generator.mask,
    "index": Generator.index,
    "lastindex": lambda g, name: g.index(name, -1),
    "dtype": lambda g: "torch." + g.rng.choice(("float32", "float64", "int64", "bool", "int32", "float16", "uint8", "complex64")),
}  # fmt: skip


def generated(seed: int) -> tuple[list[str], list[Facts]]:
    """Return the program of a seed, and its facts on the CPU."""
    return Generator(seed).program()
