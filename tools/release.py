"""Release: builds wheel and sdist, and tries each in a fresh virtual environment by the commands of README.md.

    python tools/release.py --rehearse        builds and tries; needs no repository
    python tools/release.py --tag v0.2.0      as the workflow of a release does

Needs nothing but Python: the tools are installed into an environment of their own. It takes some minutes, as torch is
installed twice. PIP_EXTRA_INDEX_URL and PIP_CONSTRAINT are passed on to pip.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT = 1800
"""Seconds for one command of README.md."""


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


def build(folder: Path, dist: Path) -> list[Path]:
    """Builds wheel and sdist into `dist`, by tools that are installed into `folder`. Returns their paths."""
    python = make_environment(folder / "tools", "build")
    shutil.rmtree(dist, ignore_errors=True)
    run([python, "-m", "build", "--outdir", str(dist), str(ROOT)], ROOT)
    built = sorted(dist.iterdir())
    if sorted(path.suffix for path in built) != [".gz", ".whl"]:
        raise SystemExit(f"release: expected a wheel and an sdist in {dist}, found {[path.name for path in built]}")
    return built


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


def make_environment(folder: Path, *packages: str) -> str:
    """Makes a virtual environment with packages and returns its Python."""
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], folder)
    return python


def run(command: Sequence[str], folder: Path, environ: dict[str, str] | None = None, expected: int = 0) -> None:
    """Runs a command in a folder. Exits if it ends with another status than the expected one."""
    print("release:", shlex.join(command), flush=True)
    try:
        status = subprocess.run(command, cwd=folder, env=environ, timeout=_TIMEOUT, check=False).returncode
    except subprocess.TimeoutExpired:
        raise SystemExit(f"release: {shlex.join(command)} took more than {_TIMEOUT} s") from None
    if status != expected:
        raise SystemExit(f"release: {shlex.join(command)} ended with status {status}, not {expected}")


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
        for package in build(Path(folder), ROOT / "dist"):
            try_package(package, Path(folder) / package.suffix.strip("."))
    print(f"release: {', '.join(path.name for path in sorted((ROOT / 'dist').iterdir()))} in dist/ work")
    return 0


if __name__ == "__main__":
    sys.exit(main())
