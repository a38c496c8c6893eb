"""Schedules to and from torch.distributed.pipelining: torch's own are read, and ours run in torch's runtime."""

from __future__ import annotations

import re
from operator import eq
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as of_torch

from echelon._torch_versions import release
from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import Action
from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.schedules import build, names
from tests.helpers.named_schedules import sizes_of
from tests.helpers.torch_groups import gloo

MULTI = {
    "looped-bfs": of_torch.ScheduleLoopedBFS,
    "interleaved-1f1b": of_torch.ScheduleInterleaved1F1B,
    "interleaved-zb": of_torch.ScheduleInterleavedZeroBubble,
    "zb-v": of_torch.ScheduleZBVZeroBubble,
    "dualpipe-v": of_torch.ScheduleDualPipeV,
}
V_SHAPED = ("zb-v", "dualpipe-v")

SIZES = [(2, 4), (2, 6), (4, 8), (4, 12), (8, 16)]


def torch_stages(ranks: int, stages: int) -> list[SimpleNamespace]:
    """Stands in for the stages of rank 0, of which torch's schedules ask sizes only."""
    return [
        SimpleNamespace(stage_index=index, num_stages=stages, group_size=ranks, group_rank=0, submod=None)
        for index in range(0, stages, ranks)
    ]


def torch_text(order: dict[int, list[object]]) -> str:
    return "\n".join(",".join("" if step is None else str(step) for step in order[rank]) for rank in sorted(order))


def torch_schedule(name: str, ranks: int, microbatches: int, chunks: int = 2) -> of_torch.PipelineScheduleMulti:
    return MULTI[name](torch_stages(ranks, ranks * chunks), microbatches)


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_torchs_schedules_load_check_and_simulate(name, ranks, microbatches, tmp_path):
    theirs = torch_schedule(name, ranks, microbatches)
    theirs._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
    schedule = Schedule.from_csv(tmp_path / "theirs.csv")
    schedule.check()
    assert (schedule.num_ranks, schedule.num_chunks, schedule.num_microbatches) == (ranks, 2, microbatches)
    assert schedule.placement == tuple(theirs.stage_index_to_group_rank[stage] for stage in range(2 * ranks))
    timeline = schedule.simulate(Costs(1, 1, 1))
    assert timeline.busy == (6 * microbatches,) * ranks
    assert timeline.makespan > 6 * microbatches


@pytest.mark.parametrize("name", MULTI)
def test_torchs_schedules_load_with_their_communication(name, tmp_path):
    theirs = torch_schedule(name, 4, 8)
    theirs._dump_csv(str(tmp_path / "theirs.csv"), format="compute_comms")
    assert "SEND_F" in (tmp_path / "theirs.csv").read_text()
    schedule = Schedule.from_csv(tmp_path / "theirs.csv")
    schedule.check()
    assert schedule.orders == Schedule.from_text(torch_text(theirs.pipeline_order)).orders


@pytest.mark.parametrize(
    "cell",
    [
        "0SEND_F1",
        "0RECV_B1",
        "0WAIT_SEND_F1",
        "0WAIT_SEND_B1",
        "0UNSHARD",
        "0RESHARD",
        "0REDUCE_GRAD",
        "0WAIT_REDUCE_GRAD",
    ],
)
def test_cells_that_torch_adds_are_passed_over(cell):
    assert str(Schedule.from_text(f"0F0,{cell},0B0")) == "0F0,0B0"


def test_every_kind_of_torchs_actions_is_known():
    for kind in of_torch._ComputationType:
        if kind is not of_torch.OVERLAP_F_B:
            cell = of_torch._Action(0, kind, 0)
            assert str(Schedule.from_text(f"0F0,{cell},0B0")).startswith("0F0"), cell


@pytest.mark.parametrize("name", ["interleaved-1f1b", "dualpipe-v"])
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_torch_and_echelon_agree(name, ranks, microbatches):
    theirs = Schedule.from_text(torch_text(torch_schedule(name, ranks, microbatches).pipeline_order))
    assert theirs.orders == build(name, ranks, microbatches, 2).orders


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_torchs_gpipe_is_ours(ranks, microbatches):
    order = of_torch.ScheduleGPipe(torch_stages(ranks, ranks)[0], microbatches)._get_pipeline_order()
    assert Schedule.from_text(torch_text(order)).orders == build("gpipe", ranks, microbatches).orders


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_torchs_1f1b_is_wrong_on_the_last_rank(ranks, microbatches):
    """torch publishes forwards 1 to m for the last rank instead of 0 to m - 1. What it runs is another code."""
    order = of_torch.Schedule1F1B(torch_stages(ranks, ranks)[0], microbatches)._get_pipeline_order()
    schedule = Schedule.from_text(torch_text(order), num_microbatches=microbatches)
    assert schedule.orders[:-1] == build("1f1b", ranks, microbatches).orders[:-1]
    last = ranks - 1
    assert [problem.text for problem in schedule.problems] == [
        f"{last}B0 (rank {last}, step 1) needs {last}F0, which never runs",
        f"{last}F{microbatches} (rank {last}, step {2 * microbatches - 2}) does not exist: "
        f"the schedule has {ranks} stages and {microbatches} microbatches, and the kinds F, I, W and B",
        f"{last}F0 missing on rank {last}",
    ]


@pytest.mark.parametrize("name", [name for name in names() if name != "forward-only"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (3, 7), (4, 9), (8, 16)])
def test_torch_takes_our_schedules(name, ranks, microbatches, tmp_path):
    schedule = build(name, *sizes_of(name, ranks, microbatches, 2))
    schedule.to_csv(tmp_path / "ours.csv")
    theirs = of_torch._PipelineScheduleRuntime(torch_stages(ranks, schedule.num_stages), schedule.num_microbatches)
    theirs._load_csv(str(tmp_path / "ours.csv"), format="compute_only")
    assert theirs.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    assert [list(map(str, theirs.pipeline_order[rank])) for rank in range(ranks)] == [
        list(map(str, order)) for order in schedule.orders
    ]


def run_in_torch(group, path, placement, num_microbatches, folder):
    """Trains one step of a chain of linear layers in torch's runtime; returns this rank's gradients by stage."""
    with gloo(group, f"{folder}/store"):
        layers = chain(len(placement))
        device = torch.device("cpu")
        mine = [stage for stage, rank in enumerate(placement) if rank == group.rank]
        stages = [PipelineStage(layers[stage], stage, len(placement), device) for stage in mine]
        runtime = of_torch._PipelineScheduleRuntime(stages, num_microbatches, loss_fn=torch.nn.functional.mse_loss)
        runtime._load_csv(path)
        inputs, target = batch(num_microbatches)
        runtime.step(*([inputs] if 0 in mine else []), target=target if len(placement) - 1 in mine else None)
        return {stage: layers[stage].weight.grad.tolist() for stage in mine}


def chain(num_stages: int) -> list[torch.nn.Linear]:
    torch.manual_seed(0)
    return [torch.nn.Linear(4, 4) for _ in range(num_stages)]


def batch(num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2 * num_microbatches, 4, generator=generator) for _ in range(2))


@pytest.mark.parametrize("name", [name for name in names() if name != "forward-only"])
def test_our_schedules_run_in_torchs_runtime(name, pool, tmp_path):
    schedule = build(name, *sizes_of(name, 2, 5, 2))
    if release(torch.__version__) < (2, 12) and any(map(eq, schedule.placement, schedule.placement[1:])):
        pytest.skip("the runtime of torch 2.11 sends between two stages of one rank, which Gloo cannot")
    schedule.to_csv(tmp_path / "ours.csv")
    arguments = str(tmp_path / "ours.csv"), schedule.placement, schedule.num_microbatches, str(tmp_path)
    gradients = {}
    for of_rank in pool.run(run_in_torch, 2, *arguments):
        gradients |= of_rank
    layers = chain(schedule.num_stages)
    inputs, target = batch(schedule.num_microbatches)
    torch.nn.functional.mse_loss(torch.nn.Sequential(*layers)(inputs), target).backward()
    for stage, layer in enumerate(layers):
        torch.testing.assert_close(torch.tensor(gradients[stage]), layer.weight.grad)


def test_empty_cells_blanks_quotes_and_line_ends_do_not_matter():
    schedule = Schedule.from_text(' 0F0 ,,"0B0",\r\n,1F0,,1B0\r\n')
    assert str(schedule) == "0F0,0B0\n1F0,1B0"


def test_a_rank_without_steps_keeps_its_line():
    schedule = Schedule.from_text("0F0,0B0\n\n1F0,1B0")
    assert schedule.placement == (0, 2)
    assert schedule.orders[1] == ()


def test_the_number_of_microbatches_may_be_given():
    schedule = Schedule.from_text("0F0,0B0", num_microbatches=2)
    assert [problem.text for problem in schedule.problems] == ["0F1 and 0B1 missing on rank 0"]


def test_an_action_on_a_strange_rank_does_not_move_its_stage():
    schedule = Schedule.from_text("0F0,0B0\n1F0,1B0,0F1\n,")
    assert schedule.placement == (0, 1)
    assert any("wrong rank" in problem.text for problem in schedule.problems)


def test_a_file_takes_its_schedules_name(tmp_path):
    build("gpipe", 2, 2).to_csv(tmp_path / "mine.csv")
    schedule = Schedule.from_csv(tmp_path / "mine.csv")
    assert schedule.name == "mine"
    assert (tmp_path / "mine.csv").read_bytes() == b"0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,oops", "rank 1, cell 1: 'oops' is not an action"),
        ("", "there is no action"),
        (",,\n,", "there is no action"),
        ("0F0,2F0", "no rank runs stage 1 of 3: number the stages from 0 without gaps"),
    ],
)
def test_text_that_is_no_schedule(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_text(text)


def test_forward_only_is_seen():
    assert Schedule.from_text("0F0\n1F0").forward_only
    assert Schedule.from_text("0F0\n1F0").orders == ((Action(0, "F", 0),), (Action(1, "F", 0),))


def test_a_microbatch_number_beyond_the_actions_is_refused_before_anything_is_allocated():
    with pytest.raises(ScheduleError, match="microbatch 99999999999 among 1 actions"):
        Schedule.from_text("0F99999999999")


def test_an_error_of_a_file_names_it(tmp_path):
    path = tmp_path / "empty.csv"
    path.touch()
    with pytest.raises(ScheduleError, match=re.escape(f"{path}: there is no action: write")):
        Schedule.from_csv(path)


def test_a_file_of_a_spreadsheet_begins_with_a_mark(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n")
    assert str(Schedule.from_csv(path)) == "0F0,0B0"


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(b"0F0,\xff")
    with pytest.raises(ScheduleError, match=r"cannot read .*mine\.csv: it is not text"):
        Schedule.from_csv(path)


def test_a_number_of_more_digits_than_python_converts():
    with pytest.raises(ScheduleError, match=r"rank 0, cell 1: '0F9+' is not an action"):
        Schedule.from_text("0F0,0F" + "9" * 5000)
