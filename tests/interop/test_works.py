"""Works that Python has dropped, which C++ may still hold."""

import pytest
import torch

from echelon.backends.work import Work
from echelon.errors import UnsupportedOp
from echelon.interop.works import Orphans, Outcome, Pending

LARGE = 10_000


class Driven(Work[list[torch.Tensor]]):
    """Operation that the test completes."""

    def __init__(self):
        super().__init__(None, "test", 1.0)


class EndsInWait(Driven):
    """Operation whose end another thread sees before the waiting one goes on."""

    on_end = None

    def wait(self, timeout=None):
        self.on_end()
        return super().wait(timeout)


def pending(orphans, work=None):
    """Returns a Work of large tensors in flight, and the function that ends it."""
    work, outcome = work or Driven(), Outcome()
    tensors = [torch.zeros(LARGE)]

    def end():
        work.complete(tensors)
        outcome.set_result(tensors)

    return Pending(work, outcome, orphans), end


def has_let_go(work):
    try:
        work.result()
    except UnsupportedOp:
        return True
    return False


def test_a_work_whose_tensors_were_let_go_has_succeeded():
    """C++ may ask for its state as well as wait for it."""
    orphans = Orphans()
    work, end = pending(orphans)
    end()
    orphans.keep(work)
    assert work.wait()
    assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None)
    for ask in (work.result, work.get_future):
        with pytest.raises(UnsupportedOp, match="keep the Work"):
            ask()


def test_a_work_may_be_let_go_while_a_thread_waits_for_it():
    orphans, operation = Orphans(), EndsInWait()
    work, end = pending(orphans, operation)

    def end_and_let_go():
        end()
        orphans.keep(work)

    operation.on_end = end_and_let_go
    assert work.wait()
    assert has_let_go(work)


def test_an_operation_that_is_dropped_while_another_is_looked_at_is_not_forgotten():
    orphans = Orphans()
    inner, end = pending(orphans)

    class Dropping:
        """Stands for a Work whose look runs the garbage collector, which finds another one."""

        def let_go(self):
            orphans.keep(inner)
            return True

    orphans.keep(Dropping())
    end()
    orphans.keep(pending(orphans)[0])
    assert has_let_go(inner)
