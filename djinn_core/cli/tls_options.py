"""Options of `djinn serve` about TLS."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import click

from djinn_core.directories import state_directory
from djinn_core.errors import ConfigurationError
from djinn_core.hookspecs.transports import TlsOptions
from djinn_core.launch.addresses import is_loopback
from djinn_core.launch.self_signed import self_signed

_FILE = click.Path(path_type=Path, dir_okay=False)


@attrs.frozen
class TlsChoice:
    """TLS options of the operator."""

    certificate: Path | None
    key: Path | None
    self_signed: bool
    client_authority: Path | None

    def options(self, names: tuple[str, ...]) -> TlsOptions | None:
        """The files to use; None if there is to be no TLS. A certificate that is made is valid for `names`, too.

        Raises:
            ConfigurationError: the options contradict each other, or a certificate cannot be made.
        """
        if self.self_signed and self.certificate:
            raise ConfigurationError("--tls-self-signed makes a certificate: leave out --tls-cert and --tls-key")
        if self.key and not self.certificate:
            raise ConfigurationError("--tls-key needs the certificate that it belongs to: --tls-cert FILE")
        if self.self_signed:
            made = self_signed(state_directory() / "tls", tuple(name for name in names if not is_loopback(name)))
            return TlsOptions(made.certificate, made.key, self.client_authority)
        if self.certificate is not None:
            return TlsOptions(self.certificate.resolve(), self.key and self.key.resolve(), self.client_authority)
        if self.client_authority:
            raise ConfigurationError("--tls-client-ca needs TLS: --tls-cert and --tls-key, or --tls-self-signed")
        return None


def tls_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of TLS, handed to `command` as one `TlsChoice` named `tls`."""

    @click.option("--tls-cert", type=_FILE, help="PEM file with the server's certificate: everything goes under TLS.")
    @click.option("--tls-key", type=_FILE, help="PEM file with its key, unless that is in the same file.")
    @click.option(
        "--tls-self-signed",
        is_flag=True,
        help="TLS with a certificate that the server makes and keeps; the connection file says its fingerprint.",
    )
    @click.option("--tls-client-ca", type=_FILE, help="Clients must show a certificate of this authority (PEM).")
    @functools.wraps(command)
    def packed(
        tls_cert: Path | None, tls_key: Path | None, tls_self_signed: bool, tls_client_ca: Path | None, **others: Any
    ) -> None:
        command(tls=TlsChoice(tls_cert, tls_key, tls_self_signed, tls_client_ca), **others)

    return packed
