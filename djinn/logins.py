"""Log-ins: servers under names, for plugins with commands that make or remove them. They are files of the user, mode 0600."""

from djinn_client.runtime.connecting.logins import (
    Login,
    find_login,
    forget_login,
    is_login_name,
    list_logins,
    save_login,
)
from djinn_core.protocol.connection_file import ConnectionFile, read_connection_file

__all__ = [
    "ConnectionFile",
    "Login",
    "find_login",
    "forget_login",
    "is_login_name",
    "list_logins",
    "read_connection_file",
    "save_login",
]
