"""Lightning trains on the remote device, which `accelerator="auto"` selects; torchmetrics computes on it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

REMOTE = "remote_accelerator:0"
ROWS = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 4, (64,), generator=torch.Generator().manual_seed(1))

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),  # on machines with Slurm
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Metric .* will save all targets"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*"),
]


@pytest.fixture(autouse=True)
def _embedded_device(embedded):
    assert embedded == REMOTE


@pytest.fixture(scope="module")
def lightning():
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return lightning


@pytest.fixture
def make_classifier(lightning):
    import torchmetrics

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
            self.losses = []

        def training_step(self, batch, _):
            rows, labels = batch
            answers = self.net(rows)
            loss = nn.functional.cross_entropy(answers, labels)
            self.accuracy(answers, labels)
            self.log("accuracy", self.accuracy, on_epoch=True)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch, _):
            self.log("validation", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Classifier


def make_loader():
    return DataLoader(TensorDataset(ROWS, LABELS), batch_size=16)


def fit_classifier(lightning, model, folder, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        default_root_dir=folder, max_epochs=2, **{"enable_checkpointing": False, **quiet, **options}
    )
    trainer.fit(model, make_loader(), make_loader())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return trainer, torch.stack(model.losses).float().cpu(), metrics


@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}], ids=["full", "mixed"])
def test_trainer_losses_equal_local(lightning, make_classifier, tmp_path, options):
    _, expected, here = fit_classifier(lightning, make_classifier(), tmp_path, accelerator="cpu", **options)
    model = make_classifier()
    trainer, losses, there = fit_classifier(lightning, model, tmp_path, **options)
    assert trainer.strategy.root_device == torch.device(REMOTE)
    tolerance = 3e-2 if "precision" in options else 1e-3
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    assert there == pytest.approx(here, rel=tolerance, abs=tolerance)


def test_checkpoint_loads_on_either_device(lightning, make_classifier, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = {"callbacks": [ModelCheckpoint(tmp_path, save_last=True)], "enable_checkpointing": True}
    model = make_classifier()
    fit_classifier(lightning, model, tmp_path, accelerator="remote_accelerator", devices=1, **saving)
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    for device in (REMOTE, "cpu"):
        loaded = make_classifier.load_from_checkpoint(tmp_path / "last.ckpt", map_location=device)
        assert loaded.net[0].weight.device == torch.device(device)
        torch.testing.assert_close({name: value.cpu() for name, value in loaded.state_dict().items()}, weights)


def test_accelerator_gpu_selects_remote_device(lightning, make_classifier, tmp_path):
    trainer, _, _ = fit_classifier(lightning, make_classifier(), tmp_path, accelerator="gpu", devices=1)
    assert trainer.strategy.root_device == torch.device(REMOTE)
    assert lightning.Fabric(accelerator="gpu", devices=1).device == torch.device(REMOTE)


def test_fabric_uses_precision_and_device(lightning):
    fabric = lightning.Fabric(precision="bf16-mixed")
    assert fabric.device == torch.device(REMOTE)
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for rows, labels in fabric.setup_dataloaders(make_loader()):
        answers = model(rows)
        loss = nn.functional.cross_entropy(answers, labels)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert loss.device == torch.device(REMOTE)
    assert 0 < loss.item() < 3


METRICS = {
    "classification": ["AUROC", "AveragePrecision", "ConfusionMatrix", "F1Score", "CalibrationError"],
    "regression": ["MeanSquaredError", "PearsonCorrCoef", "R2Score", "SpearmanCorrCoef"],
}


@pytest.mark.parametrize("kind", METRICS)
def test_torchmetrics_on_device_equal_local(kind):
    import torchmetrics

    torch.manual_seed(0)
    options = {"task": "multiclass", "num_classes": 4} if kind == "classification" else {}
    metrics = {name: getattr(torchmetrics, name)(**options) for name in METRICS[kind]}
    answers = torch.rand(20, 4).softmax(-1) if kind == "classification" else torch.rand(20)
    truth = torch.randint(0, 4, (20,)) if kind == "classification" else torch.rand(20)
    for name, metric in metrics.items():
        expected = metric(answers, truth)
        metric.reset()
        found = metric.to(REMOTE)(answers.to(REMOTE), truth.to(REMOTE))
        assert found.device == torch.device(REMOTE)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5, msg=name)
