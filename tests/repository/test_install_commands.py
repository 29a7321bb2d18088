"""No text tells a user to install a `djinn...` name from the public package index, where other projects may own it."""

from __future__ import annotations

import ast
import re
import textwrap

import pytest

TEXTS = frozenset(
    ".py .md .toml .yaml .yml .tpl .txt .sh .sbatch .html .js .ipynb .cfg .ini .j2 .jinja .json .example".split()
)
NAMES = frozenset({"Makefile", "Containerfile", "Dockerfile"})
COMMAND = re.compile(
    r"\b(?:pip3?|pipx|uv|conda|mamba|poetry|pdm)\b[^\n`;|&#]*?\s(?:install|inject|add|download)\s([^\n`;|&#]*)"
)
# `install djinn-tcp` and a name that is built from parts, in a text that speaks of installing.
PROSE = re.compile(r"\binstall(?:ing)?(?: the)?(?: package)?\s+[`'\"]?djinn[-_][a-z{]", re.IGNORECASE)
ANY = re.compile(r"\binstall|\binject |\b(?:uv|poetry|pdm) add |\bpip3? download ", re.IGNORECASE)
BUILT = re.compile(r"\bdjinn[-_]\{")
TCP = re.compile(r"plugins/tcp|plugins/\*|PLUGINS")
OURS = re.compile(r"djinn([-_.\[<>=!~@{].*)?")


def names_of_ours(text):
    """Yield `djinn...` names that install commands in a text look up in an index. Paths and wheels are not looked up.

    Djinn requires djinn-tcp, so a command that installs the checkout's root alone looks for that.
    """
    text = re.sub(r"\\\n\s*", " ", text)
    for found in COMMAND.finditer(text):
        words = [word.strip("'\"(),.:") for word in found[1].split()]
        if " inject " in found[0]:
            words = words[1:]  # the environment that it goes into
        if "." in found[1].split() and not TCP.search(found[1]):
            yield "djinn-tcp"
        yield from (word for word in words if OURS.fullmatch(word) and not re.search(r"/|\.whl$", word))
    yield from (found[0] for found in PROSE.finditer(text))
    if re.search(r"\binstall", text, re.IGNORECASE):
        yield from (found[0] for found in BUILT.finditer(text))


def texts_of_python(source):
    """Yield each string of a program, with `{}` for computed parts, and each argument list as one line."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            yield joined(node)
        elif isinstance(node, ast.List | ast.Tuple):
            yield " ".join(filter(None, map(joined, node.elts)))
        elif isinstance(node, ast.Call):
            yield " ".join(filter(None, map(joined, node.args)))
    yield from re.findall(r"#.*", source)


def joined(node):
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(values):
            return "".join(joined(value) or "{}" for value in values)
        case ast.BinOp(left, ast.Add(), right):
            return (joined(left) or "{}") + (joined(right) or "{}")
    return ""


def wrong(path):
    text = path.read_text(encoding="utf-8", errors="replace")
    if not ANY.search(text):  # skips parsing of most files
        return set()
    texts = texts_of_python(text) if path.suffix == ".py" else [text]
    if path.suffix != ".py":  # a paragraph may speak of installing and of files
        texts = re.split(r"\n\s*\n", re.sub(r"\\\n\s*", " ", text))
    return {name for one in texts for name in names_of_ours(one)}


def test_texts_do_not_install_from_package_index(files, root):
    looked = [path for path in files if path.suffix in TEXTS or path.name in NAMES or "scripts" in path.parts]
    assert len(looked) > 1000
    looked.remove(root / "tests" / "repository" / "test_install_commands.py")
    looked.remove(root / "templates" / "plugin" / "README.md")  # its `pip install -e .` installs the plugin
    found = {str(path.relative_to(root)): names for path in looked if (names := wrong(path))}
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "'pip install djinn'",
        "'python -m pip install \"djinn[server]\" torch'",
        "f'needs ray ({error}): pip install \\'djinn-ray[ray]\\''",
        "'pip install ' 'djinn_observability'",
        "'pip install ' + 'djinn-' + name",
        "f'pip install djinn-{scheme}'",
        "f'Install the plugin, which would be called djinn-{scheme}'",
        "'no cost model: install djinn-costs'",
        "'uv tool install djinn'",
        "'pipx inject djinn djinn-tcp'",
        "run(python, '-m', 'pip', 'install', 'djinn>=26')",
        "command = ['pip', 'install', '--user', 'djinn']",
        "x = 1  # pip install djinn-ucx",
        "'Install it: `pip install -e .`'",
    ],
)
def test_install_command_of_our_names_is_found(source, tmp_path):
    (tmp_path / "a.py").write_text(source)
    assert wrong(tmp_path / "a.py")


@pytest.mark.parametrize(
    "text",
    [
        "pip install -e . ./plugins/tcp 'plugins/ray[ray]'",
        "pip install -e . -e ./djinn_server $(printf -- '-e %s ' plugins/*)",
        "pip install dist/djinn-26.11.0-*.whl djinn_tcp-26.11.0-py3-none-any.whl",
        "pipx inject djinn dist/djinn_tcp-26.11.0-*.whl",
        "pip uninstall djinn-example",
        "pip install ray, and see `djinn plugins`",
        "pip install ray && djinn doctor",
        "a page, where `djinn-observability` is installed",
        "install Djinn 26.11 on the server",
        "pip install 'ray[client]'   # nodes need djinn",
    ],
)
def test_install_command_of_paths_is_allowed(text, tmp_path):
    for name in ("a.md", "a.py"):
        (tmp_path / name).write_text(text if name == "a.md" else repr(text))
        assert not wrong(tmp_path / name)


def test_continued_lines_are_read_as_one_command(tmp_path):
    (tmp_path / "a.sh").write_text(
        textwrap.dedent(
            """
            pip install --no-cache-dir \\
                djinn-tcp
            """
        )
    )
    assert wrong(tmp_path / "a.sh") == {"djinn-tcp"}
