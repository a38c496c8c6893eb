"""The native library on ARM64, as far as emulation shows it: system calls, alignment, pages, reductions.

Not the order of memory accesses, which qemu keeps as the processor under it does: `test_exploration` is for that.
"""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.backends.formats import message_layout
from echelon.backends.shared.messages import message_region
from tests.native.test_library import BUILD, FOLDER

THREADS = Path(__file__).with_name("threads.c")
SOURCES = [str(THREADS), *(str(FOLDER / name) for name in ("board.c", "waiting.c", "combine.c"))]
FLAGS = ["-std=gnu11", "-O2", "-ffp-contract=off", f"-I{FOLDER}", "-static"]


def run(*command, **settings):
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=True, **settings).stdout


@pytest.fixture(scope="module")
def zig(tmp_path_factory):
    """Environment for the compiler of a wheel, which is installed here for the test."""
    folder = tmp_path_factory.mktemp("zig")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder / "site"), BUILD["ZIG"]]
    try:
        run(*install)
    except subprocess.SubprocessError as error:
        pytest.skip(f"ziglang cannot be installed: {error}")
    return {**os.environ, "PYTHONPATH": str(folder / "site"), "ZIG_GLOBAL_CACHE_DIR": str(folder / "cache")}


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_it_runs_under_emulation(zig, tmp_path):
    """Three ranks as threads reduce tensors, sleep and wake each other; every reduction of every type is computed."""
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if qemu is None:
        pytest.skip("there is no emulator: install qemu-user-static")
    program = str(tmp_path / "threads")
    cross = shutil.which("aarch64-linux-gnu-gcc")
    compiler = [cross] if cross else [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl"]
    run(*compiler, *FLAGS, "-o", program, *SOURCES, "-lpthread", env=zig)
    assert run(qemu, program) == "all right with pages of 4096 bytes\n"
    assert run(qemu, "-p", "65536", program) == "all right with pages of 65536 bytes\n"


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.parametrize(("machine", "number"), [("aarch64", 183), ("x86_64", 62)])
def test_both_libraries_come_from_one_machine(machine, number, zig, tmp_path, monkeypatch):
    for name, value in zig.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "core.so"
    BUILD["compile_library"](path, BUILD["zig_compiler"](machine))
    head = path.read_bytes()[:20]
    assert head[:4] == b"\x7fELF"
    assert struct.unpack("<H", head[18:])[0] == number


def test_threads_do_the_same_here(tmp_path):
    """What the emulator is given is right."""
    compiler = BUILD["system_compiler"]()
    if compiler is None:
        pytest.skip("it needs a C compiler of the system")
    program = str(tmp_path / "threads")
    flags = [flag for flag in FLAGS if flag != "-static"]
    run(*compiler, *flags, "-o", program, *SOURCES, "-lpthread")
    assert "all right" in run(program)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 64])
def test_parts_of_the_segment_begin_at_the_largest_pages(num_ranks):
    """Rings and arenas are mapped by offsets that are computed: pages of ARM have up to 64 KiB."""
    size = message_region._region_bytes(num_ranks, message_layout.SIZES)
    assert size % (64 << 10) == 0
    assert message_region._ROOM_OF_ARENA % (64 << 10) == 0
