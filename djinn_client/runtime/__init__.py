"""The client's side: sessions with executors, and what happens to a recorded program on its way there and back.

In the order in which a program passes through:

- `attaching`: what `import djinn` does; the rest is imported when the device is first used.
  `early_start`: executors that `import djinn` starts before it imports PyTorch.
- `client`: the functions of `djinn` for this process. `context`: its settings, plugins, open session and counters (`stats`).
  `load_plugins`, `integrations`, `observing`: plugins of a client. `reconfiguring`: changes of settings while a session is open.
- `connecting`: from settings to a session, and back to it when it is lost. `standby`: to another server. `executor_link`: what is sent
  to one executor until the session is lost.
- `session`: a session with one executor: submissions out, replies in. `pool`: the same over several executors. `client_session`: what
  both have in common. `scaling`, `drained_nodes`: executors join and leave a pool.
- `planning`: plans, made once and found again.
- `sending`, `receiving`: encoding of submissions, decoding of replies, failures. `deadlines`: how long waits may take.
- `client_fallback`: ops on the client's CPU.
- `captured`, `semantic_analysis`, `semantics`, `timeline`: `djinn.capture()`, `djinn.compat.SemanticAnalyzer`, `djinn.profile()`.
- `open_weights`, `published`, `server_files`: weights that the server reads, writes and keeps. `kv_session`: KV caches.
- `coordinator`, `run_processes`: `djinn.compat.coordinator()`, and the processes of `djinn run`.
"""
