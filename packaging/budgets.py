"""Compare the size of the repository with the upper bounds in `budgets.toml`.

`--check` fails if a figure exceeds its budget. `--lower` sets each budget to its figure, if that is lower; figures from 1,000 on are rounded up to the next hundred.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs
import grimp
import networkx as nx

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = ROOT / "budgets.toml"
SLACK_FROM = 1000  # smaller figures are exact

# Files of other kinds are data: images, notebooks, JSON, seeds of fuzz tests and the lock file.
LANGUAGES = {
    "python": {".py", ".pyi"},
    "cpp": {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"},
    "shell": {".sh", ".sbatch", "run"},
    "web": {".css", ".html", ".js", ".ts"},
    "configuration": {".toml", ".yaml", ".yml", ".tpl", ".service", "Makefile", "Containerfile"},
    "markdown": {".md"},
}
# Folders that have a budget apart from the folder that holds them.
APART = ["djinn_native/csrc"]
LIMITS = "limits"
WHAT_TO_DO = "Lower each figure, or raise its budget in a commit of its own that says why."

Import = tuple[str, str]
Budgets = dict[str, dict[str, int]]


@attrs.frozen
class Figure:
    """A measured size. `look_at`: description of what to shorten if it exceeds its budget."""

    value: int
    look_at: str


Figures = dict[str, dict[str, Figure]]


@attrs.frozen
class Text:
    """A text file of the repository, with the language and the folder that count its lines."""

    path: str
    lines: int

    @property
    def language(self) -> str | None:
        """Language that counts the file's lines, or None for data."""
        path = Path(self.path)
        return next((name for name, kinds in LANGUAGES.items() if kinds & {path.suffix, path.name}), None)

    @property
    def folder(self) -> str:
        """Top-level folder, or `.` for files of the root."""
        apart = [folder for folder in APART if self.path.startswith(f"{folder}/")]
        return apart[0] if apart else self.path.split("/")[0] if "/" in self.path else "."


def listed_files() -> list[str]:
    """List the files that git tracks, or would track if they were added. The list is empty outside of a git checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return sorted(
        {path for path in output.split("\0") if path and (ROOT / path).is_file()}
    )  # git repeats files in conflict


def count_lines(texts: Iterable[Text], key: Callable[[Text], str]) -> dict[str, Figure]:
    """Add up lines by folder or by language. `look_at` is the longest file."""
    sums: Counter[str] = Counter()
    longest: dict[str, Text] = {}
    for text in texts:
        sums[key(text)] += text.lines
        longest[key(text)] = max(text, longest.get(key(text), text), key=lambda each: each.lines)
    return {
        name: Figure(value, f"{name} (longest file: {longest[name].path}, {longest[name].lines:_} lines)")
        for name, value in sums.items()
    }


def longest_file(texts: Iterable[Text], language: str) -> Figure:
    result = max(
        (text for text in texts if text.language == language), key=lambda text: text.lines, default=Text("", 0)
    )
    return Figure(result.lines, result.path)


def imports_between_modules(files: Iterable[str]) -> tuple[list[Import], set[str]]:
    """Return all imports between our modules, and the packages that hold modules.

    Imports inside functions and under `TYPE_CHECKING` count, because a reader of one module of a circle needs the others.
    """
    packages = [match for path in files if (match := re.fullmatch(r"(|plugins/\w+/)(\w+)/__init__\.py", path))]
    sys.path[:0] = [str(ROOT / match[1]) for match in packages]
    graph = grimp.build_graph(*(match[2] for match in packages), cache_dir=None)
    imports = [(module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module)]
    return imports, {module for module in graph.modules if graph.find_children(module)}


def members_of_circles(imports: Iterable[Import]) -> Figure:
    """Count the modules, folders or packages that lie in an import circle. `look_at` is one path around each circle."""
    edges = sorted({(source, target) for source, target in imports if source != target})
    circles = [circle for circle in nx.strongly_connected_components(nx.DiGraph(edges)) if len(circle) > 1]
    lines = []
    for circle in sorted(circles, key=lambda circle: (-len(circle), min(circle))):
        inside = nx.DiGraph(edge for edge in edges if circle.issuperset(edge))
        path = [source for source, _ in nx.find_cycle(inside)]
        lines.append(f"\n    {len(circle)} in a circle, for example {' -> '.join([*path, path[0]])}")
    return Figure(sum(map(len, circles)), "".join(["the imports between them", *lines]))


def import_circles(files: Iterable[str]) -> dict[str, Figure]:
    imports, packages = imports_between_modules(files)
    modules = {module for pair in imports for module in pair}
    folder = {module: module if module in packages else module.rpartition(".")[0] or module for module in modules}
    return {
        "modules": members_of_circles(imports),
        "folders": members_of_circles((folder[source], folder[target]) for source, target in imports),
        "packages": members_of_circles((source.split(".")[0], target.split(".")[0]) for source, target in imports),
    }


def names_of(path: str) -> int:
    """Return the number of names in the `__all__` of a module."""
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len(ast.literal_eval(node.value))
    return 0


def counts(files: list[str]) -> dict[str, Figure]:
    """Count plugin packages, public names, and pages and words of the documents for users."""
    plugins = [path for path in files if re.fullmatch(r"plugins/\w+/pyproject\.toml", path)]
    names = {path: names_of(path) for path in files if re.fullmatch(r"djinn/(?:\w+/)*(?:__init__|[a-z]\w*)\.py", path)}
    pages = [path for path in files if re.fullmatch(r"docs/[^/]+\.md|README\.md", path)]
    words = {path: len((ROOT / path).read_text(encoding="utf-8").split()) for path in pages}
    return {
        "plugin_packages": Figure(len(plugins), "plugins/*/pyproject.toml"),
        "public_names": Figure(sum(names.values()), f"`__all__` (most names: {most(names)})"),
        "pages": Figure(len(pages), "docs/*.md and README.md"),
        "words": Figure(sum(words.values()), f"docs and README.md (most words: {most(words)})"),
    }


def most(figures: dict[str, int]) -> str:
    return max(figures, key=lambda path: figures[path], default="nothing")


def measure(files: list[str]) -> Figures:
    results = [Text(path, (ROOT / path).read_bytes().count(b"\n")) for path in files]
    texts = [text for text in results if text.language]
    total = count_lines(texts, lambda _: "all folders")["all folders"]
    return {
        "lines": count_lines(texts, lambda text: text.folder) | {"total": total},
        "languages": count_lines(texts, lambda text: str(text.language)),
        "import_circles": import_circles(files),
        "counts": counts(files),
        LIMITS: {f"{language}_file": longest_file(texts, language) for language in ("python", "cpp")},
    }


def exceeded(budgets: Budgets, figures: Figures) -> list[str]:
    """Describe each figure above its budget. A figure without a budget exceeds it."""
    return [
        f"{BUDGETS.name}: {table}.{name} is {budget:_}, measured {figure.value:_}. Look at {figure.look_at}"
        for table, table_figures in figures.items()
        for name, figure in table_figures.items()
        if figure.value > (budget := budgets.get(table, {}).get(name, 0))
    ]


def with_slack(value: int) -> int:
    """Round large figures up to the next hundred, so that a small fix needs no commit for a budget."""
    return value if value < SLACK_FROM else -(-value // 100) * 100


def lowered(text: str, figures: Figures) -> str:
    """Return the text of `budgets.toml` with lower budgets. Limits stay. The budget of a folder that is gone becomes 0."""
    table = ""
    lines = []
    for line in text.splitlines(keepends=True):
        if header := re.match(r"\[(\w+)\]", line):
            table = header[1]
        budget = re.match(r'"?([^"#=]+?)"? = ([\d_]+)', line)
        if budget and table != LIMITS:
            figure = figures.get(table, {}).get(budget[1], Figure(0, ""))
            value = min(int(budget[2]), with_slack(figure.value))
            lines.append(f"{line[: budget.start(2)]}{value:_}{line[budget.end(2) :]}")
        else:
            lines.append(line)
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="fail if a figure exceeds its budget")
    action.add_argument("--lower", action="store_true", help="set each budget to its figure, if the figure is lower")
    arguments = parser.parse_args()
    files = listed_files()
    if not files:
        print("Budgets are not checked, because this is not a git checkout.", file=sys.stderr)
        return 0
    figures = measure(files)
    text = BUDGETS.read_text(encoding="utf-8")
    if arguments.lower:
        BUDGETS.write_text(lowered(text, figures), encoding="utf-8")
        return 0
    messages = exceeded(tomllib.loads(text), figures)
    if messages:
        print(*messages, WHAT_TO_DO, sep="\n", file=sys.stderr)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
