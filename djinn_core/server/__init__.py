"""The gateway, which lets clients in, and the executor processes, which do their work.

In the order in which a client's program passes through:

- `gateway`: authentication, admission, routing to an executor, and operations endpoints.
- `executor_process` and `executor` (the process), `control` (its parent's orders), `attach` (incoming connections), `session_registry` (live
  sessions), `devices` (the device that it computes on), `admission_policies`, `tenancy`, `usage_metrics`
  and `rate_limit` (limits and accounting). `inline`: an executor as a thread.
- `session`: the message loop of one client.
- `weights`: uploads, and a content-addressed store of weights that need not be sent again.
- `running`: templates, their values, and their runs. `checks`: validation of kernel arguments. `compiling`: hot templates.
- `memory`: memory limits, eviction, spilling and rematerialization.
- `peers`: transfer of values between executors.
- `recovery`: leases, journals and snapshots of sessions, which outlive a connection and a process.
"""
