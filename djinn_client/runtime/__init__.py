"""The client's runtime: sessions with executors, and the processing of recorded programs and replies.

In the order in which a program passes through the modules:

- `attaching`: registration by `import djinn`; the rest is imported when the device is first used.
  `early_start`: executors that `import djinn` starts before it imports PyTorch.
- `client`: the functions of `djinn` for this process. `sink`: the interface that interception calls. `context`: its
  settings, plugins, open session and counters (`stats`). `plugins`, `observing`: plugins of a client. `reconfiguring`:
  changes of settings while a session is open.
- `connecting`: from settings to a session, and reconnection when it is lost. `executor_link`: sending to an executor
  until the session is lost.
- `session`: executors, and the router that assigns programs to them. `executor_client`: the client of one executor:
  submissions out, replies in.
- `planning`: plans, and their cache.
- `sending`, `receiving`: encoding of submissions, decoding of replies, failures.
"""
