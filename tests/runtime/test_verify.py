"""`djinn.verify()`: a right program passes, a wrong kernel is found and named."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import djinn
from djinn_client.interception import remote_infer


def gpt2(device):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=1)
    return GPT2LMHeadModel(config).to(device)


def test_verify_passes_gpt2_training_step(embedded):
    model = gpt2(embedded).train()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(16, device=embedded).reshape(2, 8)
    with djinn.verify(bitwise=True) as report:
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert report.checked > 380
    assert report.first is None
    assert set(report.unchecked) <= {"random", "makes memory without content"}


def test_verify_passes_generation(embedded):
    model = gpt2(embedded).eval()
    ids = torch.arange(2, 10, device=embedded).reshape(1, 8)
    with djinn.verify() as report:
        model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=1, max_new_tokens=6, do_sample=True)
    assert report.checked > 200
    assert report.first is None


def test_verify_passes_cnn_training_with_uploads(embedded):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(36, 5),
    ).to(embedded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with djinn.verify() as report:
        for _ in range(3):
            x, y = torch.randn(4, 1, 8, 8).to(embedded), torch.tensor([0, 1, 2, 3]).to(embedded)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert report.checked > 60


def test_verify_passes_views_writes_and_data_dependent_shapes(embedded):
    before, unseen = (torch.arange(24.0, device=embedded).reshape(2, 3, 4) for _ in range(2))
    with djinn.verify(bitwise=True) as report:
        unseen[0].copy_(unseen[1])
        rows = before.transpose(1, 2)
        rows[0].mul_(2)
        before[before > 10] = 3
        chosen = torch.nonzero(before)
        before.add_(before)
        before[:, 1:].copy_(before[:, :-1].clone())
        before[0].copy_(before[1])
        before[0, 0].add_(before[1, 2])
        (rows * 1j).conj().add_(1j)
        torch.add(before, 1, out=torch.empty(2, 3, 4, device=embedded))
        square = torch.arange(6, device=embedded).reshape(2, 3)
        square.t_()
        square.add_(1)
        noise = torch.rand(3, device=embedded)
        noise.sort()
        assert chosen.shape[1] == 3
    assert report.checked > 12
    assert report.unchecked["random"] == 1


@pytest.mark.parametrize("block", [torch.inference_mode, lambda: torch.device("remote_accelerator"), torch.no_grad])
def test_verify_works_inside_other_contexts(embedded, block):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4).to(embedded)
    with djinn.verify() as report, block():
        x = torch.ones(3, 4, device=embedded)
        x.add_(model(x)).mul_(torch.tensor(2.0, device="cpu"))
        assert x.shape == (3, 4)
    assert report.checked >= 3


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of forward mode in PyTorch itself
def test_verify_passes_functional_transforms(embedded):
    w, x = torch.randn(4, device=embedded), torch.randn(5, 4, device=embedded)
    with djinn.verify() as report:
        per_sample = torch.func.vmap(torch.func.grad(lambda w, x: (w * x).sum().tanh()), in_dims=(None, 0))(w, x)
        torch.func.hessian(lambda x: x.sin().sum())(w)
    assert per_sample.shape == (5, 4)
    assert report.checked > 5


def test_ops_outside_block_are_not_verified(embedded):
    x = torch.ones(3, device=embedded)
    with djinn.verify() as report:
        x.exp()
    x.exp()
    djinn.synchronize()
    assert report.checked == 1
    with djinn.verify(), pytest.raises(djinn.DjinnError, match="inside another"), djinn.verify():
        pass


def test_remote_failures_still_raise(embedded):
    x = torch.arange(6.0, device=embedded)
    with pytest.raises(djinn.errors.RemoteIndexError, match="out of bounds"), djinn.verify():
        x[torch.tensor([9], device=embedded)]
    with djinn.verify() as report:
        x.exp()
    assert report.checked == 1


class Wave(torch.nn.Module):
    """A module whose kernel is wrong on the executor."""

    def forward(self, x):
        return torch.tanh(x)  # this line


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.wave = Wave()

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.wave(x) @ x.t()


def test_verify_names_op_line_and_module_of_wrong_kernel(on_wrong_executor):
    torch.manual_seed(0)
    net = Net().to(on_wrong_executor)
    x = torch.randn(32, 8).to(on_wrong_executor)
    with pytest.raises(djinn.errors.VerificationError) as caught, djinn.verify() as report:
        net(x).sum().backward()
    first = report.first
    assert first.op == "aten::tanh"
    assert first.module == "wave (Wave)"
    assert first.operands == ("float32[32, 8]",)
    assert f"{__file__}:{Wave.forward.__code__.co_firstlineno + 1} in forward" in first.site
    assert first.elements == 256
    assert 0 < first.differing <= 3
    assert 1e-6 < first.largest < 1e-2
    assert (first.rtol, first.atol) == (1.3e-6, 1e-5)
    assert report.differing == 1, "what uses a wrong result is not wrong itself"
    assert str(first) in str(caught.value)
    for part in ("aten::tanh", first.site, "wave (Wave)", "rtol 1.3e-06"):
        assert part in str(caught.value)


def test_verify_applies_tolerances(on_wrong_executor):
    x = torch.linspace(0.1, 1, 200).to(on_wrong_executor)
    with djinn.verify(rtol=1e-2) as report:
        x.tanh()
    assert report.checked == 1


def test_verify_finds_wrong_write(on_wrong_executor):
    x = torch.ones(2, 3).to(on_wrong_executor)
    with pytest.raises(djinn.errors.VerificationError, match=r"aten::mul_.*2 of 6 elements"), djinn.verify():
        x.mul_(2)
        x.add_(1)


def test_verify_finds_wrong_write_of_void_op(on_wrong_executor):
    targets = [torch.ones(n).to(on_wrong_executor) for n in (2, 3, 4)]
    with pytest.raises(djinn.errors.VerificationError, match=r"aten::_foreach_mul_.*4 of 4 elements"), djinn.verify():
        torch._foreach_mul_(targets, 3.0)


def test_error_in_block_notes_earlier_difference(on_wrong_executor):
    x = torch.linspace(0.1, 1, 200).to(on_wrong_executor)
    with pytest.raises(ZeroDivisionError) as caught, djinn.verify():
        x.tanh()
        raise ZeroDivisionError
    assert "aten::tanh" in caught.value.__notes__[0]


def test_unrecordable_op_does_not_stop_verification(embedded, monkeypatch):
    def raise_unrecordable(*_, **__):
        raise RuntimeError("refused")

    x = torch.tensor([0.0, 1.0]).to("remote_accelerator:0")
    with djinn.verify() as report:
        with monkeypatch.context() as patch:
            patch.setattr(remote_infer, "append", raise_unrecordable)
            with pytest.raises(RuntimeError, match="refused"):
                x.nonzero()
        x.add(1)
    assert report.checked == 1
