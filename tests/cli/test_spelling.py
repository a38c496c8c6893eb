"""Arguments in errors, as they are typed on the command line."""

import pytest

from echelon.cli.options import arguments_of, as_typed
from echelon.cli.plan import plan
from echelon.cli.simulate import simulate
from tests.helpers.commands import refusal

OPTIONS = {"hosts": "--hosts", "num_ranks": "-n", "backend": "--backend", "forward": "--forward", "costs": "--costs"}


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("hosts=3: give 2", "--hosts 3: give 2"),
        ("hosts=[3, 1] have 4 ranks", "--hosts 3,1 have 4 ranks"),
        ("no hosts: as hosts=(0, 0)", "no hosts: as --hosts 0,0"),
        ("backend='mpi' needs mpi, or use backend='gloo'", "--backend mpi needs mpi, or use --backend gloo"),
        ('give costs="measured", say', "give --costs measured, say"),
        ("num_ranks=-1.5; give 1", "-n -1.5; give 1"),
        ("forward has 2 values, and the forward has 3", "--forward has 2 values, and the forward has 3"),
        ("write init(backend='tcp')", "write init(backend='tcp')"),
        ("other=1, my_hosts=2, --hosts=3", "other=1, my_hosts=2, --hosts=3"),
    ],
)
def test_arguments_are_options(text, typed):
    assert as_typed(text, OPTIONS) == typed


def test_functions_have_other_names_for_some_arguments():
    assert (
        arguments_of(plan).items() >= {"world_size": "-r", "num_chunks": "--chunks", "transfer": "--transfer"}.items()
    )
    assert arguments_of(simulate).items() >= {"num_ranks": "-n", "world_size": "-n", "network": "--network"}.items()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("simulate -n 99999 s.py", "-n 99999: a world has at most 65,536 ranks"),
        ("simulate -n 2 --network slow s.py", "--network slow: use one of 1GbE, "),
        ("simulate -n 2 --timeout 0 s.py", "--timeout 0.0: use a number of seconds above 0"),
        ("simulate -n 2 --order mpi s.py", "--order mpi: use one of shm, tcp"),
        ("foresee -n 99999 s.py", "-n 99999: a world has at most 65,536 ranks"),
        ("foresee -n 2 --gpu b300 s.py", "--gpu b300: use one of a100, "),
        ("foresee -n 2 --network slow s.py", "--network slow: use one of 1GbE, "),
        ("foresee -n 2 --network slow --sweep {1,2} s.py", "--network slow: use one of 1GbE, "),
        ("foresee -n 4 --hosts 3 s.py", "--hosts 3: 4 ranks do not divide evenly: give a divisor, such as 2 or 4, or "),
        ("foresee -n 4 --hosts 3,2 s.py", "--hosts 3,2 have 5 ranks, the world has 4"),
        ("foresee -n 4 --rails -1 s.py", "--rails -1: give a number greater than or equal to 0"),
        ("foresee -n 4 --oversubscription 0.5 s.py", "--oversubscription 0.5: give a ratio of at least 1"),
        ("bench all-reduce --backend carrier", "--backend carrier: use one of auto, "),
        ("bench all-reduce --backend simulated --network slow", "--network slow: use one of 1GbE, "),
        ("bench all-reduce --backend simulated --hosts 1x2 --local-network slow", "--local-network slow: use one"),
        ("tune --backend simulated --output a.json --network slow", "--network slow: use one of 1GbE, "),
    ],
)
def test_names_and_sizes_are_refused_before_torch_is_imported(monkeypatch, capsys, line, told):
    for late in ("simulate._run", "foresee._foresee", "foresee._sweep"):
        monkeypatch.setattr(f"echelon.cli.{late}", None)
    for late in ("measure.run", "tune.run"):
        monkeypatch.setattr(f"echelon.bench.{late}", None)
    assert refusal(capsys, *line.split()).startswith(told)
