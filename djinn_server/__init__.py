"""The server's side: the gateway, which lets clients in, and the executor processes, which compute.

In the order in which a client's program passes through:

- `gateway`: authentication, admission, and routing to an executor.
- `executor_process` and `executor` (the process), `inline` (an executor as a thread).
  `control`: its parent's orders. `devices`: the device that it computes on. `rlimits`, `malloc_trim`: limits of the process, and memory that it
  returns to the system.
- `attach`: incoming connections. `handshake`: single messages outside of a session. `context`: what the sessions of an executor share;
  `shared_device`: of its device. `device_watch`: finds a lost accelerator and a hung kernel.
- `admission_limits`, `tenancy`, `rate_limit`, `usage_quota`, `disk_quota`: who may do what, and how much of it.
- `session`: the handlers of one client's messages; `session_runs`: how its submissions run. `session_machine`: decides which step is next; `session_loop`: takes it. `session_pauses`: waits without a
  thread. `session_threads`: the threads of all sessions. `session_registry`: the live sessions. `idle`: sessions whose values leave the device.
- `weights`: uploads, and a content-addressed store of weights that need not be sent again.
- `custom_operators`: ops of other libraries that the server's operator allows.
- `running`: templates, their values, and their runs. `checks`: validation of kernel arguments.
  `run_strategies`: other ways to run a template than op by op, which plugins register.
- `memory`: the table of storages, eviction, spilling and idle values.
- `peers`: transfer of values between executors.
- `recovery`: leases, journals and snapshots of sessions, which outlive a connection and a process.
- `hookspecs`: the contract for plugins that only servers call.
- `launch`: how executors are started, also as system users of tenants, and the pipe protocol with their parent. `builtins`: built-in plugins of servers. `cli`: `djinn serve` and `djinn token`.
- `malformed`: what a message must not say. `system`: what servers ask of the operating system.
- `events`, `executor_metrics`, `session_metrics`, `session_overview`, `usage_metrics`: what is told of all this. `request_times`: latency of
  requests and tokens. `histogram`: of durations. `value_kinds`: weights, KV caches and the like, as clients tell them.
"""

import djinn_core
from djinn_core.errors import StartupError

__version__ = "26.12.0rc1"

if djinn_core.__version__ != __version__:
    raise StartupError(
        f"djinn-server {__version__} does not fit djinn {djinn_core.__version__}: install both of one release, from one checkout or from one "
        "folder of wheels"
    )
