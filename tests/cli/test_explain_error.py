"""Each class of error has a code of its own and a section with cause and cure; `djinn explain-error` finds it."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import subprocess
import sys
import traceback

import pytest
from click.testing import CliRunner

import djinn
import djinn_client
import djinn_core
import djinn_server
from djinn_core.cli import main
from djinn_core.cli.explain_error import read_sections
from djinn_core.errors import DjinnError, SessionLost


def error_classes():
    for package in (djinn_core, djinn_client, djinn_server):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(("__main__", "notebook.magics")):  # the latter needs IPython
                importlib.import_module(module.name)
    found, left = set(), [DjinnError]
    while left:
        error = left.pop()
        if error not in found and error.__module__.partition(".")[0] in {
            "djinn",
            "djinn_core",
            "djinn_client",
            "djinn_server",
        }:
            found.add(error)
            left += error.__subclasses__()
    return found


def test_each_error_class_has_documentation_section():
    public = {error for error in error_classes() if error.__module__ == "djinn.errors"}
    assert len(public) > 20
    sections = read_sections()
    assert sections.keys() == {error.code for error in public}
    for error in public:
        assert "code" in vars(error), f"{error.__name__} has the code of another class"
        assert sections[error.code].startswith(f"`{error.__name__}`: "), error.code
        assert "\n- Cause: " in sections[error.code], error.code
        assert "\n- Cure: " in sections[error.code], error.code


def test_private_errors_have_code_of_public_base():
    assert {error.__name__ for error in error_classes() if error.__module__ != "djinn.errors"} == {
        "ClientLeft",
        "CrashLoop",
        "FramesLost",
        "HookError",
        "UnexpectedCertificate",
    }


@pytest.mark.parametrize("asked", ["session-lost", "SessionLost", "djinn.errors.SessionLost"])
def test_explain_error_accepts_code_or_class(asked):
    done = CliRunner().invoke(main, ["explain-error", asked])
    assert done.exit_code == 0
    assert "djinn.init()" in done.output
    assert "`standby`" in done.output
    assert "forked" not in done.output


def test_explain_error_lists_codes_and_suggests_nearest():
    listed = CliRunner().invoke(main, ["explain-error"]).output
    assert all(code in listed for code in read_sections())
    wrong = CliRunner().invoke(main, ["explain-error", "sesion-lost"])
    assert wrong.exit_code == 1
    assert "did you mean 'session-lost'?" in wrong.output


def test_error_code_is_in_traceback_only():
    error = SessionLost("the executor died")
    assert str(error) == "the executor died"
    assert "djinn explain-error session-lost" in "".join(traceback.format_exception(error))
    assert "explain-error" not in "".join(
        traceback.format_exception(djinn.errors.RemoteIndexError("index out of range"))
    )


def test_errors_pickle_without_djinn_import():
    """Engines send errors between processes, and an executor has only the core. cloudpickle copies unknown classes."""
    program = (
        "import pickle, sys; from djinn_core.errors import RemoteError; "
        "error = RemoteError('no', 'aten::add', 'a.py:3'); error.add_note('of a user'); data = pickle.dumps(error); assert 'djinn' not in sys.modules; "
        "sys.stdout.buffer.write(data)"
    )
    made = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout
    error = pickle.loads(made)
    assert type(error) is djinn.errors.RemoteError
    assert (str(error), error.op, error.site, error.__notes__[-1]) == (
        str(djinn.errors.RemoteError("no", "aten::add", "a.py:3")),
        "aten::add",
        "a.py:3",
        "of a user",
    )
