"""A pipeline that streams text as it is generated, from a small model with random weights."""

import argparse
from threading import Thread

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    pipeline,
)

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda:0")
options = parser.parse_args()

words = ["<end>", *(f"w{n}" for n in range(60))]
tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<end>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=len(words), n_positions=64)).eval()
generate = pipeline("text-generation", model=model, tokenizer=tokenizer, device=options.device)
streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=90)
thread = Thread(
    target=generate,
    args=("w1 w2 w3",),
    kwargs={"max_new_tokens": 12, "do_sample": False, "streamer": streamer, "pad_token_id": 0},
)
thread.start()
parts = [part for part in streamer if part]
thread.join()
print(f"parts {len(parts)}")
print("".join(parts))
