"""Weights that the server reads, writes and keeps. They never pass through the client.

- `open_weights`: `djinn.open_weights`, `djinn.save_weights`. `published`: weights under names that outlive programs.
- `server_files`: `torch.save` and `torch.load` with addresses of the server.
"""
