"""Weight sources and weight formats of servers.

- `hub`: the Hugging Face hub. `network_files`: web servers and buckets.
- `checkpoints`: files of `torch.save`. `gguf`: GGUF files.
"""
