"""docs/collectives.md runs, prints what stands below its code, and has the algorithms as they are."""

from __future__ import annotations

import contextlib
import io
import re
from fractions import Fraction
from pathlib import Path

import pytest

from echelon.cli import main
from echelon.collectives.plans.algorithms import OPERATIONS, algorithms_of
from echelon.collectives.plans.plan import Send
from echelon.collectives.plans.select import SIZED, choose
from tests.collectives.test_algorithms import NAMES

PAGE = Path(__file__).parents[2] / "docs" / "collectives.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
ALL = [algorithm for operation in OPERATIONS for algorithm in algorithms_of(operation)]


def test_every_block_prints_what_it_says():
    blocks = BLOCK.findall(TEXT)
    assert len(blocks) >= 4
    names: dict[str, object] = {}
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(PAGE), "exec"), names)
        assert printed.getvalue() == expected


def test_the_shell_prints_what_it_says(capsys, monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    command, expected = re.search(r"```console\n\$ echelon (.*?)\n(.*?)```", TEXT, re.DOTALL).groups()
    assert main(command.split()) == 0
    assert capsys.readouterr().out == expected


def rows():
    lines = [
        line for line in TEXT.splitlines() if line.startswith(tuple(f"| `{operation}`" for operation in OPERATIONS))
    ]
    return {(cells[0].strip("`"), cells[1].strip("`")): cells[2:] for cells in (row_of(line) for line in lines)}


def row_of(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_every_algorithm():
    assert list(rows()) == [(algorithm.operation, algorithm.name) for algorithm in ALL]


@pytest.mark.parametrize("algorithm", ALL, ids=lambda algorithm: f"{algorithm.operation}-{algorithm.name}")
def test_the_table_says_what_is_so(algorithm):
    rounds, num_bytes, cost, chosen = rows()[algorithm.operation, algorithm.name]
    assert (rounds, cost) == (algorithm.rounds, algorithm.cost)
    if algorithm.name == "direct" and algorithm.operation == "gather":
        assert num_bytes == "n/p"
    elif num_bytes != "see scatter":
        for h, k in ((1, 2), (3, 1), (2, 2), (1, 7), (2, 4), (3, 4)):
            p = h * k
            plan = algorithm.make(tuple(rank // k for rank in range(p)), 0)
            parts = {"all_to_all": p, "barrier": 1}.get(algorithm.operation, plan.num_chunks)
            sent = max(
                sum(len(step.chunks) for steps in program for step in steps if isinstance(step, Send))
                for program in plan.rounds
            )
            values = {**NAMES, "n": Fraction(1), "p": p, "h": h, "k": k}
            assert Fraction(sent, parts) == eval(num_bytes, {}, values), (h, k)
    sizes = (8, 64 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20) if algorithm.operation in SIZED else (0,)
    counts = (4, 6, 10, 64) if algorithm.goes_by_hosts else (2, 8, 9, 64)
    by_size = [(size, ranks) for size in sizes for ranks in counts if is_chosen(algorithm, size, ranks)]
    every = len(by_size) == len(counts) * len(sizes)
    chosen = chosen.removeprefix("even hosts: ") if algorithm.goes_by_hosts else chosen
    assert (chosen == "always") == every
    assert (chosen == "when told to") == (not by_size)
    if not every and by_size:
        assert chosen == WHEN[algorithm.name](by_size)


def test_the_times_over_hosts_are_what_the_shell_says(capsys):
    command = re.search(r"\$ echelon (plan all-reduce .*--hosts .*)", TEXT)[1]
    assert main(command.split()) == 0
    times = dict(re.findall(r"^(\w+) +\d+ +([\d.]+ [mu]s)", capsys.readouterr().out, re.MULTILINE))
    prose = " ".join(TEXT.split())
    for name in ("ring", "rabenseifner", "hierarchical"):
        assert f"{times[name]} by `{name}`" in prose


def is_chosen(algorithm, size, ranks):
    hosts = (0, 1) * (ranks // 2) if algorithm.goes_by_hosts else (0,) * ranks
    return choose(algorithm.operation, size, hosts) == algorithm.name


def upper(by_size, *ranks):
    return max((size for size, count in by_size if count in ranks), default=0)


WHEN = {
    "ring": lambda found: f"above {16 if min(found)[0] == 64 << 20 else 4} MiB",
    "recursive_doubling": lambda found: (
        f"up to {upper(found, 2, 8) >> 10} KiB; with more than 8 ranks up to {upper(found, 9, 64) >> 10} KiB"
    ),
    "rabenseifner": lambda _: "between",
    "hierarchical": lambda found: "above 64 KiB" if min(found)[0] == 512 << 10 else f"from {min(found)[0]}",
    "hierarchical_doubling": lambda found: f"up to {max(found)[0] >> 10} KiB",
    "recursive_halving": lambda found: f"up to {upper(found, 2, 8, 9, 64) >> 20} MiB",
}
