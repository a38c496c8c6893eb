"""Objects that do not fit a checkpoint: one clear line each, on all ranks, and nothing has changed."""

import copy
import os
import re
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import echelon
from echelon.checkpoint import PerRank, Store
from echelon.cli import main
from echelon.errors import CheckpointError, EchelonError, InvalidArgument, UnsupportedOp
from tests.helpers.models import fill


def make(width=3, layers=2, dtype=torch.float32):
    return fill(nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(layers))))


def trained(model, kind=torch.optim.AdamW, **options):
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "run")
    model = make()
    store.save(4, model=model, optimizer=trained(model), extra={"epoch": 3})
    return store


def refused(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
    assert "\n" not in message


def test_another_model(store):
    model = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 2), nn.Linear(2, 3))
    before = copy.deepcopy(model.state_dict())
    refused(
        lambda: store.load(model=model),
        InvalidArgument,
        "the checkpoint of step 4 is of another model, with 6 differences: 0.bias is float64[3] here and float32[3] in "
        "the checkpoint; 0.weight is float64[3, 3] here and float32[3, 3] in the checkpoint; 1.bias is float32[2] here "
        "and float32[3] in the checkpoint; and 3 more: load into the model that was saved",
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_names_on_one_side_only(store):
    refused(
        lambda: store.load(model=make(layers=1)),
        InvalidArgument,
        "the checkpoint of step 4 is of another model, with 2 differences: 1.bias is in the checkpoint only; 1.weight "
        "is in the checkpoint only: load into the model that was saved, or pass strict=False to go by names",
    )
    with pytest.raises(
        InvalidArgument, match=r"with 2 differences: 2\.bias is not in the checkpoint; 2\.weight is not"
    ):
        store.load(model=make(layers=3))


def test_going_by_names_is_no_advice_for_a_model_with_hardly_a_common_name(store):
    layers = [("0", nn.Linear(3, 3)), *((f"layer{number}", nn.Linear(3, 3)) for number in range(4))]
    for model, common in (
        (nn.Sequential(OrderedDict(layers)), "with 10 differences.*: only 2 names on both sides"),
        (nn.Sequential(OrderedDict(layers[1:])), "with 12 differences.*: no name on both sides"),
    ):
        with pytest.raises(InvalidArgument, match=f"{common}: load into the model that was saved$"):
            store.load(model=model)


def test_strict_false_goes_by_names(store):
    model = make(layers=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    optimizer = trained(model)
    assert store.load(model=model, optimizer=optimizer, strict=False) == 4
    saved = make()
    trained(saved)
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert model[2].weight[0, 0] != saved[0].weight[0, 0]
    assert model[2].weight not in optimizer.state
    refused(
        lambda: store.load(model=make(width=2), strict=False),
        InvalidArgument,
        "the checkpoint of step 4 is of another model, with 4 differences: 0.bias is float32[2] here and float32[3] in "
        "the checkpoint; 0.weight is float32[2, 2] here and float32[3, 3] in the checkpoint; 1.bias is float32[2] here "
        "and float32[3] in the checkpoint; and 1 more: load into the model that was saved",
    )


@pytest.mark.parametrize(
    ("make_groups", "message"),
    [
        (
            lambda model: [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.2}],
            "param group 0 of the optimizer has 2 parameters and the saved one 4, which differ in 1.bias, 1.weight: "
            "make the optimizer with the groups that were saved",
        ),
        (
            lambda model: [{"params": [*model[0].parameters(), model[1].weight]}],
            "param group 0 of the optimizer has 3 parameters and the saved one 4, which differ in 1.bias: make the "
            "optimizer with the groups that were saved",
        ),
    ],
)
def test_other_param_groups(store, make_groups, message):
    model = make()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(make_groups(model), lr=0.5)
    refused(lambda: store.load(model=model, optimizer=optimizer), InvalidArgument, message)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state


def test_another_optimizer(store):
    model = make()
    refused(
        lambda: store.load(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1)),
        InvalidArgument,
        "the optimizer is SGD here and AdamW in the checkpoint: make the optimizer that was saved, or leave it out",
    )
    optimizer = torch.optim.AdamW(make().parameters())
    refused(
        lambda: store.load(model=model, optimizer=optimizer),
        InvalidArgument,
        "parameter 0 of param group 0 of the optimizer is in no model that was passed, so it has no name: pass the "
        "model that it trains as model=",
    )


@pytest.mark.parametrize("key", [0, "mean/square"])
def test_state_under_a_key_that_would_not_come_back(store, key):
    model = make()
    optimizer = trained(model)
    optimizer.state[model[0].bias][key] = torch.ones(3)
    refused(
        lambda: store.save(5, model=model, optimizer=optimizer),
        InvalidArgument,
        f"the optimizer has state of 0.bias under {key!r}: use text without '/' as keys",
    )


def test_a_value_that_was_not_saved(store):
    model = make()
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.AdamW(model.parameters()))
    refused(
        lambda: store.load(model=model, scheduler=scheduler),
        InvalidArgument,
        "the checkpoint of step 4 has no scheduler: it has model, optimizer; pass it by the name of the save, leave it "
        "out, or pass strict=False",
    )
    assert store.load(model=model, scheduler=scheduler, strict=False) == 4


def test_an_object_under_another_name_or_of_another_kind(store):
    model = make()
    optimizer = trained(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    store.save(5, model=model, ema=make(), optim=optimizer, sched=scheduler, generators=torch.Generator())
    there = "There are model, ema, optim, generators, sched; pass it by the name of the save,"
    cases = [
        ({"optimizer": optimizer}, f"has no optimizer: did you mean optim? {there} leave it out, or pass strict=False"),
        ({"scheduler": scheduler}, f"has no scheduler: did you mean sched? {there} leave it out, or pass strict=False"),
    ]
    for given, message in cases:
        refused(
            lambda given=given: store.load(model=model, **given), InvalidArgument, f"the checkpoint of step 5 {message}"
        )
        assert store.load(model=model, **given, strict=False) == 5
    # It was advised, and refused as well.
    for strict in (True, False):
        refused(
            lambda strict=strict: store.load(mode=model, strict=strict),
            InvalidArgument,
            f"the checkpoint of step 5 has no mode: did you mean model? {there} or leave it out",
        )
    advice = "in the checkpoint of step 5: pass what was saved, leave it out, or pass strict=False"
    refused(
        lambda: store.load(model=model, optim=scheduler),
        InvalidArgument,
        f"optim is an object with a state_dict here and an optimizer {advice}",
    )
    refused(
        lambda: store.load(model=model, ema=optimizer),
        InvalidArgument,
        f"ema is an optimizer here and a model {advice}",
    )
    refused(
        lambda: store.load(sched=model),
        InvalidArgument,
        "sched is a model here and an object with a state_dict in the checkpoint of step 5: pass what was saved, or "
        "leave it out",
    )
    store.save(6, extra={"epoch": 3})
    refused(
        lambda: store.load(model=model),
        InvalidArgument,
        "the checkpoint of step 6 has no model and no other object: save it first, or leave it out",
    )


def test_objects_without_a_name(store):
    model = make()
    for arguments in ((5, model), (model, 5)):
        refused(
            lambda arguments=arguments: store.save(*arguments),
            InvalidArgument,
            "objects are passed by name: store.save(step, model=model, optimizer=optimizer)",
        )
    for argument in (model, 4):
        refused(
            lambda argument=argument: store.load(argument),
            InvalidArgument,
            "objects are passed by name: store.load(model=model, optimizer=optimizer), and an older step as step=20",
        )


def nested(depth):
    return [nested(depth - 1)] if depth else 1


def circle():
    found = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (3, "extra is 3 (int): pass a dict with text as keys, such as extra={'epoch': 3}"),
        ({1: 2}, "extra is of type dict: pass a dict with text as keys, such as extra={'epoch': 3}"),
        (
            {"a": [{"b": object()}]},
            "extra/a/0/b is of type object, and a checkpoint takes numbers, text, tensors, and lists and dicts of "
            "them: store its parts, or give it state_dict and load_state_dict and pass it by a keyword of its own",
        ),
        *(
            (
                {"a": value},
                f"extra/a{place} is a PerRank inside of another value: wrap the whole entry of extra, once, such as "
                "extra={'seen': PerRank([1, 2])}",
            )
            for value, place in (
                (PerRank(PerRank(1)), ""),
                (PerRank({"b": PerRank(1)}), "/b"),
                ([PerRank(1)], "/0"),
                ({"b": PerRank(1)}, "/b"),
            )
        ),
        ({"a": 1 << 14_000}, "extra/a is a number of 14001 bits: at most 14000 can be stored"),
        ({"a": nested(51)}, f"extra/a{'/0' * 46}/ is nested more than 50 deep: flatten it"),
        ({"a": circle()}, "extra/a/0 contains itself, and JSON-like data cannot: take it out"),
        # It was saved, and could not be loaded.
        (
            {"a": {torch.ones(2): 1}},
            "extra/a has a tensor as a key, which is found by its identity: use names as keys",
        ),
    ],
)
def test_extra_that_is_no_json(store, extra, message):
    refused(lambda: store.save(5, model=make(), extra=extra), InvalidArgument, message)
    assert store.steps() == [4]


@pytest.mark.parametrize("step", [-1, 1.0, "4", None, True])
def test_a_step_that_is_no_number(store, step):
    with pytest.raises(InvalidArgument, match=r"step is .*: give a whole number of at least 0"):
        store.save(step, model=make())


def test_arguments_of_other_types(store, tmp_path):
    with pytest.raises(InvalidArgument, match=r"model is 3 \(int\): pass a module, a DistributedDataParallel or a Pip"):
        store.save(5, model=3)
    with pytest.raises(InvalidArgument, match="optimizer is of type Linear: pass an optimizer of torch or a ZeroOptim"):
        store.save(5, model=make(), optimizer=nn.Linear(1, 1))
    with pytest.raises(InvalidArgument, match="scheduler is of type dict, without state_dict and load_state_dict"):
        store.save(5, scheduler={})
    advice = r"pass an echelon\.data\.DataLoader, or the echelon\.data\.DistributedSampler of another loader"
    with pytest.raises(InvalidArgument, match=f"loader is of type dict, without state_dict and load_.*: {advice}"):
        Store(tmp_path / "empty").load(loader={})
    with pytest.raises(
        InvalidArgument, match=r"generators\['a'\] is 1 \(int\): give generators of torch, numpy or ran"
    ):
        store.save(5, generators={"a": 1})
    with pytest.raises(InvalidArgument, match=r"keep=0: give the number of checkpoints to keep, 1 or more, or None"):
        Store(tmp_path, keep=0)
    with pytest.raises(UnsupportedOp, match=r"0\.weight, takes a tensor with values, not one on the meta device"):
        store.save(5, model=make().to("meta"))
    assert store.steps() == [4]


@pytest.mark.parametrize("name", ["random", "hook"])
def test_a_keyword_that_the_checkpoint_needs_itself(store, name):
    model = make()
    optimizer = trained(model)
    message = f"{name}= is a name of the checkpoint's own: pass it as my_{name}="
    for one in (torch.optim.lr_scheduler.ConstantLR(optimizer), optimizer, make()):
        refused(lambda one=one: store.save(5, model=model, **{name: one}), InvalidArgument, message)
        refused(lambda one=one: store.load(model=model, **{name: one}), InvalidArgument, message)
    assert store.steps() == [4]


def test_a_path_is_that_of_the_folder_in_which_the_store_was_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store("runs")
    store.save(1, model=make())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert store.steps() == [1]
    assert store.load(model=make()) == 1
    refused(
        lambda: Store(""),
        InvalidArgument,
        "path is empty: give a folder, such as 'runs/gpt', or '.' for the current one",
    )
    refused(lambda: store.verify(None), InvalidArgument, "step is None: give a whole number of at least 0")


def test_there_is_no_such_step(store):
    with pytest.raises(CheckpointError, match="5"):
        store.load(model=make(), step=5)
    assert Store(store.path + "/nothing here").load(model=make()) is None


ODD = ["a b", "ü/é", "extra/x", "optimizer", "x@1", "\N{SNOWMAN}", "a\\b", '"', "__metadata__", " ", "%s", "~1"]


def test_names_with_odd_characters(tmp_path):
    def make_odd(value):
        model = nn.Module()
        for name in ODD:
            model.add_module(name, nn.Linear(1, 1))
        nn.init.constant_(model.get_parameter("x@1.weight"), value)
        return model

    model, extra = make_odd(3.0), {name: {name: torch.ones(2)} for name in ODD}
    store = Store(tmp_path)
    store.save(1, model=model, optimizer=trained(model), extra=extra)
    other, found = make_odd(0.0), {}
    optimizer = torch.optim.AdamW(other.parameters())
    assert store.load(model=other, optimizer=optimizer, extra=found) == 1
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in other.state_dict().items())
    assert sorted(found) == sorted(ODD)
    assert all(torch.equal(found[name][name], torch.ones(2)) for name in ODD)
    assert len(optimizer.state) == 2 * len(ODD)


# Several ranks


def on_ranks(group, path, case):
    store = Store(path)
    model = make()
    if case == "replicas differ" and group.rank == 2:
        nn.init.zeros_(model[1].bias)
    extra = {"rank": group.rank if case == "extra differs" else 0}
    if case == "one rank cannot" and group.rank == 1:
        extra = {"rank": open}
    if case == "other arguments" and group.rank:
        extra["more"] = 1
    try:
        store.save(1, model=model, extra=extra)
    except EchelonError as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "replicas differ",
            "InvalidArgument: 1.bias differs between ranks 0 and 2, which should hold replicas: train them by "
            "DistributedDataParallel, save a pipeline's as model=pipe, or give each rank a Store of its own: "
            "group=group.subgroup([rank])",
        ),
        (
            "extra differs",
            "InvalidArgument: extra/rank differs between ranks 0 and 1: make it equal, or wrap it: PerRank(value)",
        ),
        (
            "other arguments",
            "InvalidArgument: ranks 0 and 1 store different things, the first of them 'extra/more': pass the same "
            "arguments on every rank",
        ),
        ("", None),
    ],
)
def test_all_ranks_raise(case, message, tmp_path):
    assert echelon.simulate(on_ranks, 3, (str(tmp_path), case)).results == [message] * 3


def test_the_others_are_told_of_a_rank_that_cannot_save(tmp_path):
    first, second, third = echelon.simulate(on_ranks, 3, (str(tmp_path), "one rank cannot")).results
    assert second.startswith(
        "InvalidArgument: extra/rank is of type builtin_function_or_method, and a checkpoint takes"
    )
    assert first == third
    assert first.startswith(
        "CheckpointError: rank 1 cannot take part in the checkpoint: InvalidArgument: extra/rank is"
    )


class Broken:
    """Scheduler whose state cannot be had, or set."""

    def state_dict(self):
        raise ValueError("no\nstate")

    def load_state_dict(self, state):
        raise ValueError("no\nstate")


def disagree(group, path):
    """Makes calls that differ on rank 1. Returns their errors."""
    store, model, first = Store(path), make(), group.rank == 0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer) if first else Broken()
    working = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for step in (1, 2):
        store.save(step, model=model, optimizer=optimizer, scheduler=working)
    calls = [
        lambda: store.save(3, model=model, scheduler=scheduler),
        lambda: store.load(model=model, scheduler=scheduler),
        lambda: store.load(model=model, step=None if first else 1),
        lambda: store.load(model=model, optimizer=optimizer if first else None),
        lambda: store.load(model=model if first else None),
        lambda: store.load(model=model, strict=first),
        lambda: store.save(3, model=model, wait=first),
    ]
    errors = []
    for call in calls:
        try:
            call()
        except (EchelonError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    store.close()
    return [*errors, store.steps()]


def test_ranks_that_disagree_all_raise(run, tmp_path):
    one = "pass the same on all ranks"
    told = "CheckpointError: rank 1"
    for rank, (*errors, steps) in enumerate(run(disagree, 2, str(tmp_path))):
        broken = [f"{told} cannot take part in the checkpoint: ValueError: no state", f"{told}: ValueError: no state"]
        assert errors == [
            *(["ValueError: no\nstate"] * 2 if rank else broken),
            f"InvalidArgument: rank 1 loads step=1 and rank 0 step=None: {one}",
            f"InvalidArgument: ranks 0 and 1 do not both load optimizer: {one}",
            f"InvalidArgument: ranks 0 and 1 do not both load model: {one}",
            f"InvalidArgument: rank 1 loads with strict=False and rank 0 with strict=True: {one}",
            f"InvalidArgument: rank 1 saves another wait than rank 0, False and True: {one}, and a value of one rank "
            "as PerRank(value)",
        ]
        assert steps == [1, 2]


def save_by_rank(group, path):
    Store(path).save(1, model=make(), extra={"mine": PerRank(group.rank)})


def load_by_rank(group, path):
    with pytest.raises(
        InvalidArgument,
        match="extra/mine was saved by each of 3 data-parallel ranks, and there are 2 here: leave it out and place it "
        "by the step, or pass strict=False",
    ):
        Store(path).load(extra={})
    extra = {}
    assert Store(path).load(extra=extra, strict=False) == 1
    return extra


def test_values_of_ranks_that_are_not_there(tmp_path):
    echelon.simulate(save_by_rank, 3, (str(tmp_path),))
    assert echelon.simulate(load_by_rank, 2, (str(tmp_path),)).results == [{}, {}]


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")])
def test_ranks_of_a_launcher_without_a_group_do_not_save_one_over_the_other(names, tmp_path, monkeypatch):
    for name, value in zip(names, ("0", "2"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match="there is no group yet: call group"):
        Store(tmp_path).save(1, model=nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(names[1], "1")
    alone = Store(tmp_path)
    alone.save(1, model=nn.Linear(2, 2))
    alone.close()


@pytest.mark.parametrize("call", ["save", "load"])
@pytest.mark.parametrize("others", ["return", "go on"])
def test_a_call_of_one_rank_alone_says_that_every_rank_makes_it(call, others, tmp_path):
    def alone(group):
        store = Store(tmp_path, group=group)
        if group.rank == 0:
            store.save(1, model=nn.Linear(2, 2)) if call == "save" else store.load(model=nn.Linear(2, 2))
        elif others == "go on":
            group.all_reduce(torch.ones(2))

    kind = echelon.DeadlockError if others == "return" else echelon.CollectiveMismatch
    with pytest.raises(kind, match=rf": call Store\.{call} on every rank, outside of `if rank == 0`"):
        echelon.simulate(alone, 2)


# Going back to an older step


def go_back(group, path):
    """Goes on from step 2 of three, and saves step 3 once more. Returns the errors and what the next load takes."""
    store, model, errors = Store(path), make(), []
    for step in (2, 4, 6):
        store.save(step, model=model)
    for step, wait in ((3, True), (5, False)):
        assert store.load(model=model, step=2) == 2
        try:
            store.save(step, model=model, wait=wait)
        except InvalidArgument as error:
            errors.append(str(error))
    store.save(6, model=model, wait=False)
    store.save(7, model=model)
    store.close()
    return [*errors, store.steps()]


def test_a_step_that_is_older_than_the_newest_is_refused_on_all_ranks(run, tmp_path):
    path = tmp_path / "run 1"
    for rank, found in enumerate(run(go_back, 2, str(path))):
        of_rank = "rank 0: " * (rank > 0)
        assert found == [
            *(
                f"{of_rank}step {step} is older than step 6 in {path}, which the next load() would choose: remove "
                f"the newer ones with `echelon checkpoint remove '{path}' {newer}`, or save into another folder"
                for step, newer in ((3, "4 6"), (5, "6"))
            ),
            [2, 4, 6, 7],
        ]


def test_the_newest_step_is_the_one_that_a_load_would_take(store):
    for step in (5, 6):
        store.save(step, model=make())
    for step in range(8, 18):
        store.save(step, model=make())
    # A load skips it.
    (Path(store.path) / "step-00000017" / "manifest.json").unlink()
    with pytest.raises(InvalidArgument, match=r"step 16 in .*, .* remove .* 8 9 10 11 12 13 14 15 \.\.\.`, or"):
        store.save(7, model=make())
    # The folder is free for the command, while this program goes on.
    assert main(["checkpoint", "remove", store.path, *map(str, range(8, 17))]) == 0
    store.save(7, model=make())
    with pytest.warns(UserWarning, match="step 7 is the newest that can be read"):
        assert store.load(model=make()) == 7


def test_a_load_of_an_older_step_says_that_saves_before_the_newest_will_be_refused(store):
    store.save(5, model=make())
    model = make()
    assert store.load(model=model, step=4) == 4  # of the weights alone: no run goes on
    text = re.escape(
        f"step 4 is loaded, and {store.path} has step 5, so a save of a step before that will be refused: remove the "
        f"newer ones with `echelon checkpoint remove {store.path} 5`, or save into another folder"
    )
    with pytest.warns(UserWarning, match=f"^{text}$") as caught:
        store.load(model=model, optimizer=torch.optim.AdamW(model.parameters()), step=4)
    assert caught[0].filename == __file__


def command_in(text):
    return re.search("`(.*)`", text)[1]


def test_a_load_of_an_older_step_and_a_later_save_name_the_same_steps(store):
    """The steps between the loaded one and the saved one are of the other run, too."""
    model = make()
    objects = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    for step in (10, 20, 30):
        store.save(step, **objects)
    with pytest.warns(UserWarning, match="step 10 is loaded") as warned:
        store.load(**objects, step=10)
    with pytest.raises(InvalidArgument, match="step 25 is older than step 30") as refused:
        store.save(25, **objects)
    command = command_in(str(warned[0].message))
    assert command == command_in(str(refused.value)) == f"echelon checkpoint remove {store.path} 20 30"
    store.save(40, **objects)
    with pytest.raises(InvalidArgument, match=r"`echelon checkpoint remove \S+ 40`"):
        store.save(39, **objects)


def test_a_step_of_a_newer_version_keeps_older_ones_from_being_saved(store):
    """The next load would stop at it."""
    model = make()
    objects = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    for step in (10, 20):
        store.save(step, **objects)
    manifest = Path(store.path) / "step-00000020" / "manifest.json"
    manifest.write_bytes(re.sub(rb"\d+", b"99", manifest.read_bytes(), count=1))
    with pytest.raises(echelon.CheckpointError, match="a newer version of Echelon wrote it"):
        store.load(**objects)
    with pytest.warns(UserWarning, match=r"has step 20, .* remove .* 20`"):
        store.load(**objects, step=10)
    with pytest.raises(InvalidArgument, match=r"step 15 is older than step 20 .* remove .* 20`"):
        store.save(15, **objects)


# Gradients of no_sync


def save_between_backwards(group, path, when):
    """Saves in a step of two backwards. Returns the warnings of this rank."""
    ddp = echelon.DDP(make(), group)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    store, batch = Store(path), torch.ones(2, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ddp.no_sync():
            ddp(batch).sum().backward()
        if when == "between":
            store.save(1, model=ddp)
        elif when == "after zero_grad":
            optimizer.zero_grad()
            store.save(1, model=ddp)
        elif when == "after a step under no_sync":
            group.all_reduce_coalesced([each.grad for each in ddp.parameters()], "mean")
            optimizer.step()
            store.save(1, model=ddp)
        ddp(batch).sum().backward()
        if when == "after a backward":
            store.save(1, model=ddp)
        optimizer.step()
        if when == "after":
            store.save(1, model=ddp)
        if when == "after sync_gradients":
            with ddp.no_sync():
                ddp(batch).sum().backward()
            ddp.sync_gradients()
            store.save(1, model=ddp)
    store.close()
    return [(str(each.message), each.filename) for each in caught if "zero_grad" not in str(each.message)]


@pytest.mark.parametrize(
    "when",
    [
        *("between", "after zero_grad", "after a step under no_sync", "after a backward", "after"),
        "after sync_gradients",
    ],
)
def test_a_save_between_two_backwards_under_no_sync_warns_that_it_has_no_gradients(when, run, tmp_path):
    text = (
        "step 1 is saved without the gradients that backward has accumulated under no_sync(), and a run that goes on "
        "from it would lose them: save after the optimizer's step"
    )
    first, second = run(save_between_backwards, 2, str(tmp_path), when)
    assert first == ([(text, __file__)] if when == "between" else [])
    assert second == []


def save_not_finite(group, path, kind):
    model, store = make(2, layers=1), Store(path, group=group)
    model.register_buffer("mask", torch.full((2,), -torch.inf))
    if kind == "fully_shard":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.distributed.init_process_group("gloo")
        fully_shard(model, mesh=init_device_mesh("cpu", (group.world_size,)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store.save(1, model=model)
        with torch.no_grad():
            weight, bias = model.parameters()
            (bias if kind == "plain" else bias.to_local()).fill_(torch.nan)
            if kind == "plain":
                weight[0, 0] = torch.inf
        store.save(2, model=model, wait=False)
        store.close()
    return [(str(each.message), each.filename) for each in caught]


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("plain", "0.weight (1 of 4 values that were looked at), and in 1 other parameters"),
        ("fully_shard", "0.bias (1 of 1 values that were looked at)"),
    ],
)
def test_a_save_of_parameters_that_are_not_finite_warns(kind, found, tmp_path):
    """Every checkpoint that `keep=` left was one of a run that had diverged."""
    first, second = echelon.simulate(save_not_finite, 2, (str(tmp_path), kind)).results
    assert first == [
        (
            f"step 2 is saved with NaN or infinity in {found}: a run that goes on from it would train on them, so load "
            "a step before that, and look at the loss before the optimizer's step",
            __file__,
        )
    ]
    assert second == []


def on_one_step(group, path):
    """Uses the folder of one step as a store. Returns the errors."""
    Store(path).save(4, model=make())
    store, errors = Store(f"{path}/step-00000004/"), []
    for call in (lambda: store.load(model=make()), lambda: store.save(5, model=make())):
        try:
            call()
        except InvalidArgument as error:
            errors.append(str(error))
    return errors


def test_the_folder_of_one_step_is_no_store(run, tmp_path):
    """A load found no checkpoint there, and a run began anew."""
    path = tmp_path / "run"
    text = f"{path}/step-00000004 is the checkpoint of step 4 alone: give the folder around it, {path}"
    for rank, errors in enumerate(run(on_one_step, 2, str(path))):
        assert errors == [f"{'rank 0: ' * (rank > 0)}{text}"] * 2
    assert sorted(os.listdir(path / "step-00000004")) == [
        *("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors")
    ]
    refused(lambda: Store(path / "step-00000004").steps(), InvalidArgument, text)
    refused(lambda: Store(None), InvalidArgument, "path is None: give a folder, such as 'runs/gpt'")
