"""Runs of elementwise kernels as one, as torch.compile makes them."""

from echelon.foresight.play.fusion import fuse
from echelon.foresight.trace import Allocate, Free, Kernel
from tests.helpers import traces


class Step(traces.Step):
    """A step whose kernels are compiled, unless they say otherwise."""

    def kernel(self, seconds, *, is_compiled=True, **options):
        return super().kernel(seconds, is_compiled=is_compiled, **options)


def kernels(step):
    return [entry for entry in fuse(step.trace()).entries if isinstance(entry, Kernel)]


def test_a_run_reads_its_inputs_once_and_writes_what_is_left():
    step = Step()
    step.allocate(10, 100).kernel(1, reads=((1, 100), (2, 100)), writes=((10, 100),))
    step.allocate(11, 100).kernel(1, reads=((10, 100), (1, 100)), writes=((11, 100),)).free(10)
    (fused,) = kernels(step)
    assert (fused.name, fused.launches) == ("fused", 1)
    assert fused.reads == ((1, 100), (2, 100))
    assert fused.writes == ((11, 100),)


def test_tensors_inside_a_run_need_no_memory():
    step = Step().allocate(10, 100).kernel(1, writes=((10, 100),)).allocate(11, 100)
    step.kernel(1, reads=((10, 100),), writes=((11, 100),)).free(10)
    memory = [entry.storage for entry in fuse(step.trace()).entries if isinstance(entry, Allocate | Free)]
    assert memory == [11]


def test_parts_of_tensors_are_all_read():
    step = Step().kernel(1, reads=((-1, 70),)).kernel(1, reads=((-1, 30),))
    assert sum(size for _, size in kernels(step)[0].reads) == 100


def test_runs_end_at_other_work_phases_and_streams():
    step = Step().kernel(1).kernel(1).collective(1, 10).kernel(1).kernel(1, stream=1).kernel(1, phase="backward")
    assert [each.name for each in kernels(step)] == ["fused", "add", "add", "add"]


def test_optimizers_and_copies_of_fsdp_stay():
    step = Step().kernel(1, phase="optimizer").kernel(1, phase="optimizer").kernel(1).kernel(1, name="_foreach_copy_")
    assert len(kernels(step)) == 4


def test_a_compiled_loss_is_a_part_of_its_run():
    step = Step().allocate(10, 100).kernel(1, name="_log_softmax", reads=((1, 50),), writes=((10, 100),))
    step.kernel(1, name="nll_loss_forward", reads=((10, 1),), writes=((11, 1),)).free(10)
    (fused,) = kernels(step)
    assert (fused.reads, fused.writes) == (((1, 50),), ((11, 1),))


def test_kernels_that_are_not_compiled_stay():
    step = Step().kernel(1).kernel(1, is_compiled=False).kernel(1, is_compiled=False).kernel(1)
    assert [each.name for each in kernels(step)] == ["add"] * 4
    trace = Step().kernel(1, is_compiled=False).kernel(1, is_compiled=False).trace()
    assert fuse(trace) is trace
