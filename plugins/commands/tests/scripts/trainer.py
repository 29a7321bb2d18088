"""transformers' Trainer with two workers, which seed all devices."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--cpu", action="store_true")
options = parser.parse_args()


class Tokens(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        tokens = (torch.arange(12) * (index + 3)) % 50
        return {"input_ids": tokens, "labels": tokens}


def main():
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=50, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=4,
        per_device_train_batch_size=4,
        dataloader_num_workers=2,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=options.cpu,
        disable_tqdm=True,
        seed=3,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"loss {float(entry['loss']):.3f}")
    print(f"on {'cpu' if options.cpu else model.device.type}".replace("cuda", "cpu"))


if __name__ == "__main__":  # workers may be started with forkserver, as by default from Python 3.14 on
    main()
