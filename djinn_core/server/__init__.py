"""The gateway, which lets clients in, and the executor processes, which do their work.

In the order in which a client's program passes through:

- `gateway`: who gets in, to which executor; what people who run a server see of it.
- `executor` (the process), `control` (its parent's orders), `attach` and `aside` (who gets in), `roster` (who is in), `devices` (what it
  computes on), `room`, `tenancy`, `meter` and `rates` (how many, for whom, how much, how often). `inline`: the same as a thread.
- `session`: one client's, from message to message.
- `weights`: bytes that become values, and those that need not travel again.
- `running`: templates, their values, and one run after the other. `checks`: what kernels take on trust. `compiling`: what runs often.
- `memory`: an executor that keeps to a limit.
- `peers`: values from executor to executor.
- `recovery`: what outlives a connection and a process.
"""
