"""The table of places in docs/architecture.md names files and functions that exist."""

import re

ROW = re.compile(r"^\| (?P<step>[^|]+) \| (?P<where>`[^|]+) \|", re.MULTILINE)


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
    text = (root / "docs" / "architecture.md").read_text()
    rows = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [place for found in ROW.finditer(rows.replace("| where |", "")) for place in places(found[0])]


def path_of(root, file):
    return root / file


def defined(root, file, name):
    text = path_of(root, file).read_text()
    last = name.rsplit(".", maxsplit=1)[-1]
    if file.endswith(".cpp"):
        return re.search(rf"^\w[^\n=;]* {last}\(", text, re.MULTILINE) is not None
    return re.search(rf"^\s*((async )?def|class) {last}\b|^{last}\b.*=", text, re.MULTILINE) is not None


def test_named_files_and_functions_exist(root):
    found = table(root, "Where to change what")
    assert len(found) > 30
    assert [file for file, name in found if name is None and not path_of(root, file).exists()] == []
    assert [f"{file}: {name}" for file, name in found if name is not None and not defined(root, file, name)] == []
