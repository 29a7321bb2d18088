"""The server: a gateway, which admits clients, and executor processes, which compute.

docs/architecture.md explains the terms. In the order in which a client's program passes through:

- `gateway`: authentication, admission, and routing to an executor.
- `executor_process` and `executor`: the executor process. `inline`: an executor in a thread.
- `control`: orders of its parent. `devices`: its device.
- `rlimits`: limits of the process. `malloc_trim`: memory that it returns to the system.
- `attach`: incoming connections. `handshake`: single messages outside of a session.
- `context`: state that all sessions of an executor share. `shared_device`: state of its device.
- `device_watch`: detection of a lost accelerator and of a hung kernel.
- `admission_limits`, `tenancy`, `rate_limit`, `usage_quota`, `disk_quota`: permissions and limits of tenants.
- `session`: handlers of a client's messages. `session_runs`: runs of its submissions.
- `session_machine`: choice of a session's next step. `session_loop`: execution of the step.
- `lane_group`: submissions of a session that run at the same time on a CPU.
- `session_pauses`: waits without a thread. `session_threads`: threads of all sessions.
- `session_registry`: live sessions. `idle`: sessions whose values leave the device.
- `weights`: uploads, and a store of weights by digest that need not be sent again.
- `custom_operators`: ops of other libraries that the server's operator allows.
- `running`: templates, their values, and their runs. `checks`: validation of kernel arguments.
- `run_strategies`: other ways to run a template than op by op, from plugins.
- `memory`: the table of storages, eviction and spilling.
- `peers`: transfers of values between executors.
- `recovery`: leases, journals and snapshots of sessions, which outlive a connection and a process.
- `hookspecs`: the contract for plugins that only servers call. `builtins`: built-in plugins.
- `launch`: start of executors, and the pipe protocol with their parent. `cli`: `djinn serve` and `djinn token`.
- `malformed`: messages that cannot be decoded. `system`: functions of the operating system.
- `events`, `executor_metrics`, `session_metrics`, `session_overview`, `usage_metrics`: events and metrics.
- `request_times`: latency of requests and tokens. `histogram`: histograms of durations.
- `value_kinds`: kinds of values, such as weights and KV caches, from the client's hints.
"""

import djinn_core
from djinn_core.errors import StartupError

__version__ = "26.12.0rc1"

if djinn_core.__version__ != __version__:
    raise StartupError(
        f"djinn-server {__version__} does not fit djinn {djinn_core.__version__}: install both of one release, from one checkout or from one "
        "folder of wheels"
    )
