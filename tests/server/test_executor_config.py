"""Configuration of executors: from the command line of `djinn serve` into the gateway's, and over the pipe to the executor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import click
import pytest
from click.testing import CliRunner

from djinn_core.cli import main
from djinn_core.errors import ConfigurationError
from djinn_core.hookspecs.transports import TlsOptions
from djinn_core.registry.selection import Selection
from djinn_core.settings import PluginSetting, Settings
from djinn_server.cli.serve import config_options
from djinn_server.gateway.gateway_config import AccessConfig, GatewayConfig
from djinn_server.launch.executor_config import (
    AdmissionLimits,
    ExecutorConfig,
    LogConfig,
    MemoryConfig,
    ModelConfig,
    NetworkConfig,
    RecoveryConfig,
    StoreConfig,
)
from djinn_server.launch.flags import flagged
from djinn_server.launch.listen_addresses import ListenAddress, ListenAddresses
from djinn_server.launch.orders import Start, read_order, to_line
from djinn_server.launch.system_users import SystemUser

FULL = ExecutorConfig(
    device="cuda:1",
    network=NetworkConfig(
        ListenAddresses("::1", {"tcp": ListenAddress("10.0.0.1", 5)}, frozenset({"http"})),
        TlsOptions(Path("/cert"), Path("/key")),
    ),
    threads=3,
    hang_seconds=9.0,
    memory=MemoryConfig(1 << 40),
    compilers=("inductor",),
    graphs=True,
    batch_sessions=True,
    operators=("torchvision",),
    admission=AdmissionLimits(7, 1.5),
    store=StoreConfig(Path("/store"), 5),
    models=ModelConfig((Path("/models"),), ("hf://org/*",)),
    recovery=RecoveryConfig(2.5, Path("/journals"), 9, 0.5),
    plugins=Selection(("one",), frozenset({"two"}), plugin_settings=(PluginSetting("one", "secret", "hush", "file"),)),
    log=LogConfig("info", "server"),
    accounts=Path("/accounts"),
    state=Path("/state"),
    user=SystemUser("alice", 70_001, 70_002, Path("/tenants/alice")),
    pass_variables=("HF_TOKEN@alice",),
    tenants=False,
    module="other",
    unused_seconds=7.5,
)


def parse_config(config: type, *arguments: str) -> Any:
    """Return the configuration that these arguments give."""
    found: list[Any] = []
    command = click.command()(config_options(config, "config")(lambda **given: found.append(given["config"])))
    command.main(arguments, standalone_mode=False)
    return found[0]


def test_every_field_reaches_executor():
    defaults = ExecutorConfig()
    same = [name for name in attrs.fields_dict(ExecutorConfig) if getattr(FULL, name) == getattr(defaults, name)]
    assert not same, "this test would not see whether these arrive"
    start = Start("/private", b"key", FULL)
    assert read_order(to_line(start)) == start
    assert read_order(to_line(Start("/private", b"key", defaults))).config == defaults
    assert "hush" not in repr(start)
    assert "key" not in repr(start)


def test_without_flags_every_field_has_its_default():
    expected = GatewayConfig(executor=ExecutorConfig(recovery=RecoveryConfig(lease_seconds=30.0)))
    assert parse_config(GatewayConfig) == expected


def test_every_flag_sets_its_field(tmp_path):
    arguments = (
        "--device=cpu --device=cuda:0 --threads=3 --hang-seconds=9 --memory-gib=0.5 --compile=a --compile=b "
        f"--graphs --most-sessions=7 --most-queue-seconds=1.5 --store=/store --store-gib=2 --lease-seconds=0 "
        "--state-dir=/state --journal-gib=0 --snapshot-seconds=0 --token-file=/token --authenticator=jwt --operations-port=0 "
        f"--models={tmp_path} --models=/ --allow-weights=hf://a/* --allow-weights=s3://b/* "
        "--open-probes --audit-log=/audit --insecure-plaintext-on-network --connection-file=/connection --drain-seconds=0"
    )
    assert parse_config(GatewayConfig, *arguments.split()) == GatewayConfig(
        devices=("cpu", "cuda:0"),
        executor=ExecutorConfig(
            threads=3,
            hang_seconds=9.0,
            memory=MemoryConfig(1 << 29),
            compilers=("a", "b"),
            graphs=True,
            admission=AdmissionLimits(7, 1.5),
            store=StoreConfig(Path("/store"), 2 << 30),
            models=ModelConfig((tmp_path, Path("/")), ("hf://a/*", "s3://b/*")),
            recovery=RecoveryConfig(0.0, None, 0, 0.0),
        ),
        access=AccessConfig(
            Path("/token"), ("jwt",), 0, open_probes=True, audit_log=Path("/audit"), plaintext_accepted=True
        ),
        state_dir=Path("/state"),
        connection_file=Path("/connection"),
        drain_seconds=0.0,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        "--threads=0",
        "--memory-gib=0",
        "--store-gib=-1",
        "--operations-port=65536",
        "--most-sessions=x",
    ],
)
def test_value_out_of_bounds_is_refused(wrong):
    with pytest.raises(click.BadParameter):
        parse_config(GatewayConfig, wrong)


def test_flag_is_one_field():
    @attrs.frozen
    class Inner:
        share: float = flagged(0.5, "--share", "A share.", least=0, most=1)

    outer = attrs.make_class("Outer", {"inner": attrs.field(factory=Inner, type=Inner)}, frozen=True)
    assert parse_config(outer) == outer()
    assert parse_config(outer, "--share", "0.25") == outer(Inner(0.25))


def test_settings_are_defaults_of_flags():
    settings = Settings(device="cpu", threads=4, memory_gib=1, compilers="x", start_timeout=3, debug="server")
    given = GatewayConfig(executor=ExecutorConfig(threads=2)).with_settings(settings)
    assert (given.devices, given.start_timeout) == (("cpu",), 3.0)
    assert given.executor.threads == 2
    assert given.executor.memory == MemoryConfig(1 << 30)
    assert given.executor.compilers == ("x",)
    assert given.executor.log.debug == "server"
    on = given.executor_on("cpu:0", Path("/accounts/0"))
    assert (on.device, on.network, on.log.level) == ("cpu:0", given.network, "info")


def test_gateway_executors_have_tenants():
    config = GatewayConfig(executor=ExecutorConfig(tenants=False))
    assert config.executor_on("cpu:0", Path("/accounts/0")).tenants


FOLDERS = {
    "--save-weights": lambda folder: ExecutorConfig(models=ModelConfig(saving=folder)),
    "--published": lambda folder: ExecutorConfig(models=ModelConfig(published=folder)),
    "--store": lambda folder: ExecutorConfig(store=StoreConfig(folder)),
    "--state-dir": lambda folder: ExecutorConfig(state=folder),
}


@pytest.mark.parametrize("flag", FOLDERS)
@pytest.mark.parametrize(
    ("models", "own"), [("a", "a"), ("a", "a/b"), ("a/b", "a"), (".", "a"), ("link", "a/b"), ("a", "link")]
)
def test_models_folder_must_not_overlap_tenant_folders(flag, models, own, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    config = FOLDERS[flag](tmp_path / own)
    config = attrs.evolve(config, models=attrs.evolve(config.models, folders=(tmp_path / "c", tmp_path / models)))
    with pytest.raises(ConfigurationError, match=f"--models .* and {flag} .* overlap"):
        config.check_folders()


@pytest.mark.parametrize("other", ["--published", "--store", "--state-dir"])
def test_saving_folder_must_not_overlap_other_tenant_folders(other, tmp_path):
    def config(one, two):
        first, second = FOLDERS["--save-weights"](tmp_path / one), FOLDERS[other](tmp_path / two)
        models = ModelConfig(
            saving=first.models.saving or second.models.saving,
            published=first.models.published or second.models.published,
        )
        store = first.store if first.store.directory else second.store
        return ExecutorConfig(models=models, store=store, state=first.state or second.state)

    for one, two in (("a", "a/tenant"), ("a/tenant", "a")):
        with pytest.raises(ConfigurationError, match="overlap"):
            config(one, two).check_folders()
    config("a", "ab").check_folders()


def test_serve_refuses_overlapping_folders(tmp_path):
    (tmp_path / "published").mkdir(mode=0o700)
    result = CliRunner().invoke(
        main, ["serve", "--device", "cpu", "--models", str(tmp_path), "--published", str(tmp_path / "published")]
    )
    assert result.exit_code
    assert "overlap" in str(result.exception) + result.output
