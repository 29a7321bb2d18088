"""The repository names no machine, no person and no registry: it must work for whoever clones it."""

from __future__ import annotations

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


def test_nothing_unpickles(root, sources):
    ours = [path for path in sources if path.is_relative_to(root / "djinn_core") or "plugins" in path.parts]
    call = re.compile(r"\b(?:pickle\.loads?|torch\.load|marshal\.loads?|dill\.loads?)\(|(?<![\w.])(?:eval|exec)\(")
    shipped = [path for path in ours if "tests" not in path.relative_to(root).parts]
    assert [f"{p.relative_to(root)}: {m[0]}" for p in shipped for m in call.finditer(p.read_text())] == []
