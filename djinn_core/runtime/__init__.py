"""The client's session: it prepares, submits and fetches, and keeps what an error message will need.

In the order in which a program passes through:

- `client`: settings and the open session (`state`), for the rest of the process. `captured`, `verifying`: `djinn.capture`
  and `djinn.verify`.
- `connecting`: from settings to a session, and back to it when it is lost. `standby`: to another server.
- `planning`: plans, made once and found again.
- `session`: numbered submissions out, answers in. `pool`: the same over several executors.
- `sending`, `receiving`: encoding of submissions, decoding of answers.
- `client_fallback`, `local_replay`: ops on the client's CPU.
"""
