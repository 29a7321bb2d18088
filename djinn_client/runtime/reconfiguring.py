"""Changes of settings while a session is open: whether the session can apply them, or must end."""

from __future__ import annotations

import attrs

from djinn_core.registry.registry import Registry
from djinn_core.settings import Settings

# Settings that are read at each use: for the next wait, program, upload or connection.
AT_ONCE = frozenset((
    "checkpoint_instructions", "client_fallback", "connect_timeout", "debug", "prepared_seconds", "progress", "start_at_import",
    "start_timeout", "strict", "trace_plugins", "wait_timeout",
))  # fmt: skip
# Settings that affect plans: a change drops the plans.
PLANNING = frozenset(("exact", "latency_target", "pins", "placement_policy", "scheduler"))
# Settings that affect the registry.
PLUGINS = frozenset(("disable", "plugin_settings", "plugins", "strict", "trace_plugins"))
# Settings of executors that this program starts, or of connections to servers: a session has only one of the two.
_OWN_EXECUTORS = frozenset((
    "compilers", "engine", "engine_address", "executor", "executors", "memory_gib", "operators", "placement_group",
    "recover", "resources", "runtime_env", "threads",
))  # fmt: skip
_SERVERS = frozenset((
    "assignment_hint", "server_devices", "spread", "tls_authority", "tls_certificate", "tls_fingerprints", "tls_key", "token",
))  # fmt: skip


def changed(before: Settings, after: Settings) -> frozenset[str]:
    """Return the names of the settings that differ."""
    names = attrs.fields_dict(Settings)
    return frozenset(name for name in names if getattr(before, name) != getattr(after, name))


def needing_new_session(
    names: frozenset[str], before: Settings, executor_plugins_differ: bool = False
) -> frozenset[str]:
    """Return the changed settings in `names` that an open session cannot apply.

    An open session cannot change the compilers and operators that its own executors have loaded, or its transports.

    Args:
        names: names of changed settings.
        before: settings of the open session.
        executor_plugins_differ: result of the function `executor_plugins_differ`.
    """
    remote = bool(before.servers or before.connection_file)
    changeable = AT_ONCE | PLANNING | (_OWN_EXECUTORS if remote else _SERVERS)
    return names - (changeable if executor_plugins_differ and not remote else changeable | PLUGINS)


def executor_plugins_differ(before: Registry, after: Registry, settings: Settings) -> bool:
    """Return True if the compilers or operators that `settings` enable differ between `before` and `after`."""
    kinds = {"compilers"} if settings.compilers else set()
    kinds |= {"operators"} if settings.operators else set()

    def of_executors(registry: Registry) -> set[object]:
        rows = {row for row in registry.rows if row.status == "active" and kinds.intersection(row.kind.split(","))}
        return {*rows, *registry.settings_given_to({row.name for row in rows})}

    return of_executors(before) != of_executors(after)
