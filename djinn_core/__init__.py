"""The core of Djinn, which clients, servers and planners share.

Import `djinn`, not this package: it may change with each release.

The layers, lowest first. Each layer may import only the layers before it (docs/architecture.md):

- `errors`: the hierarchy of errors.
- `system`: the only package that calls the operating system directly: processes, files, sockets, signals, garbage
  collection. `torch_private`: private functions of PyTorch that clients and servers need.
- `settings`, `logs`: settings and the source of each value; structured logs.
- `ir`: programs, graphs and the result types of the stages.
- `wire`: bytes to messages and back, without I/O.
- `hookspecs`: the contract for plugins, one module per kind.
- `protocol`: addresses, connections over sockets, TLS, and frames that are delivered exactly once although connections
  break.
- `observing`: events of a process, and the observers that receive them.
- `registry`: discovery of plugins, the registry and its report.
- `planning`: the pipeline, its stages, matching, and the built-in cost model, policy and scheduler.
- `cli`: the command `djinn`.
"""

__version__ = "26.12.0rc1"
