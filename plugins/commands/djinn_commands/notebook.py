"""The IPython extension of `%load_ext djinn`.

IPython need not be installed: modules that need it are imported when IPython loads the extension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register `%djinn_status` and `%%djinn_profile` with IPython's shell. IPython calls this for `%load_ext djinn`."""
    from djinn_commands.notebook_magics import DjinnMagics

    shell.register_magics(DjinnMagics)
