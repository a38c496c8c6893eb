"""Programs written for Echelon itself, foreseen."""

import os
from dataclasses import replace

import pytest
import torch
from torch import nn

import echelon
import echelon.pipeline
from echelon.backends.admission import check_values
from echelon.checkpoint import Store
from echelon.errors import CollectiveMismatch, DeadlockError, UnsupportedOp
from echelon.foresight.play.devices import device_named
from echelon.foresight.trace import Collective, Kernel, Message
from echelon.pipeline import Costs, schedules
from echelon.simulation import Network
from tests.foresight import programs

NUM_MICROBATCHES, WIDTH = 8, 1024


def communication(trace, kind):
    return [entry for entry in trace.entries if isinstance(entry, kind)]


def test_buckets_of_ddp_are_reduced_beside_backward():
    def main(group):
        model = echelon.DDP(programs.Decoder(2, 256).cuda(), group, bucket_mb=0.5)
        sizes.append(sum(parameter.nbytes for parameter in model.parameters()))
        programs.train(model, torch.device("cuda"))

    sizes = []
    seen = echelon.foresee(main, 4)
    assert set(seen.classes) == {0}
    calls = communication(seen.traces[0], Collective)
    assert {(call.kind, call.op, call.dtype, call.phase) for call in calls} == {
        ("all_reduce", "mean", "float32", "backward")
    }
    assert sum(call.num_bytes for call in calls) == sizes[0]
    assert len(calls) > 2
    role = seen.played.roles[0]
    last = max(span.end for span in role.phase_spans() if span.step == "backward")
    assert role.communication[0].start < last


def build(name, num_ranks=4):
    chunks = 2 if name in ("interleaved-1f1b", "looped-bfs") else None
    return schedules.build(name, num_ranks, NUM_MICROBATCHES, chunks)


def train_pipeline(group, name, dp=1):
    mesh = echelon.Mesh(group, dp=dp, pp=group.world_size // dp)
    schedule = build(name, mesh.shape["pp"])
    stages = [lambda: nn.Linear(WIDTH, WIDTH, bias=False).cuda()] * schedule.num_stages
    pipe = echelon.pipeline.Pipeline(
        stages, mesh["pp"], schedule, loss_fn=lambda out, _: out.sum(), data_parallel=mesh["dp"] if dp > 1 else None
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    while True:
        is_used = pipe.is_first or pipe.is_last
        batch = torch.ones(NUM_MICROBATCHES << 17, WIDTH, device="cuda") if is_used else None
        pipe.step(batch, target=batch)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def step_costs(seen, schedule):
    """Returns the mean cost of the actions of each stage, by their kernels."""
    found = {}
    for role in seen.played.roles.values():
        entries, seconds = role.program.trace.entries, role.program.kernel_seconds
        for begin, end, step in role.program.trace.computed:
            kernels = [index for index in range(begin, end) if isinstance(entries[index], Kernel)]
            for part in step.parts():
                own = [i for i in kernels if (entries[i].phase == "forward") == (part.kind == "F")]
                found.setdefault((part.kind, part.details["stage"]), []).append(sum(seconds[i] for i in own))

    def mean(kind):
        calls = [found.get((kind, stage), ()) for stage in range(schedule.num_stages)]
        return [sum(call) / len(call) if call else 0.0 for call in calls]

    # Stage 0 has no gradient of its input: its backward is W alone.
    inputs = [first or max(0, both - last) for first, both, last in zip(mean("I"), mean("B"), mean("W"), strict=True)]
    return Costs(forward=mean("F"), backward_input=inputs, backward_weight=mean("W"))


QUICK = ("1f1b", "zb-h1", "interleaved-1f1b")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in schedules.names()
        if name != "forward-only"
    ],
)
def test_bubble_is_that_of_the_plan(name):
    # Messages take no time, and no multiprocessors from kernels.
    network, gpu = Network(latency=0.0, bandwidth=1e30), replace(device_named("h100"), communication_sms=0)
    seen = echelon.foresee(train_pipeline, 4, (name,), gpu=gpu, hosts=4, network=network)
    assert seen.classes == (0, 1, 2, 3)
    schedule = build(name)
    roles = seen.played.roles.values()
    rows = [[span for span in role.phase_spans() if not isinstance(span.step, str)] for role in roles]
    window = max(row[-1].end - row[0].start for row in rows)
    bubble = 1 - max(sum(span.end - span.start for span in row) for row in rows) / window
    plan = schedule.simulate(step_costs(seen, schedule))
    assert bubble == pytest.approx(plan.bubble_rate, abs=0.01)
    assert window == pytest.approx(plan.span, rel=0.02)
    steps = [{str(step) for step in row} - {"other", "optimizer"} for row in seen.timeline.steps]
    assert all(set(map(str, order)) >= names for order, names in zip(schedule.orders, steps, strict=True))
    assert min(map(len, steps)) >= NUM_MICROBATCHES


def test_pipelines_and_their_replicas():
    seen = echelon.foresee(train_pipeline, 4, ("1f1b", 2))
    assert seen.classes == (0, 1, 0, 1)
    for rank, trace in seen.traces.items():
        messages = communication(trace, Message)
        assert [message.is_send for message in messages].count(True) == len(messages) / 2 == NUM_MICROBATCHES
        assert {message.peer for message in messages} == {1 - rank}
        assert {message.num_bytes for message in messages} == {WIDTH * 4 << 17}
        gradients = communication(trace, Collective)[0]
        assert (gradients.op, gradients.num_bytes) == ("mean", 4 * WIDTH**2)
        assert trace.groups[gradients.group].ranks == (rank, rank + 2)


@pytest.mark.slow
def test_1f1b_holds_less_memory_than_gpipe():
    one, other = (echelon.foresee(train_pipeline, 4, (name,)).live_memory for name in ("1f1b", "gpipe"))
    microbatch = 4 * WIDTH << 17
    # A stage holds the inputs of all 8 microbatches, or of as many as there are ranks from it to the last one.
    assert [round((more - less) / microbatch) for more, less in zip(other, one, strict=True)][1:3] == [8 - 3, 8 - 2]


def test_zero_and_synchronized_batch_norm(tmp_path):
    def main(group):
        model = nn.Sequential(nn.Linear(64, 64), echelon.SyncBatchNorm(64, group=group), nn.Linear(64, 64))
        model = echelon.DDP(model.cuda(), group, buffers="local")
        optimizer = echelon.ZeroOptimizer(torch.optim.AdamW, model.parameters(), group, lr=1e-3)
        store = Store(tmp_path / "saved")
        sizes.append(sum(parameter.nbytes for parameter in model.parameters()))
        while True:
            model(torch.ones(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            store.save(1, model=model, optimizer=optimizer).wait()

    sizes = []
    seen = echelon.foresee(main, 2)
    assert seen.skipped[0].startswith("Store.save at tests/foresight/test_echelon.py:")
    assert not (tmp_path / "saved").exists()
    calls = communication(seen.traces[0], Collective)
    assert [(call.kind, call.phase) for call in calls] == [
        ("all_gather", "forward"),
        ("all_reduce", "backward"),
        ("all_reduce", "backward"),
        ("all_gather", "optimizer"),
    ]
    assert [call.num_bytes for call in calls] == [4 * 2 * (1 + 2 * 64), 4 * 2 * 64, sizes[0], sizes[0]]


def collectives(group, *, wrong=False):
    rank, size = group.rank, group.world_size
    after, before = (rank + 1) % size, (rank - 1) % size
    weight = nn.Parameter(torch.ones(64, 64, device="cuda"))
    optimizer = torch.optim.SGD([weight])
    while True:
        x = torch.ones(8, 64, device="cuda")
        work = group.all_reduce(x, async_op=True)
        (torch.ones(64, 64, device="cuda") @ weight).sum().backward()
        assert work.wait() is x
        whole = group.all_gather(x)
        assert [len(each) for each in group.all_gather_coalesced([x, x[:3]])] == [8 * size, 3 * size]
        assert group.reduce_scatter(whole).shape == (8, 64)
        assert group.all_to_all(whole).shape == (8 * size, 64)
        assert (group.gather(x, 1) is None) == (rank != 1)
        assert group.scatter(whole if rank == 0 else None, 0).shape == (8, 64)
        if wrong and rank == 2:
            group.reduce(x, 0)
        else:
            group.broadcast(x, 1)
        if rank % 2:
            assert group.recv(before).shape == (8, 64)
        else:
            group.send(x, after)
        out = torch.empty(8, 64, device="cuda")
        receipt = group.irecv(before, 5, out)
        group.isend(x, after, 5).wait()
        assert receipt.wait() is out
        optimizer.step()


def test_collectives_and_messages_of_a_group():
    seen = echelon.foresee(collectives, 4)
    calls = communication(seen.traces[2], Collective)
    assert [(call.kind, call.num_bytes // 2048, call.root) for call in calls] == [
        ("all_reduce", 1, -1),
        ("all_gather", 4, -1),
        ("all_gather", 5, -1),
        ("reduce_scatter", 4, -1),
        ("all_to_all", 4, -1),
        ("gather", 4, 1),
        ("scatter", 4, 0),
        ("broadcast", 1, 1),
    ]
    assert calls[0].stream != calls[1].stream == 0
    messages = communication(seen.traces[2], Message)
    assert [(message.is_send, message.peer, message.tag) for message in messages] == [
        (True, 3, 0),
        (False, 1, 5),
        (True, 3, 5),
    ]


UNEVEN = {
    "all_gather, out=": lambda group, x: group.all_gather(x, out=x.new_empty(127, 64)),
    "all_gather": lambda group, x: group.all_gather(x),
    "gather": lambda group, x: group.gather(x, 0),
    "all_to_all": lambda group, x: group.all_to_all(x),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_sizes_need_the_size_of_the_result(name):
    def main(group):
        weight = nn.Parameter(torch.ones(64, 64, device="cuda"))
        optimizer = torch.optim.SGD([weight])
        while True:
            UNEVEN[name](group, torch.ones(2 - group.rank // 63, 64, device="cuda"))
            optimizer.step()

    if name == "all_gather, out=":
        seen = echelon.foresee(main, 64)
        assert seen.classes == (0,) * 63 + (63,)
        assert {call.num_bytes for call in communication(seen.traces[0], Collective)} == {127 * 256}
        return
    with pytest.raises(UnsupportedOp) as caught:
        echelon.foresee(main, 64)
    text = str(caught.value)
    assert text.startswith(f"{name} of 1 row on rank 63 at ")
    assert "and of 2 rows on rank 0: its result has an unknown size" in text
    assert {"all_gather": "give out=", "gather": "call all_gather", "all_to_all": "give out_splits="}[name] in text


def test_a_mismatch_between_ranks_names_both_lines():
    with pytest.raises(CollectiveMismatch) as caught:
        echelon.foresee(lambda group: collectives(group, wrong=True), 4)
    assert "group.reduce(x, 0)" in str(caught.value)
    assert "group.broadcast(x, 1)" in str(caught.value)


def test_a_receive_that_nobody_answers_is_named():
    def main(group):
        x = torch.ones(8, device="cuda", requires_grad=True)
        if group.rank == 0:
            group.recv(1, tag=7)
        else:
            group.send(x, 0, tag=8)

    with pytest.raises(DeadlockError, match="receive from rank 1, tag 7"):
        echelon.foresee(main, 2)


def test_ranks_refuse_fake_tensors_afterwards():
    generators = torch.cuda.default_generators
    echelon.foresee(collectives, 2)
    assert torch.cuda.default_generators is generators
    with torch._subclasses.FakeTensorMode(), pytest.raises(UnsupportedOp):
        check_values(torch.ones(1), "a test")


def on_its_device(**options):
    group = echelon.init(**options)
    local = int(os.environ["LOCAL_RANK"])
    assert (group.device, torch.cuda.current_device()) == (torch.device("cuda", local), local)
    model = echelon.DDP(nn.Linear(8, 8).to(group.device), group)
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        batch, target = torch.randn(4, 8), torch.randint(8, (4,))
        nn.functional.cross_entropy(model(batch.to(group.device)), target.to(group.device)).backward()
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"device": "cuda"}, {"backend": "nccl"}])
def test_the_device_of_a_group_is_the_gpu_of_the_rank(options):
    """It was the CPU, so a batch that the script moves to it stayed on the host, and the step failed."""
    seen = echelon.foresee(lambda: on_its_device(**options), 16, gpu="h100", hosts=2)
    assert seen.step_seconds > 0
