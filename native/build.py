"""Compiler of the native library: `python native/build.py` writes it into the package, for this machine.

The system's compiler does it (CC, cc, gcc or clang), else the one in the wheel `ziglang`. Neither Python.h nor any
other header beyond those of the C library is needed.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("module.c", "calls.c", "tensor.c", "board.c", "waiting.c", "combine.c")
ZIG = "ziglang==0.17.1"
"""Requirement of a build without a compiler. Pinned: versions differ in their code, and some were yanked."""
# zig would compile for this very processor. x86_64_v2 is what every machine of the last 15 years has.
_ZIG_TARGETS = {
    "x86_64": ("-target", "x86_64-linux-gnu.2.17", "-mcpu=x86_64_v2"),
    "aarch64": ("-target", "aarch64-linux-gnu.2.17", "-mcpu=generic"),
}
# No fused multiply-add: it would change bits. -O3 for the loops of combine.c, which gcc 12 does not vectorise at -O2.
_FLAGS = (
    "-std=c11",
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-s",
    "-fvisibility=hidden",
)
_SECONDS = 300.0


class BuildError(Exception):
    """No library was made, with the reason."""


def is_wanted() -> bool:
    """Whether ECHELON_NATIVE does not turn the native library off."""
    return os.environ.get("ECHELON_NATIVE", "1") != "0"


def system_compiler() -> list[str] | None:
    """Returns the command of the system's C compiler. None if there is none."""
    for command in (os.environ.get("CC", "").split(), ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return command
    return None


def zig_compiler(machine: str) -> list[str]:
    """Returns the command of the compiler in `ziglang`, for a kind of machine."""
    return [sys.executable, "-m", "ziglang", "cc", *_ZIG_TARGETS[machine]]


def platform_tag() -> str:
    """Returns the platform of a wheel with the library: the C library of zig's target, or this system's."""
    kind = "linux" if system_compiler() else "manylinux_2_17"
    return f"{kind}_{platform.machine()}"


def library(machine: str = platform.machine()) -> Path:
    """Returns the path of the library in the package."""
    return ROOT / "src" / "echelon" / "_native" / "library" / f"core-{machine}.so"


def compile_library(target: Path, compiler: Sequence[str], *more: str, folder: Path = ROOT / "native") -> None:
    """Compiles the sources in `folder` into a shared library.

    Raises:
        BuildError: the compiler failed, with its output.
    """
    # Moved into place at the end: a process that has the old library open keeps it, and none sees half of a new one.
    made = target.with_name(f"{target.name}.{os.getpid()}")
    command = [*compiler, *_FLAGS, *more, "-o", str(made), *(str(folder / name) for name in SOURCES)]
    try:
        target.parent.mkdir(exist_ok=True)
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if done.returncode:
            raise BuildError(f"{compiler[0]} failed: {done.stderr.strip()[-2000:]}")
        made.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler[0]}: {error}") from error
    finally:
        made.unlink(missing_ok=True)


def build() -> Path:
    """Compiles the library for this machine into the package. Returns its path.

    Raises:
        BuildError: there is no compiler, it failed, or this is no machine for which there is a library.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ZIG_TARGETS:
        raise BuildError(f"there is no native library for {machine} with {sys.platform}")
    compile_library(library(machine), system_compiler() or zig_compiler(machine))
    return library(machine)


if __name__ == "__main__":
    print(build())
