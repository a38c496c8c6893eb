"""Whatever is made to go wrong ends in PeerFailed or Timeout on every survivor, or in the right result."""

import math

import pytest
import torch
from torch import nn

import echelon
from echelon.pipeline import Costs, Pipeline

NETWORK = echelon.Network(latency=1e-4, bandwidth=1e9)


def sums(group, rounds=20):
    """Adds up ones, and says how it ended."""
    try:
        for number in range(rounds):
            with group.backend.compute("round"):
                total = group.all_reduce(torch.ones(1000))
            assert (total == group.world_size).all(), number
    except (echelon.PeerFailed, echelon.Timeout) as error:
        return type(error).__name__, str(error), group.backend.now()
    return "done", "", group.backend.now()


@pytest.mark.parametrize("at", [0.0, 0.00025, 0.001])
def test_a_killed_rank_is_named_by_all_survivors(at):
    run = echelon.simulate(sums, 4, network=NETWORK, faults=[echelon.Kill(rank=2, at=at)])
    assert run.results[2] is None
    for rank in (0, 1, 3):
        kind, message, when = run.results[rank]
        assert kind == "PeerFailed"
        assert f"rank 2 failed: killed at {at:g} s by a fault of the simulation" in message
        assert when <= at + 0.001
    assert "rank 2 is killed" in run.trace


@pytest.mark.parametrize("at_op", [1, 2, 3, 10, 25])
def test_a_rank_can_be_killed_in_the_middle_of_a_collective(at_op):
    run = echelon.simulate(sums, 3, faults=[echelon.Kill(rank=1, at_op=at_op)])
    assert run.results[1] is None
    assert {run.results[rank][0] for rank in (0, 2)} == {"PeerFailed"}
    asked = [line for line in run.trace.splitlines() if " rank 1 sends " in line]
    assert len(asked) < at_op


def test_the_error_of_a_survivor_that_does_not_handle_it_is_raised():
    with pytest.raises(echelon.PeerFailed, match="rank 1 failed: killed"):
        echelon.simulate(lambda group: [group.barrier() for _ in range(9)], 3, faults=[echelon.Kill(rank=1, at_op=3)])


@pytest.mark.parametrize("left", [{0}, {0, 1}, {1, 3}])
def test_a_partition_for_ever_is_a_timeout_or_a_failure_on_every_rank(left):
    partition = echelon.NetworkPartition(left, {0, 1, 2, 3} - left, start=0.0005)
    run = echelon.simulate(sums, 4, network=NETWORK, faults=[partition], timeout=30.0)
    assert all(kind in ("PeerFailed", "Timeout") for kind, *_ in run.results)
    assert "Timeout" in str(run.results)
    assert run.elapsed < 61


def add_up(group):
    group.all_reduce(torch.ones(2))


def come_late(group):
    if group.rank == 3:
        with group.backend.compute("late"):
            pass
    add_up(group)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            add_up,
            r"though all ranks have called it: the fault partition:0,1\|2,3@0-9999 cuts ranks 0 and 1 off from "
            r"ranks 2 and 3; rank \d is in all_reduce",
        ),
        (
            come_late,
            r"for rank 3, which is .*; ranks \d and \d have called it; the fault partition:.* cuts ranks 0 and 1",
        ),
    ],
)
def test_a_timeout_names_the_partition_that_cuts_its_ranks_apart(program, words):
    with pytest.raises(echelon.Timeout, match=words):
        echelon.simulate(
            program, 4, costs={"late": 1000.0}, faults=[echelon.NetworkPartition({0, 1}, {2, 3}, end=9999.0)]
        )


def test_a_receives_timeout_names_the_partition_that_cuts_its_ranks_apart():
    words = r"which is .*; the fault partition:0\|1 cuts rank 0 off from rank 1"
    with pytest.raises(echelon.Timeout, match=words):
        echelon.simulate(hand_over, 2, faults=[echelon.NetworkPartition({0}, {1})])


def fall_behind(group):
    if group.rank == 0:
        group.subgroup([0, 1]).barrier()
    elif group.rank == 1:
        group.subgroup([0, 1])
        with group.backend.compute("late"):
            pass
    else:
        group.subgroup([0, 1])


@pytest.mark.parametrize(
    "partition", [echelon.NetworkPartition({0}, {2}), echelon.NetworkPartition({0}, {1}, end=300.0)]
)
def test_a_timeout_names_no_partition_that_is_over_or_of_other_ranks(partition):
    with pytest.raises(echelon.Timeout) as raised:
        echelon.simulate(fall_behind, 3, costs={"late": 1000.0}, faults=[partition])
    assert "partition" not in str(raised.value)


def test_a_partition_that_ends_only_takes_time():
    without = echelon.simulate(sums, 4, network=NETWORK)
    run = echelon.simulate(
        sums, 4, network=NETWORK, faults=[echelon.NetworkPartition({0}, {1, 2, 3}, start=0.0003, end=5.0)]
    )
    assert all(kind == "done" for kind, *_ in run.results)
    assert 5 < run.elapsed < 5 + without.elapsed + 0.001


def hand_over(group):
    if group.rank == 0:
        group.send(torch.ones(1), 1)
    else:
        group.recv(0)


@pytest.mark.parametrize(("start", "elapsed"), [(0.5, 9.0 + 1.0), (1.5, 1.0)])
def test_a_partition_holds_back_messages_that_are_on_their_way(start, elapsed):
    """It arrives after 1 s, or as long after the end of the partition as it takes to travel."""
    network = echelon.Network(latency=1.0, bandwidth=math.inf)
    partition = echelon.NetworkPartition({0}, {1}, start=start, end=9.0)
    assert echelon.simulate(hand_over, 2, network=network, faults=[partition]).elapsed == elapsed


def test_a_delay_takes_its_time():
    without = echelon.simulate(sums, 3, network=NETWORK)
    run = echelon.simulate(sums, 3, network=NETWORK, faults=[echelon.Delay(2.0, src=0, dst=1, end=0.0001)])
    assert all(kind == "done" for kind, *_ in run.results)
    assert run.elapsed == pytest.approx(without.elapsed + 2.0, abs=0.001)


def test_a_paused_rank_is_waited_for_or_times_out():
    run = echelon.simulate(sums, 3, network=NETWORK, faults=[echelon.Pause(rank=0, start=0.0003, end=7.0)])
    assert all(kind == "done" for kind, *_ in run.results)
    assert 7 <= run.elapsed < 7.01
    run = echelon.simulate(sums, 3, network=NETWORK, faults=[echelon.Pause(rank=0, start=0.0003)], timeout=30.0)
    assert run.results[0] is None
    assert {kind for kind, *_ in run.results[1:]} <= {"PeerFailed", "Timeout"}


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (echelon.Kill(rank=1, at_op=2), "kill:1@op=2 did not happen: rank 1 sent and received 1 message"),
        (echelon.Kill(rank=1, at=9), "kill:1@t=9 did not happen: rank 1 had ended by then"),
        (echelon.Slow(rank=1, factor=2), "slow:1x2 did not happen: rank 1 computed nothing that takes time"),
        (echelon.Delay(1.0, src=1), "delay:1-*:1 did not happen: no message went from rank 1 to any rank"),
        (
            echelon.Delay(1.0, start=2),
            "delay:*-*:1@2- did not happen: no message went from any rank to any rank in that time",
        ),
        (
            echelon.NetworkPartition({0}, {2}),
            "partition:0|2 did not happen: no message went between its two sides",
        ),
        (echelon.Pause(rank=1, start=5), "pause:1@5- did not happen: rank 1 did nothing in that time"),
    ],
)
def test_a_fault_without_an_effect_is_noted(fault, cause):
    def main(group):
        if group.rank < 2:
            hand_over(group)

    assert echelon.simulate(main, 3, costs={"round": 1.0}, faults=[fault]).notes == (cause,)


def test_the_first_of_two_kills_of_a_rank_happens():
    run = echelon.simulate(sums, 3, faults=[echelon.Kill(rank=1, at_op=3), echelon.Kill(rank=1, at_op=7)])
    assert run.notes == ("kill:1@op=7 did not happen: rank 1 was killed before",)


@pytest.mark.parametrize(
    "fault",
    [
        echelon.Kill(rank=1, at_op=3),
        echelon.Kill(rank=1, at=0.5),
        echelon.Slow(rank=1, factor=2),
        echelon.Delay(1.0),
        echelon.NetworkPartition({0}, {1, 2}, end=3.0),
        echelon.Pause(rank=1, start=0.5, end=9.0),
    ],
)
def test_a_fault_with_an_effect_is_not_noted(fault):
    assert echelon.simulate(sums, 3, costs={"round": 1.0}, faults=[fault]).notes == ()


def test_news_of_a_closed_group_are_no_effect():
    def main(group):
        group.close()

    notes = echelon.simulate(main, 2, faults=[echelon.Delay(1.0)]).notes
    assert notes == ("delay:*-*:1 did not happen: no message went from any rank to any rank",)


def test_a_slow_rank_holds_up_the_others():
    costs = {"round": 1.0}
    assert echelon.simulate(sums, 3, costs=costs).elapsed == 20.0
    assert echelon.simulate(sums, 3, costs=costs, faults=[echelon.Slow(rank=1, factor=3)]).elapsed > 40.0


def train(group):
    torch.manual_seed(1)
    try:
        ddp = echelon.DDP(nn.Linear(6, 6), group, bucket_mb=1e-5)
        for _ in range(2):
            ddp(torch.ones(2, 6)).sum().backward()
    except (echelon.PeerFailed, echelon.Timeout) as error:
        return type(error).__name__
    return [parameter.grad for parameter in ddp.parameters()]


def train_pipeline(group):
    torch.manual_seed(1)
    try:
        layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(group.world_size)])
        pipe = Pipeline(layers, group, "1f1b", 4, nn.functional.mse_loss)
        pipe.step(torch.ones(8, 4), target=torch.ones(8, 4))
    except (echelon.PeerFailed, echelon.Timeout) as error:
        return type(error).__name__
    return [parameter.grad for parameter in pipe.parameters()]


def drawn(draw, world_size):
    """Draws a kill, a pause, a delay or a partition."""
    rank, other = draw.sample(range(world_size), 2)
    start = draw.uniform(0, 0.01)
    return [
        draw.choice(
            [
                echelon.Kill(rank=rank, at=start),
                echelon.Kill(rank=rank, at_op=draw.randint(1, 60)),
                echelon.NetworkPartition({rank}, {other}, start=start),
                echelon.NetworkPartition({rank}, set(range(world_size)) - {rank}, start=start, end=start + 1),
                echelon.Delay(draw.uniform(0, 1), src=rank),
                echelon.Pause(rank=rank, start=start, end=start + 1),
                echelon.Pause(rank=rank, start=start),
            ]
        )
    ]


@pytest.mark.parametrize("program", [train, train_pipeline])
@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, 600), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_faults_drawn_from_the_seed_never_give_a_wrong_number(program, seeds):
    """Every rank ends with the right gradients, a PeerFailed or a Timeout, or was the one that was stopped."""
    right = echelon.simulate(program, 3, network=NETWORK).results
    outcomes = set()

    def check(run):
        for mine, expected in zip(run.results, right, strict=True):
            if isinstance(mine, list):
                assert all(torch.equal(left, other) for left, other in zip(mine, expected, strict=True))
                outcomes.add("right")
            else:
                assert mine in ("PeerFailed", "Timeout", None), mine
                outcomes.add(mine)

    costs = Costs(forward=0.001, backward_input=0.001, backward_weight=0.001)
    echelon.explore(program, 3, seeds, network=NETWORK, costs=costs, faults=drawn, check=check)
    assert {"right", "PeerFailed", None} <= outcomes


def test_the_same_seed_draws_the_same_faults():
    runs = [echelon.simulate(train, 3, seed=4, network=NETWORK, faults=drawn) for _ in range(2)]
    assert runs[0].trace == runs[1].trace


def clean_up_after(group, cleaned):
    try:
        group.barrier()
        group.recv((group.rank + 1) % 2)
    finally:
        cleaned.append(group.rank)
        try:
            group.barrier()
        except echelon.PeerFailed:
            cleaned.append("failed")


def test_a_killed_rank_says_nothing_more():
    cleaned = []
    with pytest.raises(echelon.PeerFailed):
        echelon.simulate(clean_up_after, 2, (cleaned,), faults=[echelon.Kill(rank=0, at_op=3)])
    assert sorted(map(str, cleaned)) == ["0", "1", "failed"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: [echelon.Kill(rank=0)], "needs either at= .* or at_op="),
        (lambda: [echelon.Kill(rank=0, at_op=0)], "counted from 1"),
        (lambda: [echelon.Kill(rank=0, at=-1.0)], "at least 0"),
        (lambda: [echelon.Kill(rank=3, at=1.0)], "Kill: rank=3 is not a rank of this group of 3: use 0 to 2"),
        (lambda: [echelon.Slow(rank=0, factor=2.0)], "computing costs nothing here: give costs="),
        (lambda: [echelon.Slow(rank=0, factor=0.0)], "give a factor above 0"),
        (lambda: [echelon.NetworkPartition({0}, {0, 1})], "without a common one"),
        (lambda: [echelon.Pause(rank=0, start=2.0, end=1.0)], "end must come after the start"),
        (lambda: [echelon.Delay(0.0)], "give seconds above 0"),
    ],
)
def test_faults_that_make_no_sense_are_refused(make, words):
    with pytest.raises((echelon.LaunchError, echelon.InvalidRank), match=words):
        echelon.simulate(sums, 3, faults=make())


def start_and_return(group):
    group.all_reduce(torch.ones(8), async_op=True)


@pytest.mark.parametrize("at_op", range(1, 5))
def test_a_rank_that_has_returned_finishes_its_operations(at_op):
    """The death came in the middle of them. It ended the operation, and the rank waited for that operation for ever."""
    faults = [echelon.Kill(1, at_op=at_op)]
    assert echelon.simulate(start_and_return, 3, network="10GbE", faults=faults).results == [None] * 3
