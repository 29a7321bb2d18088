"""Sample from a GPT-2 in half precision and report memory."""

import argparse
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def print_gpu_memory(label):
    if not torch.cuda.is_available():
        return
    allocated = torch.cuda.memory_allocated() / 1024**2
    reserved = torch.cuda.memory_reserved() / 1024**2
    print(f"# [{label}] allocated {allocated:.1f} MB, reserved {reserved:.1f} MB")


def build_model(dtype):
    config = GPT2Config(vocab_size=256, n_positions=128, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    model.generation_config.pad_token_id = 0
    if torch.cuda.is_available():
        model.cuda()
    return model.to(dtype).eval()


def largest_batch(model, start, length):
    batch = start
    while batch >= 1:
        try:
            ids = torch.randint(1, 256, (batch, length), device=model.device)
            with torch.no_grad():
                model(ids)
            return batch
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            batch //= 2
    sys.exit("not even one sequence fits")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--max-new-tokens", type=int, default=12)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--prompt", default="Once upon a time")
    args = parser.parse_args()

    torch.manual_seed(1234)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype)
    if device.startswith("cuda"):
        props = torch.cuda.get_device_properties(device)
        print(f"# {props.name} sm_{props.major}{props.minor} {props.total_memory / 1024**3:.1f} GB")
        if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
            dtype = torch.float16
        torch.cuda.reset_peak_memory_stats()

    model = build_model(dtype)
    assert next(model.parameters()).is_cuda == torch.cuda.is_available()
    print_gpu_memory("loaded")

    input_ids = torch.tensor([list(args.prompt.encode())]).to(device)
    with torch.inference_mode():
        logits = model(input_ids).logits.float()
        print("top", logits[0, -1].topk(3).values.sum().item())
        greedy = model.generate(input_ids, max_new_tokens=args.max_new_tokens, do_sample=False)
        print("greedy", greedy[0].tolist())

        torch.manual_seed(7)
        torch.cuda.manual_seed_all(7)
        sampled = model.generate(
            input_ids,
            max_new_tokens=args.max_new_tokens,
            do_sample=True,
            top_k=50,
            top_p=0.95,
            temperature=args.temperature,
            num_return_sequences=2,
        )
    print("sampled", sampled.cpu().tolist())
    print("batch", largest_batch(model, 16, 32))

    print_gpu_memory("generated")
    if torch.cuda.is_available():
        print(f"# peak {torch.cuda.max_memory_allocated(device) / 1024**2:.1f} MB")
        print("#", torch.cuda.memory_summary(abbreviated=True).splitlines()[0])
        free, total = torch.cuda.mem_get_info()
        print(f"# {free / total:.0%} free")
    del model
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
