"""Weight sources and weight formats of servers.

- `hub`: the Hugging Face hub. `network_files`: web servers and buckets. `published`: names that clients give to weights.
- `checkpoints`: files of `torch.save`. `gguf`: GGUF files.
"""
