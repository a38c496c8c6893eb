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
SOURCES = ("module.c", "calls.c", "message_calls.c", "messages.c", "tensor.c", "board.c", "waiting.c", "combine.c")
ZIG = "ziglang==0.17.1"
"""Requirement of a build without a compiler. Pinned: versions differ in their code, and some were yanked."""
# zig would compile for this very processor. x86_64_v2 is what every machine of the last 15 years has.
ZIG_TARGETS = {
    "x86_64": ("-target", "x86_64-linux-gnu.2.17", "-mcpu=x86_64_v2"),
    "aarch64": ("-target", "aarch64-linux-gnu.2.17", "-mcpu=generic"),
}
"""Options of that compiler for each kind of machine that has a library."""
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
    return [sys.executable, "-m", "ziglang", "cc", *ZIG_TARGETS[machine]]


def has_library() -> bool:
    """Whether there is a library for this machine, where a compiler makes it."""
    return sys.platform == "linux" and platform.machine() in ZIG_TARGETS


def needs_zig() -> bool:
    """Whether the library for this machine is made by the compiler in `ziglang`."""
    return has_library() and system_compiler() is None


def platform_tag() -> str:
    """Returns the platform of a wheel with the library: the C library of zig's target, or this system's."""
    return f"linux_{platform.machine()}" if system_compiler() else pinned_tag(platform.machine())


def pinned_tag(machine: str) -> str:
    """Returns the platform of a wheel whose library zig's compiler made for a kind of machine."""
    return f"manylinux_2_17_{machine}"


def library(machine: str = platform.machine()) -> Path:
    """Returns the path of the library in the package."""
    return ROOT / "src" / "echelon" / "_native" / "library" / f"core-{machine}.so"


def compile_library(
    target: Path,
    compiler: Sequence[str],
    *more: str,
    folder: Path = ROOT / "native",
    sources: Sequence[str] = SOURCES,
) -> None:
    """Compiles sources in `folder` into a shared library.

    Args:
        target: the library.
        compiler: its command.
        more: further options.
        folder: where the sources are.
        sources: their names, or absolute paths of objects.

    Raises:
        BuildError: the compiler failed, with its output.
    """
    # Moved into place at the end: a process that has the old library open keeps it, and none sees half of a new one.
    made = target.with_name(f"{target.name}.{os.getpid()}")
    command = [*compiler, *_FLAGS, *more, "-o", str(made), *(str(folder / name) for name in sources)]
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
    if not has_library():
        raise BuildError(f"there is no native library for {machine} with {sys.platform}")
    compile_library(library(machine), system_compiler() or zig_compiler(machine))
    return library(machine)


def build_for(machine: str) -> Path:
    """Compiles the library for any machine of a kind into the package, by zig's compiler. Returns its path.

    Raises:
        BuildError: the compiler failed, or there is no library for this kind of machine.
    """
    if machine not in ZIG_TARGETS:
        raise BuildError(f"there is no native library for {machine}: use one of {', '.join(ZIG_TARGETS)}")
    compile_library(library(machine), zig_compiler(machine))
    return library(machine)


if __name__ == "__main__":
    print(build())
