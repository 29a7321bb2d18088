"""Authenticate clients by the server's tokens, and by authenticators of plugins that the operator chose."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import Final

from djinn_core.errors import ConfigurationError, PluginError
from djinn_core.logs import HIDDEN, get_logger
from djinn_core.registry.registry import Registry
from djinn_server.gateway.tenants import MAX_TENANTS
from djinn_server.gateway.token_authenticator import TokenAuthenticator
from djinn_server.hookspecs.authenticators import Authenticator, Credentials, Denial, Identity
from djinn_server.hookspecs.quotas import Quota
from djinn_server.launch.token_table import check_tenant
from djinn_server.rate_limit import LogRateLimit

_UNKNOWN: Final = Denial(
    "this server does not know the token, or it was revoked: ask the server's operator for a new one. The operator finds the "
    "server's own token in the connection file, and makes tokens of tenants with `djinn token create`",
    "token",
)
FAILED: Final = Denial(
    "the server cannot check the credentials of this client: its operator finds the reason in the server's log",
    "authenticator",
)
_REASON_LENGTH: Final = 1000  # maximum characters of a denial
_KIND: Final = re.compile("[a-z][a-z_]{0,31}")  # kind of a refusal in audit log and metrics
_MAX_RETRY_SECONDS: Final = 3600.0  # maximum seconds of `retry_after`
_KEY: Final = re.compile(r"[\x21-\x7e]{0,64}")
_log = get_logger("djinn.server")


class Authentication:
    """Determine the identity of clients. If an authenticator fails, the client is refused."""

    def __init__(self, tokens: TokenAuthenticator) -> None:
        self._tokens = tokens
        self._authenticators: dict[str, tuple[Authenticator, str]] = {}
        self._log_limit = LogRateLimit()

    def use(self, registry: Registry, names: Sequence[str]) -> None:
        """From now on, also use the plugins' authenticators with these names, in this order.

        Raises:
            ConfigurationError: the configuration of an authenticator is invalid.
            PluginError: an authenticator does not exist, or failed.
        """
        self._authenticators = {name: _prepare(registry, name) for name in names if name != self._tokens.name}

    @property
    def tenants(self) -> frozenset[str]:
        """Tenants with a valid token. Authenticators of plugins may know further tenants."""
        return self._tokens.tenants

    @property
    def expected(self) -> int:
        """Number of tenants that may connect, or the limit of the gateway if authenticators know further tenants."""
        return MAX_TENANTS if self._authenticators else len(self.tenants)

    @property
    def has_keys(self) -> bool:
        """True if clients may have other credentials than the server's own token."""
        return self._tokens.has_table or bool(self._authenticators)

    def identify(self, credentials: Credentials) -> Identity | Denial:
        """Return the identity of a client, or its denial."""
        answer = self._tokens.authenticate(credentials)
        if answer is not None:
            return answer
        for authenticator, plugin in self._authenticators.values():
            result = self._call(authenticator, plugin, credentials)
            if result is not None:
                return result
        return _UNKNOWN

    def is_valid(self, key: str) -> bool:
        """Return True while sessions whose identity has this key may continue."""
        name, separator, plugin_key = key.partition(":")
        if not separator:
            return self._tokens.is_valid(key)
        if name not in self._authenticators:  # the key is from an earlier server with another authenticator
            return False
        authenticator, plugin = self._authenticators[name]
        try:
            return authenticator.is_valid(plugin_key) is True
        except Exception as error:
            self._log_failure(
                "an authenticator failed: its sessions are ended", authenticator, plugin, _describe(error)
            )
            return False

    def _call(self, authenticator: Authenticator, plugin: str, credentials: Credentials) -> Identity | Denial | None:
        try:
            result = authenticator.authenticate(credentials)
            if result is None:
                return None
            if isinstance(result, Denial):
                return _redacted(credentials, result)
            self._check(result)
        except Exception as error:
            self._log_failure("an authenticator failed: the client is refused", authenticator, plugin, _describe(error))
            return FAILED
        quota = self._tokens.quota_of(result.tenant) if result.quota == Quota() else result.quota
        key = result.key and f"{authenticator.name}:{result.key}"
        return Identity(result.tenant, key, result.monitor, quota)

    def _check(self, result: object) -> None:
        if not isinstance(result, Identity):
            raise _InvalidResult(f"`authenticate` must return an Identity or a Denial, not {type(result).__name__}")
        key, monitor, quota = _as_object(result.key), _as_object(result.monitor), _as_object(result.quota)
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise _InvalidResult("the `key` of an identity must be text of at most 64 printable characters")
        if not isinstance(monitor, bool) or not isinstance(quota, Quota):
            raise _InvalidResult("`monitor` of an identity must be a bool, and `quota` a Quota")
        try:
            check_tenant(result.tenant)
        except (ConfigurationError, TypeError):
            raise _InvalidResult("the `tenant` of an identity is not a valid name") from None

    def _log_failure(self, what: str, authenticator: Authenticator, plugin: str, error: str) -> None:
        skipped = self._log_limit.count(f"{what} {authenticator.name}")
        if skipped is not None:
            _log.error(what, authenticator=authenticator.name, plugin=plugin, error=error, left_out=skipped)


class _InvalidResult(Exception):  # noqa: N818 - a signal within this file
    """An authenticator returned an invalid result. The message does not quote the result, which may contain a secret."""


def _prepare(registry: Registry, name: str) -> tuple[Authenticator, str]:
    for authenticator in registry.authenticators:
        if authenticator.name == name:
            plugin = registry.owner("authenticators", name)
            try:
                authenticator.prepare()
            except ConfigurationError as error:
                raise ConfigurationError(f"the authenticator {name!r} ({plugin}) cannot be used: {error}") from error
            except Exception as error:
                raise PluginError(f"the authenticator {name!r} ({plugin}) failed: {_describe(error)}") from error
            return authenticator, plugin
    installed = ", ".join(authenticator.name for authenticator in registry.authenticators) or "none"
    raise PluginError(
        f"no installed plugin has the authenticator {name!r} (authenticators: {installed}). `djinn plugins` shows the installed plugins"
    )


def _redacted(credentials: Credentials, denial: Denial) -> Denial:
    """Return a plugin's denial without the client's token, for clients and logs."""
    reason = str(denial.reason)[:_REASON_LENGTH]
    if credentials.token:
        reason = reason.replace(credentials.token, HIDDEN)
    kind = denial.kind if _KIND.fullmatch(str(denial.kind)) else "credentials"
    return Denial(reason, kind, bool(denial.retry), min(max(0.0, float(denial.retry_after)), _MAX_RETRY_SECONDS))


def _as_object(value: object) -> object:
    """Return a plugin's value as `object`, so that the type checker lets its actual type be checked."""
    return value


def _describe(error: Exception) -> str:
    """Describe an exception by its type and line. Omit its message, which may contain credentials."""
    if isinstance(error, _InvalidResult):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}" if frames else type(error).__name__
