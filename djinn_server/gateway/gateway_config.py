"""Configuration of a gateway, which includes the configuration of its executors."""

from __future__ import annotations

from pathlib import Path

import attrs

from djinn_core.registry.embedded_executors import LOCAL
from djinn_core.settings import Settings
from djinn_server.launch.engines import EngineConfig
from djinn_server.launch.executor_config import ExecutorConfig, NetworkConfig
from djinn_server.launch.flags import flagged


@attrs.frozen
class AccessConfig:
    """Configuration of who may use a gateway, and of how operators monitor it.

    Attributes:
        token_file: file with a token or a token table; None: the token in the environment, or a new token.
        authenticators: names of plugins' authenticators, in the order in which they are called.
        operations_port: port for `/livez`, `/readyz` and `/metrics`; 0: any free port; None: these routes are not served.
        open_probes: True if `/livez` and `/readyz` need no token.
        audit_log: file for connections and refusals; None: only the server's log has them.
        plaintext_accepted: True if the operator accepts unencrypted traffic on a network.
    """

    token_file: Path | None = flagged(
        None,
        "--token-file",
        "File with the token that clients must show, or with a table of tokens (`djinn token create`). Mode 0600.",
    )
    authenticators: tuple[str, ...] = flagged(
        (),
        "--authenticator",
        "Authenticator of a plugin, such as jwt, in addition to --token-file. May be repeated.",
    )
    operations_port: int | None = flagged(
        None,
        "--operations-port",
        "Port for /livez, /readyz and /metrics (Prometheus), which require a token. 0: any free port.",
        least=0,
        most=65535,
    )
    open_probes: bool = flagged(
        False,
        "--open-probes",
        "Answer /livez and /readyz without a token, with an HTTP status only, for probes of an orchestrator.",
    )
    audit_log: Path | None = flagged(
        None, "--audit-log", "File for a log of connections and refusals, in JSON lines.", file=True
    )
    plaintext_accepted: bool = flagged(
        False,
        "--insecure-plaintext-on-network",
        "Accept that programs, data and the token travel unencrypted to other machines.",
    )


@attrs.frozen
class GatewayConfig:
    """Configuration of a gateway.

    Attributes:
        network: addresses at which the gateway listens. Executors also listen there, with directly reachable transports.
        advertise: host name of this machine in the connection file; empty: detected.
        pinned: True if clients check the certificate by the fingerprint in the connection file.
        devices: devices to offer, an executor for each; `all`: every device; empty: the best device of the machine.
        assignment: name of the policy that assigns new sessions to executors; empty: the name in the settings.
        engine: configuration of the engine that starts the executors.
        executor: configuration of all executors.
        access: who may use the gateway.
        state_dir: folder with the files from which a restarted server continues sessions; None: nothing is stored.
        lasting: True if a restarted server will use this folder and the same ports.
        tenant_users: system users of tenants as `TENANT=USER`; empty: executors run as the server's user.
        tenant_dir: parent of the private folders of these users.
        connection_file: file for URLs and token; None: in `state_dir` if it is `lasting`, else in the user's directory.
        drain_seconds: seconds for which sessions may continue after a signal to stop.
        start_timeout: seconds in which the executors must start.
        log_level: log level of gateway and executors.
    """

    network: NetworkConfig = attrs.field(factory=NetworkConfig)
    advertise: str = ""
    pinned: bool = False
    devices: tuple[str, ...] = flagged(
        (),
        "--device",
        "Device to offer, such as cpu or cuda:0, or `all`. May be repeated: an executor starts for each.",
    )
    assignment: str = flagged(
        "",
        "--assignment",
        "Policy that chooses the executor of a new session: least_loaded (default), or a plugin's, such as affinity or fair_share.",
    )
    engine: EngineConfig = attrs.field(factory=EngineConfig)
    executor: ExecutorConfig = attrs.field(factory=ExecutorConfig)
    access: AccessConfig = attrs.field(factory=AccessConfig)
    state_dir: Path | None = flagged(
        None,
        "--state-dir",
        "Folder with which a restarted server continues its sessions: journals, the token and a self-signed certificate. Default: one for "
        "--port in djinn/servers in your state directory. Without a fixed port, sessions end with the server.",
    )
    lasting: bool = False
    tenant_users: tuple[str, ...] = flagged(
        (),
        "--tenant-user",
        "TENANT=USER: run the executors of this tenant as a system user of its own, such as alice=djinn-a or alice=70001. May be repeated; "
        "tenants without a user are refused. The server must run as root.",
    )
    tenant_dir: Path | None = flagged(
        None,
        "--tenant-dir",
        "Folder in which each tenant of --tenant-user has a private folder for weights, journals and caches, such as /var/lib/djinn.",
    )
    connection_file: Path | None = flagged(
        None,
        "--connection-file",
        "File for the URLs and the token, written when clients can connect. Only you can read it.",
    )
    drain_seconds: float = flagged(30.0, "--drain-seconds", "How long a server that stops waits for sessions.", least=0)
    start_timeout: float = 60.0
    log_level: str = "info"

    def with_settings(self, settings: Settings) -> GatewayConfig:
        """Return a copy in which the settings supply the values that the command line does not set."""
        return attrs.evolve(
            self,
            devices=self.devices or ((settings.device,) if settings.device else ()),
            assignment=self.assignment or settings.assignment,
            engine=self.engine.with_settings(settings),
            executor=self.executor.with_settings(settings),
            access=attrs.evolve(self.access, authenticators=self.access.authenticators or settings.authenticators),
            start_timeout=settings.start_timeout,
        )

    def executor_on(self, device: str, accounts: Path | None) -> ExecutorConfig:
        """Return the configuration of the executor on a device.

        `accounts`: folder for the used device time of tenants; None: it is not stored.
        """
        log, recovery = attrs.evolve(self.executor.log, level=self.log_level), self.executor.recovery
        outlives = self.lasting and self.engine.name in {"", LOCAL} and recovery.journals is not None
        return attrs.evolve(
            self.executor,
            device=device,
            network=self.network,
            tenants=True,
            log=log,
            accounts=accounts,
            recovery=attrs.evolve(recovery, keeps_journals_if_stopped=outlives),
        )
