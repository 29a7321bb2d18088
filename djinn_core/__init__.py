"""The implementation of Djinn. Import `djinn`, not this package: it may change from one release to the next.

The layers, lowest first; each may import only from those before it:

- `errors`, `config`: the hierarchy of errors; settings and where each value came from.
- `ir`: programs, graphs and the result types of the stages.
- `wire`: bytes to messages and back, without I/O.
- `hookspecs`: the contract for plugins, one module per stage.
- `plugins`: discovery, the registry and its report.
- `stages`: annotate, estimate, optimize, place, schedule. `showing`: what they decided, for people. `interception`: the device that PyTorch sees, and what records.
  `builtins`: the default plugins.
- `pipeline`: the one function that names the order of the stages.
- `runtime`: the client's session. `server`: the gateway and the executor processes.
- `cli`: the command `djinn`.
"""
