"""Everyday uses of a model: save, load, clip, checkpoint, compile, print, hand over to libraries."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

REMOTE = "remote_accelerator:0"


@pytest.fixture
def remote(embedded):
    assert embedded == REMOTE


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 8))
    model[3].weight = nn.Parameter(model[0].weight.detach().T.contiguous())
    return model


def assert_equals_local(work, model):
    """Check that `work(model, data)` returns equal results locally and remotely."""
    data = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    results = []
    for device in ("cpu", REMOTE):
        torch.manual_seed(2)
        found = work(copy.deepcopy(model).to(device), data.to(device))
        results.append(pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), found))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def test_gradient_clipping_equals_local(remote, model):
    def work(model, data):
        model(data).square().sum().backward()
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1), gradients(model)

    assert_equals_local(work, model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes_same_dropout(remote, model, reentrant):
    from torch.utils.checkpoint import checkpoint

    def work(model, data):
        checkpoint(model, data.requires_grad_(), use_reentrant=reentrant).square().sum().backward()
        return gradients(model)

    assert_equals_local(work, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_equals_local(remote, model, dtype):
    assert_equals_local(lambda model, data: model.to(dtype)(data.to(dtype)).float(), model)


def test_gradients_of_gradients_equal_local(remote, model):
    def work(model, data):
        (gradient,) = torch.autograd.grad(model(data.requires_grad_()).square().sum(), data, create_graph=True)
        gradient.square().sum().backward()
        return gradients(model)

    assert_equals_local(work, model.eval())


def test_per_sample_gradients_equal_local(remote, model):
    from torch.func import functional_call, grad, vmap

    def work(model, data):
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        return vmap(grad(lambda p, x: functional_call(model, p, (x,)).square().sum()), (None, 0))(parameters, data)

    assert_equals_local(work, model.eval())


def test_channels_last_format_is_kept(remote):
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    image = torch.randn(2, 3, 8, 8)
    expected, result = layer(image), copy.deepcopy(layer).to(REMOTE)(image.to(REMOTE))
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result.cpu(), expected.detach())


def test_saved_state_dict_loads(remote, model):
    there, here = copy.deepcopy(model).to(REMOTE), model.state_dict()
    file = io.BytesIO()
    torch.save(there.state_dict(), file)
    for location in (None, "cpu", REMOTE):
        file.seek(0)
        loaded = torch.load(file, map_location=location, weights_only=True)
        assert {t.device for t in loaded.values()} == {torch.device(location or REMOTE)}
        torch.testing.assert_close({k: t.cpu() for k, t in loaded.items()}, here)


def test_cpu_file_loads_to_remote_device(remote):
    base = torch.arange(12.0)
    file = io.BytesIO()
    torch.save({"base": base, "view": base.view(3, 4)[1:, ::2], "again": base, "empty": torch.empty(0)}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=REMOTE, weights_only=True)
    assert {t.device for t in loaded.values()} == {torch.device(REMOTE)}
    assert loaded["view"].tolist() == [[4, 6], [8, 10]]
    loaded["base"][4] = 100
    assert loaded["view"][0, 0].item() == 100, "views share memory, as they did when they were saved"
    loaded["again"][0] = 50
    assert loaded["base"][0].item() == 50


def test_storages_identify_tied_weights(remote):
    first, second = torch.ones(4, device=REMOTE), torch.ones(4, device=REMOTE)
    assert first.untyped_storage().data_ptr() == first[2:].untyped_storage().data_ptr()
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert first.untyped_storage().nbytes() == 16
    assert first.untyped_storage().device == torch.device(REMOTE)
    assert first.untyped_storage().tolist() == torch.ones(4).untyped_storage().tolist()


def test_transformers_save_remote_model(remote, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {"vocab_size": 50, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**settings, bos_token_id=0, eos_token_id=0))
    copy.deepcopy(model).to(REMOTE).save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path)
    torch.testing.assert_close(again.state_dict(), model.state_dict())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_model_runs_eagerly_with_message(remote, model, caplog):
    from djinn_integrations import eager

    def work(model, data):
        if data.device.type == "cpu":
            return model(data), data.sin().cos()
        whole = torch.compile(lambda data: data.sin().cos(), fullgraph=True)
        return torch.compile(model)(data), whole(data)

    eager._say_once.cache_clear()
    assert_equals_local(work, model.eval())
    assert caplog.text.count("torch.compile has no effect on remote tensors") == 1


def test_remote_scalars_print_and_format(remote):
    loss = torch.tensor(1.25, device=REMOTE)
    assert f"{loss:.1f} {loss:>6} {loss}" == "1.2   1.25 1.25"
    assert torch.tensor([loss, loss + 1], device=REMOTE).tolist() == [1.25, 2.25]
    assert "remote_accelerator:0" in repr(loss)


def test_remote_memory_access_raises(remote):
    tensor = torch.ones(2, device=REMOTE)
    for reach in (tensor.numpy, lambda: np.asarray(tensor)):
        with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
            reach()
    with pytest.raises((BufferError, RuntimeError), match=r"memory on this machine|[Dd]evice"):
        np.from_dlpack(tensor)
    assert tensor.numpy(force=True).tolist() == [1, 1]


def test_data_loader_batches_move_to_device(remote):
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(6.0))
    total = torch.zeros((), device=REMOTE)
    for (batch,) in DataLoader(data, batch_size=2, shuffle=True):
        total += batch.to(REMOTE, non_blocking=True).sum()
    assert total.item() == 15


def test_learning_rate_schedule_and_optimizer_state_equal_local(remote, model):
    def work(model, data):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        for _ in range(3):
            optimizer.zero_grad()
            functional.mse_loss(model(data), data).backward()
            optimizer.step()
            schedule.step()
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state)
        return list(model.parameters()), [s["exp_avg"] for s in state["state"].values()]

    assert_equals_local(work, model)


def test_unused_forward_updates_statistics(remote):
    def work(_, data):
        torch.manual_seed(3)
        layer = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).to(data.device)
        average = torch.optim.swa_utils.AveragedModel(layer)
        average.update_parameters(layer)
        torch.optim.swa_utils.update_bn([data], average)
        return average.state_dict()

    assert_equals_local(work, nn.Identity())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm", [None, nn.LayerNorm(4)], ids=["plain", "norm"])
@pytest.mark.parametrize("rows", [[4, 2], [2, 2]], ids=["one row", "all rows"])
def test_encoder_padding_is_zero(remote, norm, rows):
    def work(_, data):
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, norm=copy.deepcopy(norm)).to(data.device).eval()
        if norm is not None:
            nn.init.constant_(encoder.norm.bias, 0.5)
        padding = (torch.arange(4) >= torch.tensor(rows).unsqueeze(1)).to(data.device)
        words = data.flatten()[:32].view(2, 4, 4)
        with torch.no_grad():
            dropped = encoder(words, src_key_padding_mask=padding)
            scattered = encoder(words, src_key_padding_mask=padding.flip(1))
        return dropped, scattered, encoder(words, src_key_padding_mask=padding), encoder.train()(words)

    assert_equals_local(work, nn.Identity())


@pytest.mark.parametrize("lengths", ["cpu", REMOTE])
def test_ctc_loss_accepts_lengths_on_either_device(remote, lengths):
    def work(_, data):
        place = lengths if data.device.type != "cpu" else "cpu"
        scores = data.view(5, 2, 4).log_softmax(2)
        targets = torch.tensor([[1, 2], [3, 1]], device=data.device)
        sizes = [torch.tensor(given, device=place) for given in ([5, 4], [2, 1])]
        return nn.functional.ctc_loss(scores, targets, *sizes)

    assert_equals_local(work, nn.Identity())


OPTIMIZERS = {
    "lbfgs": lambda given: torch.optim.LBFGS(given, lr=0.1, max_iter=4),
    "adamw fused": lambda given: torch.optim.AdamW(given, lr=1e-2, fused=True),
    "nadam with a tensor as rate": lambda given: torch.optim.NAdam(given, lr=torch.tensor(1e-2)),
    "sgd foreach": lambda given: torch.optim.SGD(given, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_equal_local(remote, model, name):
    def work(model, data):
        optimizer = OPTIMIZERS[name](model.parameters())

        def loss():
            optimizer.zero_grad()
            found = functional.mse_loss(model(data), data)
            found.backward()
            return found

        return [optimizer.step(loss).detach() for _ in range(3)], list(model.parameters())

    assert_equals_local(work, model.eval())


def test_distributions_equal_local(remote):
    def work(_, data):
        scale = data[:, :2].exp()
        kinds = [
            torch.distributions.Normal(data[:, :2], scale),
            torch.distributions.Categorical(logits=data),
            torch.distributions.Gamma(scale, scale),
            torch.distributions.Bernoulli(logits=data),
        ]
        samples = [kind.sample((2,)) for kind in kinds]
        return samples, [kind.log_prob(sample) for kind, sample in zip(kinds, samples, strict=True)]

    assert_equals_local(work, nn.Identity())


def test_recurrent_net_on_packed_sequences_equals_local(remote):
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    def work(_, data):
        torch.manual_seed(3)
        net = nn.LSTM(4, 3, num_layers=2, dropout=0.3, bidirectional=True, proj_size=2, batch_first=True).to(
            data.device
        )
        torch.manual_seed(4)
        packed = pack_padded_sequence(data.view(2, 5, 4), torch.tensor([3, 5]), batch_first=True, enforce_sorted=False)
        out, state = net(packed)
        out, lengths = pad_packed_sequence(out, batch_first=True)
        out.sum().backward()
        return out, lengths, state, gradients(net)

    assert_equals_local(work, nn.Identity())


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"pin_memory": True}])
def test_data_loader_works_with_workers_and_threads(remote, options):
    from torch.utils.data import DataLoader, TensorDataset

    total = torch.zeros((), device=REMOTE)
    for (batch,) in DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2, **options):
        total += batch.to(REMOTE, non_blocking=True).sum()
    assert total.item() == 15
