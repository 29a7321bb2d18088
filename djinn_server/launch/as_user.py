"""Prepare an executor that runs as its tenant's system user: root gives files and folders to this user."""

from __future__ import annotations

import shutil
from pathlib import Path

import attrs

from djinn_core.hookspecs.transports import TlsOptions
from djinn_core.protocol.net.tls_contexts import fingerprint_of_file
from djinn_core.system.accounts import give_files
from djinn_server.launch.executor_config import ExecutorConfig
from djinn_server.launch.self_signed import self_signed
from djinn_server.launch.system_users import SystemUser, give_folder


def prepare_for_user(config: ExecutorConfig, user: SystemUser, directory: str) -> tuple[ExecutorConfig, str]:
    """Give an executor's files to its system user. Return the changed configuration and the certificate's fingerprint.

    The user must not read the server's key. So with TLS, each executor gets its own key and certificate.
    Without TLS, the fingerprint is "".

    Args:
        config: configuration with the user's folders.
        user: the system user that runs the executor.
        directory: directory of the executor's socket, which only root can enter before the call.

    Raises:
        OSError: a file cannot be created.
        ConfigurationError: a folder belongs to another user, or the package that generates certificates is missing.
    """
    if config.models.saving is not None:
        give_folder(config.models.saving / user.folder.name, user)
    fingerprint, network = "", config.network
    if network is not None and network.tls is not None:
        tls = _own_certificate(Path(directory) / "tls", network.tls)
        fingerprint = fingerprint_of_file(tls.certificate) if tls.certificate is not None else ""
        network = attrs.evolve(network, tls=tls)
    give_files(directory, user.uid, user.gid)
    return attrs.evolve(config, network=network), fingerprint


def _own_certificate(folder: Path, server: TlsOptions) -> TlsOptions:
    certificate = self_signed(folder)
    authority = server.authority
    if authority is not None:  # maybe in a folder that only root can read
        authority = folder / "authority.pem"
        shutil.copyfile(server.authority or "", authority)
    return attrs.evolve(server, certificate=certificate.certificate, key=certificate.key, authority=authority)
