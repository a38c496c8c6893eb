"""Release: makes the distributions, and tries them in fresh virtual environments by the commands of README.md.

    python tools/release.py --rehearse        builds and tries; needs no repository
    python tools/release.py --tag v0.2.0      as the workflow of a release does

`tools/wheels.py` makes them, as in `make wheels`. The sdist is tried, and the wheel for this kind of machine. Needs
nothing but Python. It takes some minutes, as torch is installed twice. PIP_EXTRA_INDEX_URL and PIP_CONSTRAINT are
passed on to pip.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import runpy
import shlex
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WHEELS = runpy.run_path(str(ROOT / "tools" / "wheels.py"))
make_environment, run = WHEELS["make_environment"], WHEELS["run"]


def problems(root: Path, tag: str | None) -> list[str]:
    """Returns the reasons against a release of the project in a folder.

    Args:
        root: the folder of pyproject.toml.
        tag: tag of the release. None: not compared.
    """
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    version = settings["project"]["version"]
    found = []
    if not settings["tool"]["echelon"]["repository"]:
        found.append("[tool.echelon] repository in pyproject.toml is empty: set the address of the repository")
    if tag is not None and tag != f"v{version}":
        found.append(f"the tag is {tag} and the version {version}: tag it v{version}, or change pyproject.toml")
    heading = re.search(rf"^## {re.escape(version)}(.*)$", (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    if heading is None:
        found.append(f"CHANGELOG.md has no entry for {version}: write one")
    elif "unreleased" in heading[1]:
        found.append(f"CHANGELOG.md says that {version} is unreleased: write its date")
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text(encoding="utf-8"):
        found.append(f"CITATION.cff is of another version: write version: {version}")
    return found


class Command(NamedTuple):
    """Command of README.md, and the exit status that the page leads to expect."""

    words: list[str]
    status: int = 0


def commands(readme: str) -> list[Command]:
    """Returns the commands of README.md that use the installed package: those of `echelon` and `python`.

    A command fails with status 1 if the page shows an error of Echelon below it. Commands on a folder of the reader's
    own runs are left out.
    """
    found = []
    for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", readme, re.MULTILINE | re.DOTALL):
        lines = [line.removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines()]
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            if line.startswith(("echelon ", "python ")) and not re.search(r" pip | runs/", line):
                found.append(Command(shlex.split(line, comments=True), int(following.startswith("echelon: "))))
    return found


def try_package(package: Path, folder: Path) -> None:
    """Installs a package into a fresh environment in `folder`, and runs the commands of README.md there."""
    python = make_environment(folder, f"{package}[plot]")
    binaries = Path(python).parent
    # A folder without the sources: Python would import them in place of the package.
    place = folder / "place"
    shutil.copytree(ROOT / "examples", place / "examples")
    environ = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(folder)}
    environ["XDG_CONFIG_HOME"] = str(folder / "config")  # where `echelon tune` writes its table
    for variable in ("PYTHONPATH", "PYTHONHOME"):
        environ.pop(variable, None)
    run([python, "-c", "import echelon; print('echelon', echelon.__version__)"], place, environ)
    for words, status in [Command(["echelon", "--version"]), *commands((ROOT / "README.md").read_text("utf-8"))]:
        run([str(binaries / words[0]), *words[1:]], place, environ, status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds and tries a release. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tag", help="tag of the release, such as v0.2.0")
    parser.add_argument("--rehearse", action="store_true", help="build and try, also where a release is refused")
    options = parser.parse_args(arguments)
    found = problems(ROOT, options.tag)
    for problem in found:
        print(f"release: {problem}", file=sys.stderr)
    if found and not options.rehearse:
        return 1
    with tempfile.TemporaryDirectory(prefix="echelon-release-") as folder:
        made = WHEELS["make"](Path(folder), ROOT / "dist")
        tried = [path for path in made if path.suffix == ".gz" or path.stem.endswith(f"_{platform.machine()}")]
        for package in tried:
            try_package(package, Path(folder) / package.suffix.strip("."))
    print(f"release: made {', '.join(path.name for path in made)}")
    print(f"release: {', '.join(path.name for path in tried)} work")
    return 0


if __name__ == "__main__":
    sys.exit(main())
