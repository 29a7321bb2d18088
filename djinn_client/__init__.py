"""The client: the device that PyTorch sees, and the session that runs what it records.

- `interception`: the device, recording, inference of metadata.
- `runtime`: sessions with executors, planning of recorded programs, sending, receiving.
- `cuda_facade`: the name of a GPU for the device, in processes of djinn run.
- `cli`, `notebook`: commands for the terminal and for notebooks.
- `tracebacks`: tracebacks that show the user's lines only. `stack_room`: stack space for nested calls.
- `torch_backend`, `torch_dispatch`, `torch_objects`, `torch_tracing`: private functions of PyTorch that clients need.
"""
