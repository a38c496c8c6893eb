"""A peer that writes anything into the shared memory leads the native library to no access outside its memory.

A C program (`fuzz.c`) plays the peer. It is compiled with the library's sources, by a compiler with its sanitizers of
addresses and of undefined behaviour. Faults that are planted in the sources are found.
"""

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.native.test_library import BUILD, FOLDER

DRIVER = Path(__file__).with_name("fuzz.c")
# Without those that call Python.
FILES = ["board.c", "waiting.c", "combine.c", "messages.c"]
FLAGS = ["-std=gnu11", "-g", "-O1", "-ffp-contract=off", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# Calls that wait: the driver has peers write then.
REPLACED = ["-Dsyscall=fuzz_syscall", "-Dsched_yield=fuzz_yield"]
CODES = {
    "meet": {"DONE", "WAITING", "DIFFERS"},
    "ticks": {"DONE", "WAITING"},
    "all_reduce": {"DONE", "WAITING", "DIFFERS"},
    "reduce": {"DONE", "WAITING", "DIFFERS"},
    "broadcast": {"DONE", "WAITING", "DIFFERS"},
    "exchange": {"DONE", "WAITING", "DIFFERS", "CHANGED"},
    "play": {"DONE", "WAITING", "DIFFERS"},
    "take": {"DONE", "WAITING"},
    "find": {"DONE", "WAITING", "DIFFERS"},
    "put": {"DONE", "WAITING"},
}
"""Codes of each function that peers can bring about."""
_NAMES = ("DONE", "WAITING", "DIFFERS", "NOT_SO", "CHANGED", "TO_COMBINE")


class Objects:
    """Sources compiled with the sanitizers, each file once per text."""

    def __init__(self, folder):
        self._folder = folder
        self._compiler = BUILD["system_compiler"]()
        if self._compiler is None:
            pytest.skip("it needs a C compiler of the system")
        (folder / "empty.c").write_text("int main(void) { return 0; }\n")
        if self._run([*FLAGS, "-o", str(folder / "empty"), str(folder / "empty.c")]).returncode:
            pytest.skip("the C compiler has no sanitizers: install libasan and libubsan")
        self._objects = {file: self.compile(FOLDER / file) for file in FILES}
        self._driver = self.compile(DRIVER)

    def compile(self, source):
        made = self._folder / f"{source.stem}.o"
        done = self._run([*FLAGS, *REPLACED, f"-I{FOLDER}", "-c", "-o", str(made), str(source)])
        assert done.returncode == 0, done.stderr
        return made

    def link(self, **changed):
        """Returns the program, with other objects in place of some files."""
        program = self._folder / "fuzz"
        objects = {**{file.removesuffix(".c"): made for file, made in self._objects.items()}, **changed}
        done = self._run([*FLAGS, "-o", str(program), str(self._driver), *map(str, objects.values())])
        assert done.returncode == 0, done.stderr
        return program

    def _run(self, arguments):
        return subprocess.run([*self._compiler, *arguments], capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    return Objects(tmp_path_factory.mktemp("fuzz"))


def fuzz(program, seed, count, *name, timeout=50):
    # The sanitizers' own limits: no core files, and no search for leaks, as the library never allocates.
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0:disable_coredump=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run(
        [str(program), str(seed), str(count), *name],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=environment,
    )


def check(done, count):
    assert done.returncode == 0, done.stdout + done.stderr
    seen = {}
    for line in done.stdout.splitlines():
        name, *counts = line.split()
        assert sum(map(int, counts)) == count
        seen[name] = {code for code, times in zip(_NAMES, map(int, counts), strict=True) if times}
    assert "exchange" in seen
    for name, codes in seen.items():
        assert codes - {"NOT_SO"} == CODES[name]  # NOT_SO: the processor lacks a loop, or it is another message


def test_peers_that_write_anything_do_no_harm(objects):
    check(fuzz(objects.link(), 1, 2000), 2000)


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_a_million_times(objects):
    program = objects.link()
    for seed in range(2, 7):
        check(fuzz(program, seed, 200_000, timeout=250), 200_000)


class Fault(NamedTuple):
    """Text of a source and what it becomes; the function that then goes wrong, and the report."""

    what: str
    old: str
    new: str
    function: str
    report: str = "AddressSanitizer"
    file: str = "board.c"


FAULTS = [
    Fault("a length that is not checked", " && board->num_bytes <= board->result_bytes;", ";", "all_reduce"),
    Fault(
        "a length that the peer says",
        "uint64_t num_bytes = heads[2 * peer + 1];",
        "uint64_t num_bytes = *(const uint64_t *)small_of(board, peer);",
        "exchange",
    ),
    Fault(
        "a note as long as the peer says",
        "board->text, board->text_bytes);\n}",
        "board->text, LOAD(word_of(board, peer, board->mark[board->number]) + 1, RELAXED) % 4096);\n}",
        "meet",
    ),
    Fault(
        "one peer too many",
        "board->peer < board->num_ranks",
        "board->peer <= board->num_ranks",
        "meet",
        "Sanitizer|wrong",
    ),
    Fault(
        "a write into a peer's part",
        "char *small = own_small(board, mark);",
        "char *small = small_of(board, 0);",
        "exchange",
        "wrong: copy into",
    ),
    Fault("a record longer than the ring", " || size > left", "", "find", "wrong|Sanitizer", "messages.c"),
    Fault(
        "a header longer than its limit",
        "(most < inlet->most_head_bytes ? most : inlet->most_head_bytes)",
        "RECORD_ALIGNMENT * most",
        "find",
        "wrong|Sanitizer",
        "messages.c",
    ),
    Fault(
        "another record taken as the message",
        " ||\n        inlet->record_bytes != record_bytes(message->head_bytes, message->num_bytes))",
        ")",
        "take",
        "Sanitizer",
        "messages.c",
    ),
]


@pytest.mark.parametrize(
    "fault",
    [FAULTS[0], *(pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS[1:])],
    ids=lambda each: each.what,
)
def test_each_planted_fault_is_found(objects, fault, tmp_path):
    text = (FOLDER / fault.file).read_text()
    assert text.count(fault.old) == 1, f"{fault.old!r} stands {text.count(fault.old)} times in {fault.file}"
    source = tmp_path / "planted.c"
    source.write_text(text.replace(fault.old, fault.new))
    changed = {fault.file.removesuffix(".c"): objects.compile(source)}
    done = fuzz(objects.link(**changed), 1, 20_000, fault.function)
    assert done.returncode != 0
    assert re.search(fault.report, done.stderr + done.stdout), done.stderr + done.stdout
