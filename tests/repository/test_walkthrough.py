"""The walkthrough is true: its names exist, and the client's steps run in its order."""

import re
import sys

import torch

ROW = re.compile(r"^\| (?P<step>[^|]+) \| (?P<where>`[^|]+) \|", re.MULTILINE)
REMOTE = "remote_accelerator:0"


def places(text):
    """Files and names of one cell: `file.py`: `name`, `name`."""
    file = None
    for name in re.findall(r"`([^`]+)`", text):
        if name.endswith((".py", ".cpp")):
            file = name
            yield file, None
        else:
            yield file, name


def table(root, heading):
    text = (root / "docs" / "walkthrough.md").read_text()
    rows = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [place for found in ROW.finditer(rows.replace("| where |", "")) for place in places(found[0])]


def path_of(root, file):
    return (root if file.endswith(".cpp") else root / "djinn_core") / file


def defined(root, file, name):
    text = path_of(root, file).read_text()
    last = name.rsplit(".", maxsplit=1)[-1]
    if file.endswith(".cpp"):
        return re.search(rf"^\w[^\n=;]* {last}\(", text, re.MULTILINE) is not None
    return re.search(rf"^\s*((async )?def|class) {last}\b|^{last}\b.*=", text, re.MULTILINE) is not None


def test_every_name_exists(root):
    text = (root / "docs" / "walkthrough.md").read_text()
    found = [place for heading in re.findall(r"^## (.+)$", text, re.MULTILINE) for place in table(root, heading)]
    assert len(found) > 40
    assert [file for file, name in found if name is None and not path_of(root, file).exists()] == []
    assert [f"{file}: {name}" for file, name in found if name is not None and not defined(root, file, name)] == []


def calls_of(action):
    """Functions of the core that this thread calls, in order."""
    seen = []

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and "/djinn_core/" in file:
            seen.append((file.rsplit("/djinn_core/", maxsplit=1)[1], frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        result = action()
    finally:
        sys.setprofile(None)
    return result, seen


def in_order(steps, seen):
    """Steps that do not come after those before them."""
    rest, missing = iter(seen), []
    for step in steps:
        if step not in rest:
            missing.append(step)
            rest = iter(())
    return missing


def client_steps(root, heading):
    return [(f, n) for f, n in table(root, heading) if n is not None and f.startswith(("interception/", "runtime/"))]


def test_an_addition_takes_these_steps(root, embedded):
    # Of a dtype that hardly another test adds: for a known kind of call a formula answers.
    x, y = (torch.ones(3, 7, dtype=torch.complex128).to(REMOTE) for _ in range(2))
    _, seen = calls_of(lambda: x + y)
    assert in_order(client_steps(root, "`z = x + y`"), seen) == []


def test_an_item_takes_these_steps(root, embedded):
    z = (torch.ones(3, 7).to(REMOTE) * 5).sum()
    value, seen = calls_of(z.item)
    assert value == 105
    assert in_order(client_steps(root, "`z.item()`"), seen) == []
