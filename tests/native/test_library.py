"""The native library as Python sees it: its words, its absence, its build."""

import ctypes
import os
import platform
import runpy
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

import echelon
from echelon import _native
from echelon.backends.shared.memory import support
from echelon.backends.shared.memory.segment import Segment, words_of

FOLDER = Path(__file__).parents[2] / "native"
BUILD = runpy.run_path(str(FOLDER / "build.py"))


@pytest.fixture
def window():
    segment = Segment.create(1)
    yield segment.map(segment.allocate(4096), 4096)
    segment.close()


def test_words_are_loaded_and_stored(window):
    words = words_of(window)
    words[1] = (1 << 64) - 1
    words[511] = True
    assert [words[0], words[1], words[511]] == [0, (1 << 64) - 1, 1]
    assert window.data[8:16].tolist() == [255] * 8
    assert len(words) == 512


@pytest.mark.parametrize("index", [-1, 512, 1 << 62])
def test_words_outside_are_refused(window, index):
    words = words_of(window)
    with pytest.raises(IndexError, match="outside the mapped part"):
        words[index]
    with pytest.raises(IndexError, match="outside the mapped part"):
        words[index] = 1


def test_values_that_are_no_words_are_refused(window):
    words = words_of(window)
    for value in (-1, 1 << 64, "1"):
        with pytest.raises((OverflowError, TypeError)):
            words[0] = value
    with pytest.raises(TypeError):
        del words[0]
    assert words[0] == 0


def test_words_keep_their_memory_mapped():
    segment = Segment.create(1)
    window = segment.map(segment.allocate(4096), 4096)
    mapped = weakref.ref(window.memory)
    words = words_of(window)
    del window
    segment.close()
    words[3] = 9
    assert words[3] == 9
    del words
    assert mapped() is None


def test_functions_refuse_wrong_arguments():
    for call in (lambda: _native.core.meet(), lambda: _native.core.tick(1, 2), lambda: _native.core.copy(1, 2, "3")):
        with pytest.raises(TypeError):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("obstacle", ["turned off", "not built"])
def test_without_the_library_ranks_use_tcp_and_say_why(obstacle, tmp_path):
    """`auto` says it in one line of all, "shm" is refused with the reason, and results are the same."""
    program = (
        "import echelon, torch\n"
        "def total(group):\n"
        "    return group.backend.name, group.all_reduce(torch.ones(3) * (group.rank + 1)).tolist()\n"
        "if __name__ == '__main__':\n"
        "    print(echelon.spawn(total, 2))\n"
        "    try:\n"
        "        echelon.spawn(total, 2, backend='shm')\n"
        "    except echelon.LaunchError as error:\n"
        "        print(error)\n"
        "    from echelon.doctor.checkup import examine\n"
        "    print(*('doctor: ' + finding.found for finding in examine({}) if finding.check == 'shared memory'))\n"
    )
    environment = dict(os.environ)
    if obstacle == "turned off":
        environment["ECHELON_NATIVE"] = "0"
        why = "ECHELON_NATIVE=0 turns the native library off"
    else:
        package = tmp_path / "echelon"
        package.symlink_to(Path(echelon.__file__).parent)
        program = (
            "import pathlib\nexists = pathlib.Path.exists\n"
            "pathlib.Path.exists = lambda self: not self.name.startswith('core-') and exists(self)\n" + program
        )
        why = "the native library was not built"
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert "[('tcp', [3.0, 3.0, 3.0]), ('tcp', [3.0, 3.0, 3.0])]" in done.stdout, done.stderr
    assert "backend='shm' cannot be used here" in done.stdout
    assert why in done.stdout
    assert f"doctor: {why}" in done.stdout
    assert done.stderr.count("no shared memory, so all goes over TCP") == 1
    assert why in done.stderr


def test_what_cannot_be_loaded_is_told(tmp_path, monkeypatch):
    with pytest.raises(_native.Unusable, match="was not built: install Echelon again"):
        _native.load(tmp_path / "none.so")
    (tmp_path / "other.so").write_text("no library")
    with pytest.raises(_native.Unusable, match="cannot be loaded"):
        _native.load(tmp_path / "other.so")
    monkeypatch.setattr(_native, "_VERSION", 0)
    with pytest.raises(_native.Unusable, match="of another version of Echelon"):
        _native.load()
    monkeypatch.setenv("ECHELON_NATIVE", "0")
    with pytest.raises(_native.Unusable, match="ECHELON_NATIVE=0 turns"):
        _native.load()


def test_a_processor_without_a_library_is_refused(monkeypatch):
    monkeypatch.setattr(_native, "OBSTACLE", "the native library was not built")
    assert support.obstacle() == "the native library was not built"


@pytest.mark.parametrize(
    ("name", "struct"),
    {
        "board": _native.Board,
        "waiter": _native.Waiter,
        "calls": _native.Calls,
        "known_call": _native.KnownCall,
        "flights": _native._Flights,
        "flight": _native._Flight,
    }.items(),
)
def test_the_structs_are_those_of_the_sources(name, struct, tmp_path):
    compiler = BUILD["system_compiler"]()
    if compiler is None:
        pytest.skip("it needs a C compiler of the system")
    lines = [f'printf("%zu ", offsetof(struct {name}, {field}));' for field, *_ in struct._fields_]
    source = tmp_path / "offsets.c"
    source.write_text(
        f'#include <stdio.h>\n#include "calls.h"\nint main(void) {{ {" ".join(lines)} '
        f'printf("%zu", sizeof(struct {name})); return 0; }}\n'
    )
    program = tmp_path / "offsets"
    subprocess.run([*compiler, f"-I{FOLDER}", "-o", str(program), str(source)], check=True, timeout=50)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=50).stdout
    offsets = [getattr(struct, field).offset for field, *_ in struct._fields_]
    assert [*map(int, printed.split())] == [*offsets, ctypes.sizeof(struct)]


def test_a_compiler_that_fails_is_told_of_and_leaves_nothing(tmp_path):
    with pytest.raises(BUILD["BuildError"], match="false failed"):
        BUILD["compile_library"](tmp_path / "core.so", ["false"])
    with pytest.raises(BUILD["BuildError"], match="no-such-compiler"):
        BUILD["compile_library"](tmp_path / "core.so", ["no-such-compiler"])
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_compilers_gets_one_from_a_wheel(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert BUILD["system_compiler"]() is None
    assert BUILD["needs_zig"]()
    assert BUILD["zig_compiler"]("aarch64")[-3:] == ["-target", "aarch64-linux-gnu.2.17", "-mcpu=generic"]
    assert BUILD["platform_tag"]() == f"manylinux_2_17_{platform.machine()}"
    monkeypatch.setenv("ECHELON_NATIVE", "0")
    assert not BUILD["is_wanted"]()
    monkeypatch.setattr(platform, "machine", lambda: "ppc64le")
    assert not BUILD["needs_zig"]()  # which has no such wheel, so pip would fail
