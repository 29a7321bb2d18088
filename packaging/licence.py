"""Set the licence of all packages: metadata, the licence text in each package's folder, and the sentence of the README.

    python packaging/licence.py SPDX-ID --text FILE

The identifier is an SPDX expression, such as `Apache-2.0` or `MIT OR Apache-2.0`. FILE has the licence text, with the holder's name and the
year if the licence has them. Without FILE, the text is downloaded from SPDX's list, and you fill in its placeholders. Source files have no header.
"""

from __future__ import annotations

import argparse
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

ROOT = Path(__file__).resolve().parents[1]
TEXTS = "https://raw.githubusercontent.com/spdx/license-list-data/main/text/{}.txt"
FIELDS = re.compile(r'^(?:license = "[^"\n]*"|license-files = \[[^\]\n]*\])\n', re.MULTILINE)
SECTION = re.compile(r"(?<=^## Licence\n\n).*?(?=\n\n|\n\Z)", re.MULTILINE | re.DOTALL)


class LicenceError(ValueError):
    """The licence cannot be set. The message says why, and what to do."""


def with_licence(pyproject: str, licence: str) -> str:
    """Return the text of a pyproject.toml with the licence `licence` instead of an earlier licence."""
    fields = f'license = "{licence}"\nlicense-files = ["LICENSE"]\n'
    return re.sub(r"^(?=requires-python = )", lambda _: fields, FIELDS.sub("", pyproject), count=1, flags=re.MULTILINE)


def text_of(licence: str) -> str:
    """Return the text of a licence from SPDX's list. Raise LicenceError if it cannot be downloaded."""
    try:
        with urllib.request.urlopen(TEXTS.format(licence), timeout=30) as answer:  # noqa: S310 - the address is above
            return answer.read().decode()
    except (urllib.error.URLError, UnicodeDecodeError, TimeoutError) as error:
        raise LicenceError(
            f"the text of {licence!r} cannot be downloaded: {error}. Pass a file with the text: --text FILE"
        ) from error


def packages(root: Path) -> list[Path]:
    """Return the folders of all packages of a checkout."""
    return [
        path.parent
        for pattern in ("*.toml", "*/*.toml", "plugins/*/*.toml")
        for path in root.glob(pattern)
        if path.name == "pyproject.toml"
    ]


def set_licence(root: Path, licence: str, text: str) -> int:
    """Set the licence of all packages of the checkout at `root`. Return the number of packages."""
    result = packages(root)
    for folder in result:
        file = folder / "pyproject.toml"
        file.write_text(with_licence(file.read_text(), licence))
        (folder / "LICENSE").write_text(text)
    readme = root / "README.md"
    sentence = f"{licence}: [LICENSE](LICENSE)."
    new, changes = SECTION.subn(lambda _: sentence, readme.read_text())
    if changes != 1:
        raise LicenceError("README.md has no section 'Licence', which says what the licence is")
    readme.write_text(new)
    return len(result)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("licence", help="identifier of the licence")
    parser.add_argument("--text", type=Path, help="file with its text")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    options = parser.parse_args()
    try:
        licence = canonicalize_license_expression(options.licence)
    except InvalidLicenseExpression as error:
        raise LicenceError(f"{options.licence!r} is not an identifier in SPDX's list (spdx.org/licenses)") from error
    text = options.text.read_text() if options.text else text_of(licence)
    count = set_licence(options.root.resolve(), licence, text)
    print(f"{count} packages say {licence} now. Next: make dist, and look at `git diff`")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LicenceError, OSError) as error:
        sys.exit(str(error))
