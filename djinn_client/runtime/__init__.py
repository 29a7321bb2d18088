"""The client's runtime: sessions with executors, and the processing of recorded programs and replies.

In the order in which a program passes through them:

- `attaching`: what `import djinn` does; the rest is imported when the device is first used.
  `early_start`: executors that `import djinn` starts before it imports PyTorch.
- `client`: the functions of `djinn` for this process. `sink`: what interception calls. `context`: its settings,
  plugins, open session and counters (`stats`).
  `plugins`, `observing`: plugins of a client. `reconfiguring`: changes of settings while a session is open.
- `connecting`: from settings to a session, and back to it when it is lost. `executor_link`: what is sent to one
  executor until the
  session is lost.
- `session`: executors, and the router that says which of them runs what. `executor_client`: one executor: submissions
  out, replies in.
- `planning`: plans, made once and found again.
- `sending`, `receiving`: encoding of submissions, decoding of replies, failures.
"""
