"""Train a small CNN on digits with mixed precision."""

import argparse
import os
import random
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
        torch.cuda.manual_seed_all(seed)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32 * 2 * 2, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


def get_loaders(args, use_cuda):
    digits = load_digits()
    x = torch.tensor(digits.images[: args.limit], dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target[: args.limit])
    split = int(0.8 * len(x))
    generator = torch.Generator().manual_seed(args.seed)
    kwargs = {"num_workers": args.workers, "pin_memory": True} if use_cuda else {}
    train = DataLoader(
        TensorDataset(x[:split], y[:split]),
        args.batch_size,
        shuffle=True,
        generator=generator,
        drop_last=True,
        **kwargs,
    )
    test = DataLoader(TensorDataset(x[split:], y[split:]), args.batch_size, **kwargs)
    return train, test


def train(args, model, device, loader, optimizer, scaler, epoch):
    model.train()
    for step, (data, target) in enumerate(loader):
        data, target = data.to(device, non_blocking=True), target.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device_type=device.type, dtype=torch.bfloat16, enabled=args.amp):
            output = model(data)
            loss = F.cross_entropy(output, target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        print(f"epoch {epoch} step {step} loss {loss.item():.6f} grad_norm {grad_norm:.5f}")


@torch.no_grad()
def test(model, device, loader):
    model.eval()
    test_loss, correct = 0.0, 0
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        output = model(data)
        test_loss += F.cross_entropy(output, target, reduction="sum").item()
        correct += output.argmax(dim=1).eq(target).sum().item()
    n = len(loader.dataset)
    print(f"test loss {test_loss / n:.6f} accuracy {correct / n:.4f}")


def main():
    args = parse_args()
    set_seed(args.seed)
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    if use_cuda:
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = True
        print(f"# GPU: {torch.cuda.get_device_name(0)}, {torch.cuda.device_count()} device(s)")

    train_loader, test_loader = get_loaders(args, use_cuda)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp and use_cuda)
    start_epoch = 0

    if args.resume and os.path.exists(args.checkpoint):
        checkpoint = torch.load(args.checkpoint, map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        if checkpoint["scaler"]:
            scaler.load_state_dict(checkpoint["scaler"])
        start_epoch = checkpoint["epoch"]

    start = time.time()
    for epoch in range(start_epoch, start_epoch + args.epochs):
        train(args, model, device, train_loader, optimizer, scaler, epoch)
        test(model, device, test_loader)
        scheduler.step()
    if use_cuda:
        torch.cuda.synchronize()
        print(f"# peak memory: {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
    print(f"# took {time.time() - start:.1f} s")

    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "scaler": scaler.state_dict(),
            "epoch": start_epoch + args.epochs,
        },
        args.checkpoint,
    )
    best = Net().to(device)
    best.load_state_dict(torch.load(args.checkpoint, map_location=device, weights_only=True)["model"])
    test(best, device, test_loader)


if __name__ == "__main__":
    main()
