"""Changes of settings while a session is open: those that it can take over, and tensors that a new session would lose."""

from __future__ import annotations

import attrs

from djinn_core.registry.registry import Registry
from djinn_core.settings import Settings

# Looked at again whenever they matter: for the next wait, program, upload or connection.
AT_ONCE = frozenset((
    "checkpoint_instructions", "client_fallback", "connect_timeout", "debug", "prepared_seconds", "progress", "start_at_import",
    "start_timeout", "strict", "trace_plugins", "wait_timeout",
))  # fmt: skip
# What plans depend on: those that were made before are made again.
PLANNING = frozenset(("exact", "latency_target", "pins", "placement_policy", "scheduler"))
# What the registry depends on.
PLUGINS = frozenset(("disable", "plugin_settings", "plugins", "strict", "trace_plugins"))
# Of executors that this program starts, and of connections to servers: a session has one or the other.
_OWN_EXECUTORS = frozenset((
    "compilers", "engine", "engine_address", "executor", "executors", "memory_gib", "memory_policy", "operators", "placement_group",
    "recover", "resources", "runtime_env", "threads",
))  # fmt: skip
_SERVERS = frozenset((
    "assignment_hint", "server_devices", "spread", "tls_authority", "tls_certificate", "tls_fingerprints", "tls_key", "token",
))  # fmt: skip


def changed(before: Settings, after: Settings) -> frozenset[str]:
    """Names of the settings that differ."""
    names = attrs.fields_dict(Settings)
    return frozenset(name for name in names if getattr(before, name) != getattr(after, name))


def needing_new_session(
    names: frozenset[str], before: Settings, executor_plugins_differ: bool = False
) -> frozenset[str]:
    """Those of the changed settings `names` that an open session cannot take over.

    Of plugins it uses the client's, which may change, and the compilers and memory policies of its executors, which have
    loaded them. It was given its transports when it began.

    Args:
        names: what differs.
        before: the settings that the session began with.
        executor_plugins_differ: as the function of that name answers.
    """
    remote = bool(before.servers or before.connection_file)
    kept = AT_ONCE | PLANNING | (_OWN_EXECUTORS if remote else _SERVERS)
    return names - (kept if executor_plugins_differ and not remote else kept | PLUGINS)


def executor_plugins_differ(before: Registry, after: Registry, settings: Settings) -> bool:
    """True if other plugins with compilers, operators or memory policies that `settings` use are active, or with other settings."""
    kinds = {"compilers"} if settings.compilers else set()
    kinds |= {"memory_policies"} if settings.memory_gib else set()
    kinds |= {"operators"} if settings.operators else set()

    def of_executors(registry: Registry) -> set[object]:
        found = {row for row in registry.rows if row.status == "active" and kinds.intersection(row.kind.split(","))}
        return {*found, *registry.settings_given_to({row.name for row in found})}

    return of_executors(before) != of_executors(after)
