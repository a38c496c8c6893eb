"""The contract names the clause that a backend breaks, wherever its ranks run."""

import pytest
import torch

from echelon.backends.formats.wire import Tag
from echelon.backends.simulated import SimulatedBackend, SimulatedControl, SimulatedMessages
from echelon.errors import EchelonError
from echelon.simulation.backend import VirtualControl, VirtualLanes, VirtualMessages
from echelon.testing import ContractError, check_backend, ranks_in_threads, simulated_ranks

KINDS = {
    "simulated": ((VirtualMessages, VirtualControl), simulated_ranks()),
    "free-running": ((SimulatedMessages, SimulatedControl), ranks_in_threads(SimulatedBackend.create_group)),
}


def without_tag(original):
    def irecv(self, src, tag=0, **options):
        return original(self, src, 0, **options)

    def isend(self, tensor, dst, tag=0, **options):
        return original(self, tensor, dst, 0, **options)

    return isend if original.__name__ == "isend" else irecv


def any_note(original):
    def irecv(self, src, tag=0, *, out=None, note=""):
        return original(self, src, tag, out=out, note=None)

    return irecv


def overwriting(original):
    def irecv(self, src, tag=0, *, out=None, note="", combine=None):
        return original(self, src, tag, out=out, note=note)

    return irecv


def into_inference_tensors(original):
    def irecv(self, src, tag=0, *, out=None, **options):
        with torch.inference_mode():
            place = torch.empty(4) if out is None else out
        return original(self, src, tag, out=place, **options)

    return irecv


def flat(original):
    def isend(self, tensor, dst, tag=0, **options):
        return original(self, tensor.reshape(-1), dst, tag, **options)

    return isend


def nothing(original):
    return lambda self, *args, **options: None  # noqa: ARG005


def same_lane(original):
    return lambda self, function, description, lane=0: original(self, function, description, 0)  # noqa: ARG005


def silent(original):
    def abort(self, reason, origin=None):
        return original(self, "")

    return abort


BROKEN = [
    ("irecv isend", without_tag, "tags_never_mix"),
    ("irecv", overwriting, "combines_where_told"),
    ("irecv", into_inference_tensors, "inference_mode_stays_with_its_caller"),
    ("irecv", any_note, "a_mismatch_leaves_the_connection_usable"),
    ("isend", flat, "shape_and_dtype_travel"),
    ("cancel", nothing, "a_timeout_withdraws_the_receive"),
    ("abort", silent, "an_abort_is_told_to_all"),
    ("close", nothing, "closed_is_closed"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("methods", "breaking", "clause"), BROKEN)
def test_a_broken_clause_is_named(monkeypatch, kind, methods, breaking, clause):
    parts, run_ranks = KINDS[kind]
    for method in methods.split():
        part = next(part for part in parts if hasattr(part, method))
        monkeypatch.setattr(part, method, breaking(getattr(part, method)))
    with pytest.raises(ContractError, match=f"^{clause}: "):
        check_backend(run_ranks, [clause])


def test_lanes_that_are_one_are_a_deadlock(monkeypatch):
    monkeypatch.setattr(VirtualLanes, "start", same_lane(VirtualLanes.start))
    with pytest.raises(ContractError, match=r"^lanes_run_beside: "):
        check_backend(simulated_ranks(), ["lanes_run_beside"])


def test_refusing_only_some_threads_breaks_the_contract(monkeypatch):
    original = SimulatedMessages.isend

    def isend(self, tensor, dst, tag=0, **options):
        if Tag.of(tag).step == 3:
            raise EchelonError("not from here")
        return original(self, tensor, dst, tag, **options)

    monkeypatch.setattr(SimulatedMessages, "isend", isend)
    with pytest.raises(ContractError, match=r"threads_of_ones_own_talk_or_are_refused: .*not from here"):
        check_backend(KINDS["free-running"][1], ["threads_of_ones_own_talk_or_are_refused"])


def test_what_the_ranks_return_comes_in_their_order():
    for _, run_ranks in KINDS.values():
        assert run_ranks(3, lambda backend: torch.tensor(backend.rank).item()) == [0, 1, 2]
