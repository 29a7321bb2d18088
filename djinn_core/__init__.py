"""The core of Djinn, which clients, servers and planners share. Import `djinn`, not this package: it may change with each release.

The layers, lowest first. Each may import only from those before it (docs/architecture.md):

- `errors`: the hierarchy of errors.
- `system`: the only place that asks the operating system by itself: processes, files, sockets, signals, garbage collection.
  `torch_private`: private functions of PyTorch that clients and servers need.
- `settings`, `logs`: settings and where each came from; structured logs.
- `ir`: programs, graphs and the result types of the stages.
- `wire`: bytes to messages and back, without I/O.
- `hookspecs`: the contract for plugins, one module per kind.
- `protocol`: addresses, connections over sockets, TLS, and frames that are delivered exactly once although connections break.
- `observing`: events of a process, and the observers that are told of them.
- `registry`: discovery of plugins, the registry and its report.
- `planning`: the pipeline, its stages, matching, and the built-in cost model, policy and scheduler.
- `cli`: the command `djinn`.
"""

__version__ = "26.12.0rc1"
