"""The gateway, which lets clients in, and the executor processes, which do their work.

Executor: `executor` (the process), `control` (its parent's orders), `attach` (who gets in), `roster` (who is in),
`devices` (what it computes on). Gateway: `gateway` (the process), `admission` (who gets in), `tokens`, `pool` (its
executors), `relay` (passing frames on), `greetings` (sending and reading single messages).
"""
