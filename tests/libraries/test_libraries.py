"""Programs of libraries that are built on PyTorch: on the remote device as on the CPU, with no line but the device's name.

A program is a function of a device; what it returns is compared. The kernels are the same on both sides, so the elements
are, too. A library that is not installed is skipped; evaluation/results/libraries.md tells which versions were tried.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture
def compare_devices(embedded):
    """Return a function that runs a program on the CPU and on the device and compares the results."""

    def compare_devices(program, tolerance=1e-5):
        expected, found = dict(leaves(program("cpu"))), dict(leaves(program(embedded)))
        assert found.keys() == expected.keys()
        for place, value in found.items():
            if isinstance(value, torch.Tensor):
                assert value.device == torch.device(embedded), place
            assert_same(value, expected[place], place, tolerance)

    return compare_devices


def assert_same(found, expected, place, tolerance):
    if isinstance(found, torch.Tensor):
        torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=place)
    else:
        assert found == pytest.approx(expected, rel=tolerance), place


def leaves(value, place=""):
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, f"{place}.{name}")
    else:
        yield place, value.detach() if isinstance(value, torch.Tensor) else value


def train(parameters, loss_of, steps=3, lr=1e-2):
    """Return the losses of some steps of Adam."""
    optimizer = torch.optim.Adam(parameters, lr=lr)
    losses = []
    for _ in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def draw(*size):
    """Return numbers that are drawn on the CPU and are equal on each device."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(1))


def language_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, vocab_size=40, bos_token_id=1, eos_token_id=2, pad_token_id=0, max_position_embeddings=64)
    )


def test_einops_equals_local(compare_devices):
    pytest.importorskip("einops")
    from einops import einsum, pack, rearrange, reduce, repeat, unpack
    from einops.layers.torch import EinMix, Rearrange, Reduce

    def program(device):
        torch.manual_seed(0)
        net = nn.Sequential(
            Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=2, q=2),
            EinMix("b n c -> b n k", weight_shape="c k", bias_shape="k", c=12, k=16),
            Reduce("b n k -> b k", "max"),
            nn.Linear(16, 4),
        ).to(device)
        images, labels = draw(2, 3, 8, 8).to(device), torch.tensor([1, 3]).to(device)
        packed, shapes = pack([images, rearrange(images, "b c h w -> b (c h) w")], "b * w")
        return (
            train(net.parameters(), lambda: functional.cross_entropy(net(images), labels)),
            list(net.parameters()),
            unpack(packed, shapes, "b * w"),
            repeat(images, "b c h w -> b (c 2) h w"),
            reduce(images, "b c (h 2) (w 2) -> b c h w", "mean"),
            einsum(images, images, "b c h w, b c h v -> b w v"),
        )

    compare_devices(program)


@pytest.mark.long  # `python -m evaluation libraries`
def test_torchdiffeq_equals_local(compare_devices):
    pytest.importorskip("torchdiffeq")
    from torchdiffeq import odeint, odeint_adjoint

    def program(device):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)

        class Slope(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = net

            def forward(self, _, y):
                return self.net(y**3)

        slope, start = Slope(), torch.tensor([[2.0, 0.0]]).to(device)
        times = torch.linspace(0, 1, 3).to(device)
        return (
            [odeint(slope, start, times, method=method) for method in ("rk4", "bosh3")],
            [
                train(net.parameters(), lambda f=f: f(slope, start, times, method="rk4").abs().mean(), 1)
                for f in (odeint, odeint_adjoint)
            ],
            list(net.parameters()),
        )

    compare_devices(program)


def test_torchmetrics_equals_local(compare_devices):
    import torchmetrics

    def program(device):
        kind = {"task": "multiclass", "num_classes": 4}
        classes = torchmetrics.MetricCollection(
            [
                torchmetrics.Accuracy(**kind),
                torchmetrics.AUROC(**kind),
                torchmetrics.F1Score(**kind, average="macro"),
            ]
        ).to(device)
        for step in range(2):
            labels = (torch.arange(16) * (step + 3)) % 4
            classes.update((draw(16, 4) + step).softmax(-1).to(device), labels.to(device))
        return classes.compute()

    compare_devices(program)


def test_peft_adapter_and_merge_equal_local(compare_devices, tmp_path):
    peft = pytest.importorskip("peft")

    def program(device):
        tokens = ((torch.arange(24).view(2, 12) * 7) % 37 + 3).to(device)
        wanted = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
        torch.manual_seed(0)
        model = peft.get_peft_model(language_model(), peft.LoraConfig(**wanted)).to(device)
        adapted = [p for p in model.parameters() if p.requires_grad]
        losses = train(adapted, lambda: model(input_ids=tokens, labels=tokens).loss)
        model.eval()
        with torch.no_grad():
            apart = model(input_ids=tokens).logits
            with model.disable_adapter():
                plain = model(input_ids=tokens).logits
            model.save_pretrained(tmp_path / device.partition(":")[0])
            loaded = peft.PeftModel.from_pretrained(language_model().to(device), tmp_path / device.partition(":")[0])
            again = loaded.eval()(input_ids=tokens).logits
            merged = model.merge_and_unload()(input_ids=tokens).logits
        return losses, apart, plain, again, merged

    compare_devices(program)


def test_trl_supervised_training_equals_local(compare_devices, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    def program(device):
        lines = Dataset.from_dict({"input_ids": (torch.arange(48).view(4, 12) * 5 % 37 + 3).tolist()})
        trainer = trl.SFTTrainer(
            language_model(),
            trl.SFTConfig(**trl_options(tmp_path, device), max_length=16),
            train_dataset=lines,
            processing_class=tokenizer(),
        )
        trainer.train()
        return [step["loss"] for step in trainer.state.log_history if "loss" in step], trainer.model.state_dict()

    compare_devices(program)


def test_trl_preference_training_equals_local(compare_devices, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    language_model().save_pretrained(tmp_path / "model")

    def program(device):
        pairs = {
            "prompt": ["a b c"] * 4,
            "chosen": [" d e", " e f", " f a", " d d"],
            "rejected": [" c", " b", " a", " c c"],
        }
        trainer = trl.DPOTrainer(
            str(tmp_path / "model"),
            args=trl.DPOConfig(**trl_options(tmp_path, device), max_length=24),
            train_dataset=Dataset.from_dict(pairs),
            processing_class=tokenizer(),
        )
        trainer.train()
        return [step["loss"] for step in trainer.state.log_history if "loss" in step], trainer.model.state_dict()

    compare_devices(program)


def trl_options(folder, device):
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "bf16": False}
    steps = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    return {"output_dir": str(folder / "run"), "use_cpu": device == "cpu", **quiet, **steps}


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate("<pad> <s> </s> <unk> a b c d e f".split())}, "<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


QUANTIZED = {
    "int8": lambda q: q.Int8WeightOnlyConfig(),
    "int8, both": lambda q: q.Int8DynamicActivationInt8WeightConfig(),
    "int4": lambda q: q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=q.granularity.PerGroup(32)),
    "float8": lambda q: q.Float8WeightOnlyConfig(),
}


@pytest.mark.parametrize("wanted", QUANTIZED)
def test_torchao_equals_local(compare_devices, wanted):
    quantization = pytest.importorskip("torchao.quantization")

    def program(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).bfloat16().to(device)
        quantization.quantize_(model, QUANTIZED[wanted](quantization))
        with torch.no_grad():
            return model(draw(4, 64).bfloat16().to(device))

    compare_devices(program)


def test_torch_geometric_equals_local(compare_devices):
    pytest.importorskip("torch_geometric")
    from torch_geometric import EdgeIndex, utils
    from torch_geometric import nn as graphs
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    edges = torch.randint(0, 20, (2, 60), generator=torch.Generator().manual_seed(2))

    def program(device):
        graph = Data(x=draw(20, 8), edge_index=edges, y=torch.arange(20) % 3).to(device)
        torch.manual_seed(0)
        nets = [make(8, 8, 1, 3).to(device) for make in (graphs.GCN, graphs.GAT, graphs.GraphSAGE)]
        losses = [
            train(
                net.parameters(), lambda net=net: functional.cross_entropy(net(graph.x, graph.edge_index), graph.y), 2
            )
            for net in nets
        ]
        small = [Data(x=draw(n, 8), edge_index=edges[:, :9] % n) for n in (5, 7, 4, 6)]
        pooled = [
            graphs.global_mean_pool(batch.x, batch.batch) for batch in (b.to(device) for b in DataLoader(small, 2))
        ]
        ordered = EdgeIndex(graph.edge_index, sparse_size=(20, 20)).sort_by("row").values
        return (
            *(losses, pooled, nets[0](graph.x, ordered)),
            graphs.TopKPooling(8, 0.5).to(device)(graph.x, graph.edge_index)[0].shape,
            utils.coalesce(utils.to_undirected(graph.edge_index)),
            utils.to_dense_adj(graph.edge_index),
        )

    compare_devices(program)


@pytest.mark.long  # `python -m evaluation libraries`
def test_gpytorch_equals_local(compare_devices):
    gpytorch = pytest.importorskip("gpytorch")

    class ExactModel(gpytorch.models.ExactGP):
        def __init__(self, x, y, likelihood):
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    def program(device):
        x = torch.linspace(0, 1, 20).to(device)
        y = torch.sin(x * 6) + 0.1 * draw(20).to(device)
        likelihood = gpytorch.likelihoods.GaussianLikelihood().to(device)
        model = ExactModel(x, y, likelihood).to(device)
        objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        losses = train(model.parameters(), lambda: -objective(model(x), y), lr=0.1)
        model.eval()
        likelihood.eval()
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            answer = likelihood(model(torch.linspace(0, 1, 5).to(device)))
            return losses, answer.mean, answer.variance, answer.confidence_region()

    compare_devices(program)


@pytest.mark.long  # `python -m evaluation libraries`
def test_pyro_equals_local(compare_devices):
    pyro = pytest.importorskip("pyro")
    from pyro import distributions
    from pyro.infer import HMC, MCMC, SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoNormal

    def model(x, y):
        zeros = torch.zeros(2, device=x.device)
        weights = pyro.sample("weights", distributions.Normal(zeros, 1.0).to_event(1))
        noise = pyro.sample("noise", distributions.LogNormal(zeros[0], 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", distributions.Normal(x @ weights, noise), obs=y)

    def program(device):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        x = draw(20, 2).to(device)
        y = x @ torch.tensor([1.0, -1.0], device=device)
        inference = SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
        losses = [inference.step(x, y) for _ in range(3)]
        kernel = HMC(model, step_size=0.05, num_steps=2, adapt_step_size=False)
        chain = MCMC(kernel, num_samples=2, warmup_steps=1, disable_progbar=True)
        chain.run(x, y)
        return losses, dict(pyro.get_param_store().items()), chain.get_samples()

    compare_devices(program)


@pytest.mark.long  # `python -m evaluation libraries`
def test_kornia_equals_local(compare_devices):
    kornia = pytest.importorskip("kornia")
    from kornia import augmentation

    def program(device):
        images = draw(2, 3, 24, 24).sigmoid().to(device)
        torch.manual_seed(3)
        changes = augmentation.AugmentationSequential(
            augmentation.RandomHorizontalFlip(p=1.0),
            augmentation.RandomAffine(30.0, p=1.0),
            augmentation.ColorJitter(0.1, 0.1, 0.1, 0.1, p=1.0),
            data_keys=["input", "mask"],
        )
        shift = nn.Parameter(torch.zeros(2, 2).to(device))

        def difference():
            return (kornia.geometry.translate(images, shift) - images.roll(1, -1)).square().mean()

        return (
            changes(images, (images[:, :1] > 0.5).float()),
            kornia.filters.canny(images),
            kornia.filters.median_blur(images, (3, 3)),
            kornia.color.rgb_to_lab(images),
            kornia.geometry.rotate(images, torch.tensor([30.0, 45.0]).to(device)),
            (train([shift], difference, lr=1.0), shift),
        )

    compare_devices(program)


def test_stable_baselines3_equals_local(compare_devices, tmp_path):
    learners = pytest.importorskip("stable_baselines3")

    def program(device):
        options = {"device": device, "seed": 0, "learning_starts": 8, "batch_size": 8}
        small = {"policy_kwargs": {"net_arch": [16]}}
        found = []
        for name, world in (("DQN", "CartPole-v1"), ("TD3", "Pendulum-v1")):
            learner = getattr(learners, name)("MlpPolicy", world, **options, **small).learn(20)
            learner.save(tmp_path / "learner")
            loaded = getattr(learners, name).load(tmp_path / "learner", device=device)
            seen = learner.observation_space.low.clip(-1, 1)
            found += [learner.policy.state_dict(), loaded.predict(seen, deterministic=True)[0].tolist()]
        return found

    compare_devices(program, 1e-2)  # each step divides small gradients by their own size
