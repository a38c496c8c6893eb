"""Mistakes of roles are found before anything is played, with the lines of both sides."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from echelon import CollectiveMismatch, DeadlockError, UnsupportedOp, foresee
from echelon.checkpoint import Store
from tests.foresight import programs
from tests.foresight.planted import RANKS, plant

# Names of collectives that torch 2.13 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning", "ignore::UserWarning:torch")


def run(source, path):
    path.write_text(source)
    code = compile(source, str(path), "exec")
    return foresee(lambda: exec(code, {"__name__": "__main__"}), RANKS)


def assert_found(seed, folder):
    planted = plant(seed)
    path = folder / f"program{seed}.py"
    with pytest.raises(CollectiveMismatch) as raised:
        run(planted.source, path)
    text = str(raised.value)
    named = {int(number) for number in re.findall(rf"{re.escape(str(path))}:(\d+)", text)}
    assert named & set(planted.lines), f"{planted.mistake} on rank {planted.rank}: {text}"
    assert f"rank {planted.rank}" in text
    # A side that has made no call at all in the group has no line.
    assert len(named) >= 2 or "none on rank" in text, text


@pytest.mark.parametrize("seed", range(4))
def test_planted_mistakes_are_found(seed, tmp_path):
    assert_found(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_planted_mistakes_are_found(tmp_path):
    for seed in range(200):
        assert_found(seed, tmp_path)


def meeting(ranks):
    programs.begin()
    x = torch.ones(8, device="cuda")
    dist.all_reduce(x)
    if dist.get_rank() in ranks:
        dist.barrier()
    dist.all_reduce(x)


def test_a_barrier_of_one_rank_is_found_and_one_of_all_takes_time():
    with pytest.raises(CollectiveMismatch, match=r"barrier at .*test_check.py:\d+ on rank 0, but .* on rank 1"):
        foresee(meeting, 4, ((0,),))
    assert foresee(meeting, 4, (range(4),)).step_seconds > foresee(meeting, 4, ((),)).step_seconds


def two_groups(same_order):
    dist.init_process_group("nccl")
    one, other = dist.new_group(range(2)), dist.new_group(range(2))
    groups = [one, other] if same_order or dist.get_rank() == 0 else [other, one]
    x = torch.ones(8, device=f"cuda:{dist.get_rank()}")
    for group in groups:
        dist.all_reduce(x, group=group)


def test_two_groups_in_different_orders_are_a_deadlock():
    with pytest.raises(DeadlockError, match=r"rank 0 waits for rank 1 in .*test_check.py:\d+.*rank 1 waits for rank 0"):
        foresee(two_groups, 2, (False,))
    assert foresee(two_groups, 2, (True,)).step_seconds > 0


def one_way():
    dist.init_process_group("nccl")
    x = torch.ones(8, device="cuda")
    if dist.get_rank() == 0:
        dist.send(x, 1)


def test_message_without_a_partner_is_found():
    with pytest.raises(
        CollectiveMismatch, match=r"send to rank 1 of 32 bytes.*test_check.py:\d+ on rank 0 has no partner"
    ):
        foresee(one_way, 2)


def sends_in_another_group():
    dist.init_process_group("nccl")
    pair = dist.new_group([0, 1])
    x = torch.ones(8, device="cuda")
    dist.send(x, 1, group=pair) if dist.get_rank() == 0 else dist.recv(x, 0)


def test_a_message_that_is_received_in_another_group_has_no_partner():
    with pytest.raises(CollectiveMismatch, match="rank 0 sends nothing that fits it, with tag 0 in the same group"):
        foresee(sends_in_another_group, 2)


def broadcasts_from_itself():
    dist.init_process_group("nccl")
    dist.broadcast(torch.ones(8, device="cuda"), dist.get_rank())


def test_a_mismatch_names_the_roots():
    with pytest.raises(CollectiveMismatch, match=r"broadcast with root 0 of 32 .* on rank 0, .* with root 1 of 32 "):
        foresee(broadcasts_from_itself, 2)


def receives_from_any():
    dist.init_process_group("nccl")
    x = torch.ones(8, device="cuda")
    dist.recv(x) if dist.get_rank() == 0 else dist.send(x, 0)


def test_a_receive_from_any_rank_is_refused():
    with pytest.raises(UnsupportedOp, match=r"^a receive from any rank at .*test_check.py:\d+ .*: name its source"):
        foresee(receives_from_any, 2)


def train_or_evaluate(model, by_message):
    """Trains on rank 0 alone, and passes something on to the others after each step."""
    x = torch.ones(8, device="cuda")
    if dist.get_rank() == 0:
        model(x).sum().backward()
    if by_message:
        dist.recv(x, 0) if dist.get_rank() else dist.send(x, 1)
    else:
        dist.broadcast(x, 0)
    if dist.get_rank() == 0:
        torch.optim.SGD(model.parameters(), 0.1).step()


def one_trains(by_message):
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    model = torch.nn.Linear(8, 8, device="cuda")
    for _ in range(4):
        train_or_evaluate(model, by_message)


@pytest.mark.parametrize("by_message", [False, True])
def test_a_rank_without_an_optimizer_has_steps_by_a_function(by_message):
    with pytest.raises(CollectiveMismatch, match=r"rank 1 has no optimizer, so all .* step of rank 0: .*--until"):
        foresee(one_trains, 2, (by_message,))
    assert foresee(one_trains, 2, (by_message,), until="train_or_evaluate").step_seconds > 0


def logs_on_rank_0(step):
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1, device="cuda"))


def test_collective_of_one_rank_among_those_of_fsdp_is_found():
    with pytest.raises(CollectiveMismatch, match=r"test_check.py:\d+ on rank 0, but none on rank 1.*programs.py:\d+"):
        foresee(lambda: programs.fsdp(depth=1, after=logs_on_rank_0), 2)


def warms_up_alone(step):
    if step == 0 and dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1, device="cuda"))


def test_collective_of_one_rank_in_the_step_before_the_last_is_found():
    text = r"call \d+ of the program .*test_check.py:\d+ on rank 0, but .*programs.py:\d+.* on rank 1"
    with pytest.raises(CollectiveMismatch, match=text):
        foresee(lambda: programs.fsdp(depth=1, after=warms_up_alone), 2)


def one_pair_warms_up(ranks):
    programs.begin()
    pairs = [dist.new_group([each, each + 1]) for each in range(0, dist.get_world_size(), 2)]
    pair = pairs[dist.get_rank() // 2]
    layer = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    for step in range(2):
        layer(torch.ones(2, 8, device="cuda")).sum().backward()
        if step == 0 and dist.get_rank() in ranks:
            dist.all_reduce(torch.ones(3, device="cuda"), group=pair)
        dist.all_reduce(layer.weight.grad, group=pair)
        optimizer.step()


def test_ranks_of_a_role_may_differ_before_the_step():
    assert foresee(one_pair_warms_up, 32, ((0, 1),)).step_seconds > 0
    with pytest.raises(CollectiveMismatch, match=r"12 bytes .* on rank 0, but .* on rank 1"):
        foresee(one_pair_warms_up, 32, ((0,),))


def saves(ranks):
    programs.begin()
    layer = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(layer.parameters())
    for _ in range(2):
        layer(torch.ones(2, 8, device="cuda")).sum().backward()
        torch.save(layer.state_dict(), "model.pt") if dist.get_rank() == 0 else None
        if dist.get_rank() in ranks:
            dist.checkpoint.save(layer.state_dict(), checkpoint_id="folder")
            Store("runs").save(1, model=layer)
        optimizer.step()


def test_checkpoint_that_only_some_ranks_save_is_a_problem():
    assert not foresee(saves, 2, ((0, 1),)).problems
    found = foresee(saves, 2, ((0,),)).problems
    assert [each.kind for each in found] == ["save of some ranks"] * 2
    assert re.match(
        r"torch.distributed.checkpoint.save at .*test_check.py:\d+ is called on rank 0, but not", str(found[0])
    )
    assert re.match(r"Store.save at .*test_check.py:\d+ is called on rank 0, but not on rank 1: every", str(found[1]))


def with_hook():
    model = DistributedDataParallel(torch.nn.Linear(8, 8, device=programs.begin()))
    model.register_comm_hook(None, bf16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("program", "cure"),
    [
        (
            lambda: programs.fsdp(depth=1, reduce_dtype=torch.bfloat16),
            "MixedPrecisionPolicy(reduce_dtype=torch.float32)",
        ),
        (
            lambda: programs.fsdp1(depth=1, reduce_dtype=torch.bfloat16),
            "MixedPrecision(reduce_dtype=torch.float32) of FSDP1 or MixedPrecisionPolicy(reduce_dtype=torch.float32) "
            "of FSDP2",
        ),
        (
            with_hook,
            "DDP of float32 parameters with autocast and without bf16_compress_hook, or "
            "MixedPrecision(reduce_dtype=torch.float32) of FSDP1",
        ),
    ],
    ids=["fsdp2", "fsdp1", "ddp"],
)
def test_reduction_in_bfloat16_is_a_problem(program, cure):
    seen = foresee(program, 2)
    assert {problem.kind for problem in seen.problems} == {"narrow reduction"}
    assert f"in bfloat16: reduce in float32, as by {cure}, unless this is meant" in str(seen.problems[0])
