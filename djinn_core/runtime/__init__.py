"""The client's session: it prepares, submits and fetches, and keeps what an error message will need.

In the order in which a program passes through:

- `client`: what is configured and which session is open (`state`), for everybody else. `captured`, `verifying`: what `djinn.capture` and
  `djinn.verify` do instead of running a program there.
- `connecting`: from settings to a session, and back to it when it is lost. `standby`: to another server.
- `planning`: plans, made once and found again.
- `session`: numbered submissions out, answers in. `pool`: the same over several executors.
- `sending`, `receiving`: what these consist of.
- `client_fallback`, `local_replay`: what no executor can do.
"""
