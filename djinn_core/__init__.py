"""The core of Djinn, which clients, servers and planners share. Import `djinn`, not this package: it may change from one release to the next.

The layers, lowest first; each may import only from those before it (docs/architecture.md):

- `system`: what the platform offers, with an implementation for each: the only place that asks the operating system by itself.
- `backoff`, `directories`, `errors`, `files`, `front_end`, `interrupts`, `lru`, `printable`, `role`, `stack_room`:
  pauses between attempts; where files of the user lie; the hierarchy of errors; files that processes share; the notebook around a
  program; when Ctrl-C is raised; a bounded mapping; what others say, made fit to be shown; who else refers to an object; what this process is; room for nested calls.
  `torch_private`, `torch_backend`, `torch_layouts`, `torch_objects`, `torch_tracing`: the only places where PyTorch's private functions are touched.
- `config`, `logs`: settings and where each came from; structured logs. `tracebacks`: errors leave with the user's frames alone.
- `ir`: programs, graphs and the result types of the stages.
- `wire`: bytes to messages and back, without I/O.
- `matching`: the language that matchers are written in.
- `hookspecs`: the contract for plugins, one module per stage.
- `net`: connections over sockets, with and without TLS, for the transports.
- `plugins`: discovery, the registry and its report.
- `stages`: annotate, estimate, optimize, place, schedule. `showing`: what they decided, for people. `interception`: the
  device that PyTorch sees, and what records.
- `builtins`: the default plugins.
- `substituting`: programs in which an optimization put something else.
- `pipeline`: the one function that names the order of the stages.
- `scheduler`: plans by hand.
- `delivery`: frames that arrive once, although connections break.
- `launch`: starting executor processes, tickets, the connection file.
- `runtime`: the client's session. `server`: the gateway and the executor processes.
- `cli`: the command `djinn`. `loading`: imports a client without garbage collection. `notebook`: what `%load_ext djinn` adds.
"""

__version__ = "26.11.0"
