"""The client: the device that PyTorch sees, and the session that runs the recorded programs.

- `interception`: the device, recording, inference of metadata.
- `runtime`: sessions with executors, planning of recorded programs, sending, receiving.
- `hookspecs`: the contract for plugins that only clients call. `sink`: the interface between interception and the
  runtime.
- `builtins`: the native device as a plugin.
- `tracebacks`: tracebacks that show the user's lines only.
- `torch_dispatch`, `torch_tracing`: private functions of PyTorch that clients need.
"""
