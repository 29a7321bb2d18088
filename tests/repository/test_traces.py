"""The repository names no machine, no person and no registry: it must work for whoever clones it."""

from __future__ import annotations

import ast
import re

# Written in pieces, so that this file does not find itself.
TRACES = {
    "a path of one machine": re.compile("/" + r"(?:work|root|home/\w+|Users/\w+)/"),
    "a registry's host": re.compile(
        r"(?i)\b(?:" + "|".join(("py" + r"pi\.org", "python" + r"hosted\.org", "download\\.py" + r"torch\.org")) + ")"
    ),
    "a private key": re.compile("BEGIN " + r"(?:RSA |EC |OPENSSH )?PRIVATE KEY"),
}


def test_no_traces(root, files):
    found = []
    for path in files:
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(root)} has {what}: {m[0]}" for what, p in TRACES.items() for m in p.finditer(text)
        ]
    assert not found


def calls(path):
    """Names of what a file calls, such as `torch.load`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_nothing_unpickles(root, sources):
    shipped = [path for path in sources if path.relative_to(root).parts[0] in {"djinn", "djinn_core", "plugins"}]
    forbidden = {"pickle.load", "pickle.loads", "torch.load", "marshal.loads", "dill.loads", "eval", "exec"}
    guilty = [
        f"{path.relative_to(root)} calls {name}"
        for path in shipped
        if "tests" not in path.parts
        for name in calls(path)
        if name in forbidden
    ]
    assert not guilty
