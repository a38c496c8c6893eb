"""Attributes of installed packages that a program sets belong to its rank, and are as before afterwards."""

import builtins
import pickle
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch.nn import functional

import echelon


def test_each_rank_has_the_functions_that_it_has_replaced():
    def program(group):
        calls, original = [], functional.relu

        def counted(*args, **kwargs):
            calls.append(group.rank)
            return original(*args, **kwargs)

        functional.relu = counted
        group.barrier()
        torch.nn.ReLU()(torch.ones(1))
        return calls

    before = functional.relu
    assert echelon.simulate(program, 3).results == [[0], [1], [2]]
    assert functional.relu is before


def test_a_rank_that_changes_nothing_has_the_functions_from_before():
    def program(group):
        if group.rank == 0:
            builtins.print = None
            torch.of_rank_0 = True
            del torch.special.erfc
        group.barrier()
        return print is not None, hasattr(torch, "of_rank_0"), hasattr(torch.special, "erfc")

    assert echelon.simulate(program, 2).results == [(False, True, False), (True, False, True)]
    assert builtins.print is print
    assert not hasattr(torch, "of_rank_0")
    assert hasattr(torch.special, "erfc")
    assert type(torch) is ModuleType


def test_a_mock_of_a_rank_holds_while_the_rank_waits():
    def program(group):
        with mock.patch("torch.special.erf", new=group.rank):
            group.barrier()
            during = torch.special.erf
            group.barrier()
        return during, torch.special.erf

    before = torch.special.erf
    assert echelon.simulate(program, 2).results == [(0, before), (1, before)]


def test_what_a_helper_module_replaces_as_it_is_imported_holds_for_all_ranks(tmp_path, monkeypatch):
    # A function of this process shares its modules among the ranks, so the module is executed once.
    (tmp_path / "helper_that_patches.py").write_text("import torch\ntorch.from_helper = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delattr(torch, "from_helper", raising=False)

    def program(group):
        import helper_that_patches  # noqa: F401

        group.barrier()
        return torch.from_helper

    try:
        assert echelon.simulate(program, 2).results == [1, 1]
    finally:
        del torch.from_helper


def test_a_program_that_fails_leaves_nothing_replaced():
    def program():
        torch.of_failing = 1
        raise RuntimeError("fails")

    with pytest.raises(RuntimeError, match="fails"):
        echelon.simulate(program, 2)
    assert not hasattr(torch, "of_failing")


def test_modules_can_be_pickled_by_libraries_that_know_the_plain_class():
    cloudpickle = pytest.importorskip("cloudpickle")

    def program():
        return pickle.loads(cloudpickle.dumps(lambda: torch.ones(2).sum().item()))()

    assert echelon.simulate(program, 2).results == [2.0, 2.0]
