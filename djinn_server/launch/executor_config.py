"""Configuration classes of an executor, shared by the command line, the settings and the parent process.

The metadata of a field declares its flag of `djinn serve`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import attrs
import msgspec

from djinn_core.errors import ConfigurationError, StartupError
from djinn_core.hookspecs.transports import TlsOptions
from djinn_core.protocol.delivery.snapshot_schedule import SNAPSHOT_SECONDS
from djinn_core.registry.selection import Selection
from djinn_core.settings import Settings, bytes_of
from djinn_server.hookspecs.executors import ExecutorOptions
from djinn_server.hookspecs.weight_sources import WeightPermissions
from djinn_server.launch.command import EXECUTOR_MODULE
from djinn_server.launch.flags import flagged
from djinn_server.launch.listen_addresses import ListenAddresses
from djinn_server.launch.system_users import SystemUser


@attrs.frozen
class NetworkConfig:
    """Addresses at which a server listens for other machines.

    Attributes:
        listen_at: addresses by transport. An executor uses the transports that connect clients to it directly, at free ports.
        tls: the server's certificate, and the authority that signs client certificates; None: no TLS.
    """

    listen_at: ListenAddresses = attrs.field(factory=ListenAddresses)
    tls: TlsOptions | None = None


@attrs.frozen
class LogConfig:
    """Logging of a process. `level`: minimum level of messages. `debug`: parts of Djinn whose debug messages are shown."""

    level: str = "warning"
    debug: str = ""


@attrs.frozen
class MemoryConfig:
    """Memory limits for the sessions of an executor.

    Attributes:
        limit: maximum bytes of all sessions' values on the device together; 0: the device's memory.
        ahead: limit in bytes for the results of speculative runs of a session; 0: no speculative runs.
        idle_minutes: minutes without a message after which a session's values leave the device; 0: never.
    """

    limit: int = flagged(
        0,
        "--memory-gib",
        "Memory for the sessions of each executor together; further values are spilled. Default: no limit.",
        above=0,
        gib=True,
    )
    idle_minutes: float = flagged(
        0.0,
        "--idle-minutes",
        "Idle time after which a session's values move to host memory, and later to disk; 0: never.",
        least=0,
    )
    ahead: int = flagged(
        128 << 20,
        "--ahead-gib",
        "Memory for results of programs that run before their submission arrives; 0: none run ahead.",
        least=0,
        gib=True,
    )


@attrs.frozen
class AdmissionLimits:
    """Limits above which an executor admits no further session.

    Attributes:
        sessions: maximum number of simultaneous sessions.
        queue_seconds: no session is admitted while a queued submission has waited longer than these seconds.
    """

    sessions: int = flagged(
        256,
        "--most-sessions",
        "Number of sessions that each executor serves at a time; further clients are refused.",
        least=1,
    )
    queue_seconds: float = flagged(
        30.0,
        "--most-queue-seconds",
        "No further session begins while a program has waited longer for its turn on the device.",
        above=0,
    )


@attrs.frozen
class StoreConfig:
    """Configuration of the weight store: weights on disk that clients need not upload again.

    Attributes:
        directory: path of the store; None: no store.
        limit: maximum size of the store in bytes.
    """

    directory: Path | None = flagged(
        None,
        "--store",
        "Directory for weights that clients need not send again. Default: djinn/weights in your cache directory.",
    )
    limit: int = flagged(20 << 30, "--store-gib", "Maximum size of the weight store; 0: no store.", least=0, gib=True)


@attrs.frozen
class ModelConfig:
    """Weights that executors may read, save and publish for clients.

    Attributes:
        folders: folders with models that clients may name, such as caches of the Hugging Face hub.
        addresses: patterns of other addresses that clients may name.
        saving: parent of the tenants' folders for saved weights; None: clients cannot save weights.
        published: parent of the tenants' folders for published weights; None: clients cannot publish weights.
    """

    folders: tuple[Path, ...] = flagged(
        (),
        "--models",
        "Folder with models that the server may read for clients, such as a cache of the Hugging Face hub. May be repeated.",
        exists=True,
    )
    addresses: tuple[str, ...] = flagged(
        (),
        "--allow-weights",
        "Pattern of addresses that the server may read for clients, such as 'hf://org/*' or 's3://bucket/*'. May be repeated.",
    )
    saving: Path | None = flagged(
        None,
        "--save-weights",
        "Folder in which the server may save weights for clients, with a subfolder for each tenant.",
        exists=True,
    )
    published: Path | None = flagged(
        None,
        "--published",
        "Directory for weights that clients publish under names. Default: djinn/published in your cache directory.",
    )

    @property
    def permissions(self) -> WeightPermissions:
        """Return the permissions before a tenant is known. The tenant's folder for saved weights may be added later."""
        return WeightPermissions(self.folders, self.addresses, self.folders if self.folders == ANYWHERE else ())


ANYWHERE: Final = (Path(), Path("/"))  # relative paths begin in the working directory
EVERYTHING: Final = ModelConfig(ANYWHERE, ("*",))  # for a program's own executor, which may read its user's files


@attrs.frozen
class RecoveryConfig:
    """Recovery of sessions after a broken connection or a dead executor.

    Attributes:
        lease_seconds: how long a session waits for a disconnected client; 0: the session ends with its connection.
        journals: directory of the session journals, from which the next executor recovers the sessions if this
            executor dies; None: the executor writes no journals.
        journal_limit: maximum size of each journal in bytes.
        snapshot_seconds: minimum time between two snapshots of a session. A snapshot replaces the journal's records.
        keeps_journals_if_orphaned: True if a replacement starts after the death of this executor's parent. The executor
            then ends without a message to its clients, and its journals stay.
        keeps_journals_if_stopped: True if the journals also stay after the parent has stopped the executor.
    """

    lease_seconds: float = flagged(
        0.0,
        "--lease-seconds",
        "How long a session waits for a client whose connection broke; 0: it ends at once.",
        least=0,
        serve_default=30.0,
    )
    journals: Path | None = None
    journal_limit: int = flagged(
        8 << 30,
        "--journal-gib",
        "Maximum size of a session's journal. A larger session, or any session with 0, is lost with its executor. Needs a store.",
        least=0,
        gib=True,
    )
    snapshot_seconds: float = flagged(
        SNAPSHOT_SECONDS,
        "--snapshot-seconds",
        "Minimum time between snapshots of a session in its journal. They take at most a twentieth of its time.",
        least=0,
    )
    keeps_journals_if_orphaned: bool = False
    keeps_journals_if_stopped: bool = False


@attrs.frozen
class ExecutorConfig(ExecutorOptions):
    """Configuration of an executor.

    Attributes:
        device: name such as `cpu` or `cuda:0`; empty: the best device of the machine.
        network: listen addresses for other machines; None: none.
        threads: torch threads; None: torch's default.
        plugins: the plugins to load.
        hang_seconds: as `DeviceRuntime.hang_seconds`; None: the device's own value.
        compilers: names of the compilers for templates that run often, in the order in which they are tried.
        graphs: True if templates of fixed shape that run often are recorded as graphs, such as CUDA graphs.
        operators: operator libraries and modules whose custom ops clients may call, as in `--operators`.
        memory, admission, store, models, recovery, log: see their classes.
        batch_sessions: True if sessions with shared weights may run one template as a batch.
        accounts: directory of the file with the tenant's used device time; None: the time is not stored.
        state: state folder of the server, which no client may read; None: the server has no state folder.
        user: system user that runs the process and owns its folders; None: the parent's user.
        pass_variables: names or patterns of environment variables that an executor also gets if it runs as another
            `user`; `NAME@TENANT`: only executors of one tenant get it.
        tenants: True if clients come from a gateway; False if the executor trusts the program that started it.
        module: the Python module that the process runs; only tests change it.
        unused_seconds: the executor ends if no session begins within this time; 0: no limit.
    """

    device: str = ""
    network: NetworkConfig | None = None
    threads: int | None = flagged(None, "--threads", "Torch threads of each executor.", least=1)
    hang_seconds: float | None = flagged(
        None,
        "--hang-seconds",
        "An executor ends if its accelerator completes no program for this time. Default: 600, or what the device's plugin says.",
        above=0,
    )
    memory: MemoryConfig = attrs.field(factory=MemoryConfig)
    compilers: tuple[str, ...] = flagged(
        (),
        "--compile",
        "Compiler for programs that run often, such as inductor. May be repeated; compilers are tried in this order.",
    )
    graphs: bool = flagged(
        False,
        "--graphs",
        "Record programs of fixed shape that run often as graphs of the accelerator, which launch with one call. Untried on a real GPU.",
    )
    operators: tuple[str, ...] = flagged(
        (),
        "--operators",
        "Custom ops that clients may run: an operator library of a plugin, such as torchvision, or `module:NAME` for Python ops of a module. "
        "`@TENANT` at the end: for this tenant alone. May be repeated.",
    )
    batch_sessions: bool = flagged(
        False,
        "--batch-sessions",
        "Run programs of sessions with the same weights together, where their clients set exact=False. Takes more memory.",
    )
    admission: AdmissionLimits = attrs.field(factory=AdmissionLimits)
    store: StoreConfig = attrs.field(factory=StoreConfig)
    models: ModelConfig = attrs.field(factory=ModelConfig)
    recovery: RecoveryConfig = attrs.field(factory=RecoveryConfig)
    plugins: Selection = attrs.field(factory=Selection)
    log: LogConfig = attrs.field(factory=LogConfig)
    accounts: Path | None = None
    state: Path | None = None
    user: SystemUser | None = None
    pass_variables: tuple[str, ...] = flagged(
        (),
        "--pass-variable",
        "Environment variable that executors of --tenant-user get beside those of PyTorch and of accelerators, such as HF_TOKEN or 'AWS_*'. "
        "`@TENANT` at the end: for this tenant alone. May be repeated.",
    )
    tenants: bool = True
    module: str = EXECUTOR_MODULE
    unused_seconds: float = 0.0

    def with_settings(self, settings: Settings) -> ExecutorConfig:
        """Return a copy in which the settings supply unset values."""
        memory = attrs.evolve(self.memory, limit=self.memory.limit or bytes_of(settings.memory_gib))
        return attrs.evolve(
            self,
            threads=self.threads or settings.threads,
            memory=memory,
            compilers=self.compilers or settings.compilers,
            operators=self.operators or settings.operators,
            plugins=Selection(settings.plugins, frozenset(settings.disable), plugin_settings=settings.plugin_settings),
            log=attrs.evolve(self.log, debug=settings.debug),
        )

    def as_user(self, user: SystemUser) -> ExecutorConfig:
        """Return a copy for an executor that runs as `user`. The user's folders replace the shared folders."""
        folder = user.folder
        return attrs.evolve(
            self,
            user=user,
            store=attrs.evolve(self.store, directory=self.store.directory and folder / "weights"),
            models=attrs.evolve(self.models, published=self.models.published and folder / "published"),
            recovery=attrs.evolve(self.recovery, journals=self.recovery.journals and folder / "journals"),
            accounts=self.accounts and folder / "accounts" / self.accounts.name,
        )

    @property
    def strategies(self) -> Mapping[str, str]:
        """Flags of `djinn serve` that request a run strategy, by name of the strategy."""
        options = {
            "compiled": ("--compile", self.compilers),
            "graphs": ("--graphs", self.graphs),
            "batches": ("--batch-sessions", self.batch_sessions),
        }
        return {name: option for name, (option, requested) in options.items() if requested}

    @property
    def recoverable(self) -> bool:
        """True if journals let a new executor recover this executor's sessions."""
        return self.recovery.lease_seconds > 0 and self.recovery.journals is not None

    @property
    def tenant_folders(self) -> Mapping[str, Path]:
        """Folders with files of all tenants, by the flag of `djinn serve` that names them."""
        folders = {
            "--save-weights": self.models.saving,
            "--published": self.models.published,
            "--store": self.store.directory,
            "--state-dir": self.state,
        }
        return {flag: folder for flag, folder in folders.items() if folder is not None}

    def check_folders(self) -> None:
        """Check that the folders that clients read are separate from the folders with files of all tenants.

        Raises:
            ConfigurationError: two of these folders overlap.
        """
        tenant_folders = self.tenant_folders
        readable = [("--models", folder) for folder in self.models.folders]
        readable += [(flag, folder) for flag, folder in tenant_folders.items() if flag == "--save-weights"]
        for (flag, folder), (other_flag, other) in itertools.product(readable, tenant_folders.items()):
            first, second = folder.resolve(), other.resolve()
            if flag != other_flag and (first.is_relative_to(second) or second.is_relative_to(first)):
                raise ConfigurationError(
                    f"{flag} {folder} and {other_flag} {other} overlap, so clients could read files of other tenants: choose "
                    "separate folders"
                )

    @property
    def permissions(self) -> WeightPermissions:
        """Return the permissions of clients, without the tenant's folder that `WeightReader.save_in` adds."""
        hidden = () if self.models.folders == ANYWHERE else tuple(self.tenant_folders.values())
        return attrs.evolve(self.models.permissions, hidden=hidden)

    def sendable(self) -> ExecutorConfig:
        """Return a copy whose plugin settings are JSON values."""
        return attrs.evolve(self, plugins=self.plugins.sendable())

    def encode(self) -> bytes:
        """Encode the configuration as JSON, for an executor on another machine. `decode_config` decodes it."""
        return msgspec.json.encode(self.sendable(), enc_hook=str)


def decode_config(data: bytes) -> ExecutorConfig:
    """Decode the configuration that `ExecutorConfig.encode` wrote.

    Raises:
        StartupError: the JSON is invalid, because the machines run different versions of Djinn.
    """
    try:
        return msgspec.json.decode(data, type=ExecutorConfig, dec_hook=lambda kind, text: kind(text))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StartupError(
            f"cannot decode the configuration of an executor ({error}): both machines must run the same Djinn"
        ) from error
