"""Sphinx builds the Markdown of the repository into a site (`make docs`); every page stays readable without it.

The order of the pages is that of the lists in `index.md`. Pages of `djinn`, of `djinn.hooks` and of the hooks are made from docstrings.
Links between pages are relative links between files. Links to other files of the repository become text, because the site does not have them.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from docutils import nodes
from sphinx import addnodes

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT: Final = Path(__file__).resolve().parents[1]
GENERATED: Final = "docs/generated"
ENTRY: Final = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<page>[^)]+)\.md\)$", re.MULTILINE)

project = "Djinn"
author = "the Djinn authors"
project_copyright = author
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "evaluation/results/*.md", "plugins/*/README.md", "changelog.d/README.md"]
exclude_patterns = ["docs/site/**"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["html_image"]
myst_heading_anchors = 5
myst_links_external_new_tab = False
# A page of the README's kind may begin below its first level. `DjinnError` has two public names.
suppress_warnings = ["myst.header", "ref.python"]

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_class_signature = "separated"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # an attribute may be a property with a docstring, too
add_module_names = False

html_theme = "pydata_sphinx_theme"
html_title = f"Djinn {release}"
html_static_path = ["site/site.css", "site/versions.json"]
html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs" / "site" / "scorer.js")
html_additional_pages = {"index": "to_start.html"}
templates_path = ["site"]
html_sidebars = {"**": ["pages.html"]}
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "logo": {"text": f"Djinn {release}"},
    "navbar_center": [],
    "navbar_end": ["version-switcher", "theme-switcher"],
    "switcher": {"json_url": "_static/versions.json", "version_match": release},
    "check_switcher": False,  # the file is part of the site
    "show_toc_level": 2,
    "navigation_depth": 3,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
}


# --- the order of pages -----------------------------------------------------------------------------------------


def add_toctrees(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the pages that an index lists into the navigation."""
    del app
    if page == root_doc:
        first, *parts = source[0].split("\n## ")
        source[0] = "\n## ".join([first, *(part + _section(part) for part in parts)])
    elif page in {"docs/decisions/README", "evaluation/results/README"}:
        source[0] += _toctree("", ["*"], "glob")
    elif page == "docs/plugins":
        source[0] += _toctree("", ["/plugins/*/README", "/changelog.d/README"], "glob")


def _section(part: str) -> str:
    caption = part.partition("\n")[0]
    pages = [f"{found['title'].replace('`', '')} <{found['page']}>" for found in ENTRY.finditer(part)]
    made = {
        "Extend": ["generated/hooks", "generated/values"],
        "Reference": [f"generated/{name}" for name in ("djinn", "errors", "planning", "weights")],
    }.get(caption, [])
    links = "".join(f"\n- {{doc}}`{page}`" for page in made)
    return f"{links}\n{_toctree(caption, [*pages, *made])}"


def _toctree(caption: str, pages: list[str], *options: str) -> str:
    lines = [
        ":hidden:",
        *([f":caption: {caption}"] if caption else []),
        *(f":{option}:" for option in options),
        "",
        *pages,
    ]
    return "\n\n```{toctree}\n" + "\n".join(lines) + "\n```\n"


# --- pages from docstrings --------------------------------------------------------------------------------------


def write_references(app: Sphinx) -> None:
    """Write the pages that consist of docstrings."""
    del app
    modules = {name: _names_of(f"djinn.{name}", f"djinn.{name}") for name in ("errors", "planning", "weights")}
    pages = {"djinn": _names_of("djinn", "djinn"), **modules, "values": _values(), "hooks": _hooks()}
    (ROOT / GENERATED).mkdir(exist_ok=True)
    for name, text in pages.items():
        file = ROOT / GENERATED / f"{name}.rst"
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def _names_of(module: str, title: str, without: frozenset[str] = frozenset()) -> str:
    import importlib
    import inspect

    found = importlib.import_module(module)
    names = [name for name in found.__all__ if name not in without and callable(getattr(found, name))]
    kinds = {name: "class" if inspect.isclass(getattr(found, name)) else "function" for name in names}
    lines = [title, "=" * len(title), "", f"Made from the docstrings of ``{module}``.", ""]
    for name in sorted(names, key=lambda name: (kinds[name] == "class", name)):
        lines += [f".. auto{kinds[name]}:: {module}.{name}", *(["   :members:"] if kinds[name] == "class" else []), ""]
    return "\n".join(lines)


def _values() -> str:
    import djinn

    return _names_of("djinn.hooks", "djinn.hooks", frozenset(djinn.__all__))


def _hooks() -> str:
    title = "Hooks"
    lines = [
        title,
        "=" * len(title),
        "",
        "Made from the docstrings of the hooks; :doc:`/docs/hooks` lists the kinds.",
        "",
    ]
    for file in sorted(ROOT.glob("djinn_*/hookspecs/*.py")):
        functions = [n.name for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)]
        hooks = [name for name in functions if name.startswith("djinn_register_")]
        for name in hooks:
            lines += [f".. autofunction:: {file.parts[-3]}.hookspecs.{file.stem}.{name}", ""]
    return "\n".join(lines)


def literal(app: Sphinx, what: str, name: str, thing: object, options: Any, lines: list[str]) -> None:
    """Take docstrings as they are written here: backticks hold code, and nothing else is markup."""
    del app, what, name, thing, options
    for number, line in enumerate(lines):
        parts = re.split(r"(``[^`]+``|`[^`]+`)", line)
        lines[number] = "".join(
            f"``{part.strip('`')}``" if index % 2 else re.sub(r"([*|]|(?<=\w)_(?=\W|$))", r"\\\1", part)
            for index, part in enumerate(parts)
        )


# --- links ------------------------------------------------------------------------------------------------------


def leave_repository(app: Sphinx, page: nodes.document) -> None:
    """Make links to files and folders of the repository that are no pages: to the page of the folder, or text."""
    here, pages = app.env.docname, app.env.found_docs
    for link in list(page.findall(addnodes.pending_xref)):
        target = str(link.get("reftarget", ""))
        place = ((ROOT if link.get("refdomain") == "doc" else (ROOT / here).parent) / target).resolve()
        if link.get("refdomain") == "std" or not target or not place.is_relative_to(ROOT):
            continue
        readme, name = (str(one.relative_to(ROOT)) for one in (place / "README", place.with_suffix("")))
        if readme in pages:
            uri = app.builder.get_relative_uri(here, readme)
            link.replace_self(nodes.reference("", "", *link.children, refuri=uri, internal=True))
        elif name not in pages and (place.exists() or place.with_suffix(".md").exists()):
            link.replace_self(nodes.inline("", "", *link.children))


def setup(app: Sphinx) -> None:
    """Connect what is above."""
    app.connect("builder-inited", write_references)
    app.connect("source-read", add_toctrees)
    app.connect("autodoc-process-docstring", literal, priority=400)
    app.connect("doctree-read", leave_repository)
