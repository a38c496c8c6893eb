"""Distributions: a wheel for x86-64, one for ARM64, and an sdist, all made on this machine into dist/.

    python tools/wheels.py               as `make wheels` does
    python tools/wheels.py --to FOLDER   elsewhere

The wheels are built from the unpacked sdist, so the sdist is complete and the library of this folder stays. The
compiler of the wheel `ziglang` makes both libraries: its target and processor are pinned, so they run on every machine
of their kind. Needs nothing but Python: the tools are installed into an environment of their own.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import struct
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = runpy.run_path(str(ROOT / "native" / "build.py"))
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
"""Numbers of the kinds of machine in the head of an ELF file."""
_TIMEOUT = 1800
"""Seconds for one command: the compiler is a download of 100 MB, and torch, where a release is tried, of more."""


def make(folder: Path, dist: Path) -> list[Path]:
    """Makes the sdist and the wheels in `dist`, by tools that are installed into `folder`. Returns their paths.

    Files of an earlier call are removed from `dist`.
    """
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    python = make_environment(folder / "tools", *requires, BUILD["ZIG"])
    dist.mkdir(parents=True, exist_ok=True)
    for old in (*dist.glob("echelon-*.whl"), *dist.glob("echelon-*.tar.gz")):
        old.unlink()
    hatchling = [python, "-m", "hatchling", "build", "-d", str(dist.resolve())]
    run([*hatchling, "-t", "sdist"], ROOT)
    (sdist,) = dist.glob("echelon-*.tar.gz")
    source = unpack(sdist, folder / "source")
    wheels = []
    for machine in BUILD["ZIG_TARGETS"]:
        run([*hatchling, "-t", "wheel"], source, {**os.environ, "ECHELON_WHEEL_MACHINE": machine})
        (wheel,) = dist.glob(f"echelon-*_{machine}.whl")
        if found := problems(wheel, machine):
            raise SystemExit(f"wheels: {wheel.name}: {'; '.join(found)}")
        wheels.append(wheel)
    return [*wheels, sdist]


def problems(wheel: Path, machine: str) -> list[str]:
    """Returns the reasons why a wheel is not one for a kind of machine."""
    found = []
    tag = f"py3-none-{BUILD['pinned_tag'](machine)}"
    if not wheel.name.endswith(f"-{tag}.whl"):
        found.append(f"its name does not end with {tag}")
    with zipfile.ZipFile(wheel) as files:
        names = [name for name in files.namelist() if name.endswith(".so")]
        if names != [f"echelon/_native/library/core-{machine}.so"]:
            return [*found, f"its libraries are {names or 'missing'}"]
        if (
            f"Tag: {tag}"
            not in files.read(next(n for n in files.namelist() if n.endswith(".dist-info/WHEEL"))).decode()
        ):
            found.append(f"its WHEEL has not the tag {tag}")
        head = files.read(names[0])[:20]
    if head[:4] != b"\x7fELF" or struct.unpack("<H", head[18:])[0] != ELF_MACHINES[machine]:
        found.append(f"its library is no ELF file for {machine}")
    return found


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpacks an sdist into a folder and returns the path of its sources."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def make_environment(folder: Path, *packages: str) -> str:
    """Makes a virtual environment with packages and returns its Python."""
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], folder)
    return python


def run(command: Sequence[str], folder: Path, environ: dict[str, str] | None = None, expected: int = 0) -> None:
    """Runs a command in a folder. Exits if it ends with another status than the expected one."""
    print("$", shlex.join(command), flush=True)
    try:
        status = subprocess.run(command, cwd=folder, env=environ, timeout=_TIMEOUT, check=False).returncode
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{shlex.join(command)} took more than {_TIMEOUT} s") from None
    if status != expected:
        raise SystemExit(f"{shlex.join(command)} ended with status {status}, not {expected}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the distributions. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--to", type=Path, default=ROOT / "dist", metavar="FOLDER", help="default: dist")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="echelon-wheels-") as folder:
        for path in make(Path(folder), options.to):
            print(f"wheels: {path} ({path.stat().st_size >> 10} KiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
