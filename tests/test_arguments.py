"""Wrong arguments are refused at the edge, in one line that says what to do, and the group goes on."""

import copy
import fractions
import inspect
import math
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import echelon
from echelon import functional
from echelon.arguments import check_default_timeout, check_seconds, choices, named, refuse_others
from echelon.collectives.plans import algorithms
from echelon.errors import InvalidArgument, LaunchError
from echelon.pipeline import Costs, Pipeline, Schedule, schedules, split

BAD_TIMEOUTS = ("60", -1, -0.5, float("nan"), True, [1.0])


def refused(call):
    """Returns the message of the error that a call raises, which has one line."""
    with pytest.raises(echelon.EchelonError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return type(caught.value).__name__, message


@pytest.mark.parametrize("timeout", BAD_TIMEOUTS)
def test_no_timeouts(timeout):
    with pytest.raises(InvalidArgument, match="use a number of seconds, 0 or more"):
        check_seconds(timeout)
    with pytest.raises(LaunchError, match="use a number of seconds above 0"):
        check_default_timeout(timeout, LaunchError)


@pytest.mark.parametrize("timeout", [1, 0.5, math.inf, np.float32(0.5), np.int64(2), fractions.Fraction(1, 2)])
def test_timeouts(timeout):
    assert check_seconds(timeout) == check_default_timeout(timeout, LaunchError) == timeout


@pytest.mark.parametrize("timeout", [*BAD_TIMEOUTS, 0, None])
def test_a_world_with_such_a_timeout_is_not_begun(timeout):
    for call in (
        lambda: echelon.init(timeout=timeout),
        lambda: echelon.spawn(print, 1, timeout=timeout),
        lambda: echelon.simulate(print, 1, timeout=timeout),
    ):
        assert refused(call) == ("LaunchError", f"timeout={timeout!r}: use a number of seconds above 0")


def calls_with(group, timeout):
    """Every call of a group that waits."""
    ones, peer = torch.ones(2), 1 - group.rank
    rows = torch.ones(2, 2)
    return [
        lambda: group.all_reduce(ones, timeout=timeout),
        lambda: group.all_reduce(ones, async_op=True, timeout=timeout),
        lambda: group.reduce(ones, 0, timeout=timeout),
        lambda: group.broadcast(ones, timeout=timeout),
        lambda: group.all_gather(ones, timeout=timeout),
        lambda: group.gather(ones, 0, timeout=timeout),
        lambda: group.scatter(rows, 0, timeout=timeout),
        lambda: group.reduce_scatter(rows, timeout=timeout),
        lambda: group.all_to_all(rows, timeout=timeout),
        lambda: group.empty(2, timeout=timeout),
        lambda: group.barrier(timeout=timeout),
        lambda: group.all_reduce_coalesced([ones], timeout=timeout),
        lambda: group.all_gather_coalesced([ones], timeout=timeout),
        lambda: group.all_gather_object(1, timeout=timeout),
        lambda: group.broadcast_object(1, timeout=timeout),
        lambda: group.gather_object(1, 0, timeout=timeout),
        lambda: group.scatter_object([1, 2], 0, timeout=timeout),
        lambda: group.send(ones, peer, timeout=timeout),
        lambda: group.recv(peer, timeout=timeout),
        lambda: group.recv_any(timeout=timeout),
        lambda: group.sendrecv(ones, peer, peer, timeout=timeout),
    ]


def wrong_timeouts(group):
    group.all_reduce(torch.ones(2))  # what the next one like it needs not check again
    for timeout in BAD_TIMEOUTS:
        for call in calls_with(group, timeout):
            with pytest.raises(InvalidArgument, match="use a number of seconds"):
                call()
        work = group.barrier(async_op=True)
        with pytest.raises(InvalidArgument, match="use a number of seconds"):
            work.wait(timeout)
        work.wait()
    group.barrier(async_op=True).wait(math.inf)  # an OverflowError of a lock
    return group.all_reduce(torch.ones(2), timeout=np.float64(20.0))[0].item()


def test_a_wrong_timeout_of_a_call_does_no_harm(run):
    assert run(wrong_timeouts, 2) == [2.0, 2.0]


def torch_spellings(group):
    results = [
        group.all_reduce(torch.full((2,), float(group.rank)), op)[0].item()
        for op in ("avg", dist.ReduceOp.AVG, "mean", dist.ReduceOp.MAX, "SUM")
        for _ in range(2)
    ]
    first = group.reduce_scatter(torch.full((2,), 1.0 + group.rank), "avg").item()
    (listed,) = group.all_reduce_coalesced([torch.full((1,), 1.0 + group.rank)], dist.ReduceOp.AVG)
    through = functional.all_reduce(torch.full((1,), 1.0 + group.rank), group, "avg").item()
    # A rank may write "avg" where another writes "mean": the call is the same.
    mixed = group.all_reduce(torch.full((1,), 1.0 + group.rank), "avg" if group.rank else "mean").item()
    return results, first, listed.item(), through, mixed


def test_reductions_in_the_spelling_of_torch(run):
    expected = [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert run(torch_spellings, 2) == [(expected, 1.5, 1.5, 1.5, 1.5)] * 2


def wrong_kinds(group):
    ones, model = torch.ones(2), nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    calls = {
        "scatter a list": lambda: group.scatter([ones, ones], src=group.rank),
        "scatter a number": lambda: group.scatter(3, src=group.rank),
        "a generator": lambda: group.all_reduce_coalesced(each.detach() for each in model.parameters()),
        "a tensor for a list": lambda: group.all_gather_coalesced(ones),
        "out is a list": lambda: group.all_gather(ones, [ones, ones]),
        "splits": lambda: group.all_to_all(ones, in_splits=2),
        "splits of floats": lambda: group.all_to_all(ones, out_splits=[1.0, 1.0]),
        "shape": lambda: group.empty(-1),
        "dtype": lambda: group.empty(2, dtype="float32"),
        "ranks": lambda: group.subgroup(0),
        "messages": lambda: group.batch_isend_irecv([(ones, 0)]),
        "op": lambda: group.all_reduce(ones, "maen"),
        "a class": lambda: echelon.DDP(nn.Linear, group),
        "no module": lambda: echelon.DDP(adam, group),
        "a hook": lambda: echelon.DDP(model, group, hook=torch.bfloat16),
        "a size": lambda: echelon.DDP(model, group, bucket_mb="25"),
        "an option": lambda: echelon.DDP(model, group, buffers="brodcast"),
        "meta": lambda: echelon.DDP(nn.Linear(2, 2, device="meta"), group),
        "meta for an optimizer": lambda: echelon.ZeroOptimizer(
            torch.optim.Adam, nn.Linear(2, 2, device="meta").parameters(), group
        ),
        "an optimizer": lambda: echelon.ZeroOptimizer(adam, model.parameters(), group),
        "its name": lambda: echelon.ZeroOptimizer("adam", model.parameters(), group),
        "no tensor": lambda: functional.all_reduce([1.0], group),
        "a root of functional.gather": lambda: functional.gather(ones, 2, group),
        "a root of functional.reduce": lambda: functional.reduce(ones, 2, group, "max"),  # it was ignored
        "a root of functional.scatter": lambda: functional.scatter(ones, "0", group),
        "a root below 0": lambda: functional.scatter(ones, -1, group),  # it gave an empty tensor
        "splits of functional": lambda: functional.all_to_all(ones, group, 2),
        "torch's order of recv": lambda: group.recv(ones, 1),
        "a rank of numpy": lambda: group.broadcast(ones, src=np.int64(0)),
        "a rank twice": lambda: group.subgroup([0, 0]),
        "no ranks": lambda: group.subgroup([]),
        "text for ranks": lambda: group.subgroup("01"),
        "an axis": lambda: echelon.Mesh(group, dp="2"),
        "text for values": lambda: group.scatter_object("ab", src=group.rank),
        "a number for values": lambda: group.scatter_object(3, src=group.rank),
        "a callback": lambda: group.when_closed(3),
        "a tensor of a timeout": lambda: group.barrier(timeout=torch.ones(9, 9)),
        "a tensor of parameters": lambda: echelon.ZeroOptimizer(torch.optim.Adam, model.weight, group),
        "a model of parameters": lambda: echelon.ZeroOptimizer(torch.optim.Adam, model, group),
        "no module to convert": lambda: echelon.SyncBatchNorm.convert(nn.BatchNorm1d, group),
    }
    messages = {name: refused(call) for name, call in calls.items()}
    group.barrier()
    return messages


WRONG_KINDS = {
    "scatter a list": ("UnsupportedOp", "takes one tensor, which it splits along dim 0, not a list: pass torch.cat"),
    "scatter a number": ("UnsupportedOp", "scatter takes a tensor, not int"),
    "a generator": ("InvalidArgument", "takes a list of tensors, but they are of type generator: pass a list"),
    "a tensor for a list": ("InvalidArgument", "takes a list of tensors, but they are of type Tensor: pass a list"),
    "out is a list": ("InvalidArgument", "out is of type list: pass one tensor for the whole result"),
    "splits": ("InvalidArgument", "in_splits=2: give a list"),
    "splits of floats": ("InvalidArgument", "out_splits=[1.0, 1.0]: give a list"),
    "shape": ("InvalidArgument", "shape=-1: give whole numbers from 0 to 2^63 - 1"),
    "dtype": ("InvalidArgument", "dtype='float32': give a dtype of torch"),
    "ranks": ("InvalidArgument", "ranks=0: give a list of ranks"),
    "messages": ("InvalidArgument", "takes SendTo(tensor, dst) and RecvFrom(src), not tuple"),
    "op": ("UnsupportedOp", "op='maen': did you mean mean? There are sum, "),
    "a class": ("InvalidArgument", "module is the class Linear: pass an instance of it, such as Linear(...)"),
    "no module": ("InvalidArgument", "module is of type Adam: pass the model, a torch.nn.Module"),
    "a hook": ("InvalidArgument", "hook is of type dtype: pass a GradientHook"),
    "a size": ("InvalidArgument", "bucket_mb='25': use a size in mebibytes above 0"),
    "an option": ("InvalidArgument", "buffers='brodcast': did you mean 'broadcast'? There are 'broadcast', 'average'"),
    "meta": ("UnsupportedOp", "'weight' is on the meta device and has no values: call model.to_empty(device='cpu')"),
    "meta for an optimizer": (
        "UnsupportedOp",
        "parameter 0 is on the meta device and has no values: call model.to_emp",
    ),
    "an optimizer": (
        "InvalidArgument",
        "optimizer_class is of type Adam: pass a class, its parameters and its options",
    ),
    "its name": ("InvalidArgument", "optimizer_class is 'adam' (str): pass a class"),
    "no tensor": ("UnsupportedOp", "functional.all_reduce takes a tensor, not list"),
    "a root of functional.gather": ("InvalidRank", "dst=2 is not a rank of this group of 2: use 0 to 1"),
    "a root of functional.reduce": ("InvalidRank", "dst=2 is not a rank of this group of 2: use 0 to 1"),
    "a root of functional.scatter": ("InvalidRank", "src='0' is not a rank of this group of 2: use an int, 0 to 1"),
    "a root below 0": ("InvalidRank", "src=-1 is not a rank"),
    "splits of functional": ("InvalidArgument", "in_splits=2: give a list"),
    "torch's order of recv": (
        "InvalidRank",
        "src=<Tensor> is not a rank of this group of 2: use an int, 0 to 1. recv(src) returns the tensor, and "
        "recv(src, out=tensor) overwrites it",
    ),
    "a rank of numpy": ("InvalidRank", "use an int, 0 to 1"),
    "a rank twice": ("InvalidArgument", "ranks=[0, 0] names a rank twice: give at least one rank, and each once"),
    "no ranks": ("InvalidArgument", "ranks=[] is empty: give at least one rank"),
    "text for ranks": ("InvalidArgument", "ranks='01': give a list of ranks"),
    "an axis": ("InvalidArgument", "dp is '2' (str): give the size of an axis, a whole number of at least 1"),
    "text for values": ("InvalidArgument", "values is 'ab' (str): give a list with one for each rank"),
    "a number for values": ("InvalidArgument", "values is 3 (int): give a list with one for each rank"),
    "a callback": ("InvalidArgument", "callback is 3 (int): give a function without arguments"),
    "a tensor of a timeout": ("InvalidArgument", "timeout=<Tensor>: use a number of seconds"),
    "a tensor of parameters": ("InvalidArgument", "params is of type Parameter: pass the parameters, such as model.p"),
    "a model of parameters": ("InvalidArgument", "params is of type Linear: pass the parameters, such as model.param"),
    "no module to convert": ("InvalidArgument", "module is the class BatchNorm1d: pass an instance of it"),
}


def test_wrong_kinds_get_one_line_and_do_no_harm(run):
    for messages in run(wrong_kinds, 2):
        assert messages.keys() == WRONG_KINDS.keys()
        for name, (kind, part) in WRONG_KINDS.items():
            assert messages[name][0] == kind, (name, messages[name])
            assert part in messages[name][1], name


def takers(group):
    """Every constructor and function that takes a group."""
    model, ones = nn.Linear(2, 2), torch.ones(2, requires_grad=True)
    layers = nn.Sequential(nn.Linear(2, 2))
    return [
        lambda: echelon.DDP(model, group),
        lambda: echelon.ZeroOptimizer(torch.optim.Adam, model.parameters(), group),
        lambda: echelon.SyncBatchNorm(2, group),
        lambda: echelon.SyncBatchNorm.convert(nn.BatchNorm1d(2), group),
        lambda: echelon.Mesh(group, dp=1),
        lambda: Pipeline(layers, group, "1f1b", 2),
        lambda: functional.all_reduce(ones, group),
        lambda: functional.reduce(ones, 0, group),
        lambda: functional.broadcast(ones, 0, group),
        lambda: functional.all_gather(ones, group),
        lambda: functional.gather(ones, 0, group),
        lambda: functional.scatter(ones, 0, group),
        lambda: functional.reduce_scatter(ones, group),
        lambda: functional.all_to_all(ones, group),
        lambda: functional.send(ones, 0, group),
        lambda: functional.recv(0, group),
        lambda: functional.sendrecv(ones, 0, 0, group),
    ]


@pytest.mark.parametrize("group", [2, None, "world", torch.ones(3, 3)], ids=["int", "None", "str", "tensor"])
def test_what_is_no_group(group):
    for call in takers(group):
        kind, message = refused(call)
        assert kind == "InvalidArgument"
        assert f"group is {named(group)}: pass the group that echelon.init() returned" in message


def test_a_group_of_torch(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        for group, kind in ((dist.group.WORLD, "ProcessGroup"), (DeviceMesh("cpu", [0]), "DeviceMesh")):
            for call in takers(group):
                assert refused(call) == (
                    "InvalidArgument",
                    f"group is torch's {kind}: pass the group that echelon.init() returns, under the same launcher, or "
                    "a subgroup of it",
                )
    finally:
        dist.destroy_process_group()


def copies_of(group):
    mesh = echelon.Mesh(group, dp=group.world_size)
    pipe = Pipeline(nn.Sequential(*[nn.Linear(2, 2) for _ in range(group.world_size)]), group, "1f1b", 2)
    layer = echelon.SyncBatchNorm(2, group)
    for holder in (group, mesh, pipe, layer):
        # Averages of a model's weights copy its layers.
        for copied in (pickle.dumps, *[copy.deepcopy] * (holder is not layer)):
            with pytest.raises(echelon.UnsupportedOp, match=r"cannot be copied or pickled: call echelon\.init\(\)"):
                copied(holder)
    return group.all_reduce(torch.ones(1)).item()


def test_a_group_cannot_be_copied(run):
    assert run(copies_of, 2) == [2.0, 2.0]


def test_the_nearest_name_is_proposed():
    assert choices("1fb1", ["gpipe", "1f1b"]) == "did you mean 1f1b? There are gpipe, 1f1b"
    assert choices("10gbe", ["1GbE", "10GbE"]) == "did you mean 10GbE? There are 1GbE, 10GbE"
    assert choices("zebra", ["gpipe", "1f1b"]) == "use one of gpipe, 1f1b"
    assert choices(3, ["gpipe"], "choose from") == "choose from gpipe"


@pytest.mark.parametrize(
    ("call", "nearest"),
    [
        (lambda: schedules.build("1fb1", 2, 2), "1f1b"),
        (lambda: algorithms.build("all_reduce", "rnig", 2), "ring"),
        (lambda: algorithms.build("allreduce", "ring", 2), "all_reduce"),
        (lambda: echelon.init("glo"), "gloo"),
        (lambda: echelon.spawn(print, 1, backend="smh"), "shm"),
        (lambda: echelon.simulate(print, 1, network="10gb"), "10GbE"),
    ],
)
def test_names_are_proposed_from_python(call, nearest):
    assert f"did you mean {nearest}? There are " in refused(call)[1]


def test_a_schedule_that_is_no_name():
    assert refused(lambda: schedules.build(["1f1b"], 2, 2))[1].startswith(
        "no schedule is called ['1f1b']: choose from "
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda schedule: schedule.simulate(3), "costs is 3 (int): give Costs(...)"),
        (lambda schedule: schedule.simulate(0), "costs is 0 (int): give Costs(...)"),
        (lambda _: schedules.search({"forward": 1}, 2, 4), "costs is of type dict: give Costs(...)"),
        (lambda _: schedules.recommend(Costs, 2, 4), "costs is the class Costs: give Costs(...)"),
        (lambda _: schedules.recommend(Costs(), 2, 4, "x"), "memory_limit is 'x' (str): give a number"),
        (lambda _: schedules.recommend(Costs(), 2, 4, capacity="x"), "capacity is 'x' (str): give a number"),
        (lambda _: Schedule.from_text(None), "text is None: give the orders as text"),
        (lambda _: Schedule.from_text("0F0,0B0", "1"), "num_microbatches='1': a schedule needs at least 1"),
        (lambda schedule: schedule.to_csv("a\0b.csv"), "path is 'a\\x00b.csv', with a null character: give the name"),
        (lambda _: split(nn.Sequential(nn.Linear(2, 2)), "1"), "num_stages='1': give a whole number of at least 1"),
    ],
)
def test_wrong_kinds_for_schedules_and_cuts(call, message):
    assert refused(lambda: call(schedules.build("1f1b", 2, 2)))[1].startswith(message)


def wrong_kinds_for_a_pipeline(group):
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(
        echelon.UnsupportedOp, match=r"loss_fn is the class MSELoss: pass an instance of it, such as MS"
    ):
        Pipeline(model, group, "1f1b", 2, loss_fn=nn.MSELoss)
    pipe = Pipeline(model, group, "1f1b", 2, loss_fn=nn.MSELoss())
    inputs = torch.ones(2, 2)
    pipe.step(inputs, target=inputs)
    gradient = model[0].weight.grad.clone()
    for limits in (("1",), (-1.0,), (math.nan,), (None,), (1.0, None)):
        assert refused(lambda limits=limits: pipe.clip_grad_norm_(*limits))[0] == "InvalidArgument"
    assert torch.equal(model[0].weight.grad, gradient)
    pipe.clip_grad_norm_(math.inf)


def test_a_pipeline_clips_by_no_limit_that_is_none():
    echelon.simulate(wrong_kinds_for_a_pipeline, 1)


def wrong_mesh(group):
    return refused(lambda: echelon.Mesh(group, dp=4))[1]


def test_a_mesh_of_other_ranks_names_the_command():
    assert echelon.simulate(wrong_mesh, 2).results[0].endswith("start as many ranks: echelon run -n 4 script.py")


@pytest.mark.parametrize(("fn", "args"), [(3, ()), (print, 3), (print, "ab")])
def test_no_function_and_no_arguments(fn, args):
    for start in (echelon.spawn, echelon.simulate):
        kind, message = refused(lambda start=start: start(fn, 1, args))
        assert kind == "LaunchError"
        assert message.startswith((f"fn={fn!r}: give the function", f"args={args!r}: give a tuple"))


def test_a_call_that_refuses_others_keeps_its_signature():
    assert list(inspect.signature(Pipeline).parameters)[:4] == ["model", "group", "schedule", "num_microbatches"]
    assert list(inspect.signature(Costs).parameters)[:2] == ["forward", "backward_input"]
    assert Costs.__init__.__name__ == "__init__"


def test_options_that_are_passed_on_are_not_refused():
    @refuse_others(process_group="group")
    def make(first, group=None, **options):
        return options

    assert make(1, lr=2) == {"lr": 2}
    with pytest.raises(InvalidArgument, match=r"^process_group is no argument here: did you mean group\?$"):
        make(1, process_group=3)
    with pytest.raises(InvalidArgument, match=r"^first is missing: write make\(first, \.\.\.\)$"):
        make(lr=2)


def test_arguments_that_are_missing_or_too_many_are_named():
    @refuse_others()
    def make(first, second, third=3):
        return first, second, third

    assert make(1, second=2) == (1, 2, 3)
    with pytest.raises(InvalidArgument, match=r"^first and second are missing: write make\(first, second, \.\.\.\)$"):
        make()
    with pytest.raises(InvalidArgument, match=r"^4 has no place here: the order is first, second, third$"):
        make(1, 2, 3, 4)
