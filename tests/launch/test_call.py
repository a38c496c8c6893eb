"""How the function of the ranks is called: with the group, or without it."""

import functools
import inspect
import os
import re
import unittest.mock

import pytest
import torch
import torch.distributed as dist

import echelon
import echelon.interop.torch_distributed  # registers the backend, in workers too
from echelon.errors import LaunchError
from echelon.launch.call import rank_call
from echelon.launch.worker import Job, rank_variables
from echelon.testing import RankPool, check_same_results

GROUP = "the group"


def called(function, *args):
    """Returns the result of the call that a rank with GROUP as its group makes."""
    return rank_call(function, args).run(GROUP)


class Trainer:
    def __init__(self, *given):
        self.given = given

    def with_group(self, group, steps):
        return group, steps

    def without(self, steps):
        return steps

    @classmethod
    def of_class(cls):
        return cls.__name__

    @staticmethod
    def static(group):
        return group

    def __call__(self):
        return "called"


class OfTwo:
    def __init__(self, group, steps):
        self.given = group, steps


def forwarding(function):
    """Wraps a function as torch's `record` does, by a function that takes anything."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def with_settings(function):
    """Wraps a function by one that gives it its argument."""

    @functools.wraps(function)
    def wrapper():
        return function("settings")

    return wrapper


@unittest.mock.patch.object(os, "getcwd")
def patched(group, getcwd):
    return group, isinstance(getcwd, unittest.mock.Mock)


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (lambda: "nothing", (), "nothing"),
        (lambda group: group, (), GROUP),
        (lambda group, x: (group, x), (1,), (GROUP, 1)),
        (lambda args: args, (1,), 1),
        (lambda x, y: (x, y), (1,), (GROUP, 1)),
        (lambda x, y: (x, y), (1, 2), (1, 2)),
        (lambda group, /, x=5: (group, x), (), (GROUP, 5)),
        (lambda *, steps=3: steps, (), 3),
        (lambda x, *, steps=3: (x, steps), (1,), (1, 3)),
        # Both calls fit: the group comes first.
        (lambda *args: args, (1,), (GROUP, 1)),
        (lambda config=None: config, (), GROUP),
        (lambda x, y=0: (x, y), (1,), (GROUP, 1)),
        # A value of the first parameter's own is no group.
        (lambda steps=3: steps, (), 3),
        (lambda steps=3: steps, (1,), 1),
        (lambda steps=3, lr=0.1: (steps, lr), (1,), (1, 0.1)),
        # Methods and classes.
        (Trainer().with_group, (1,), (GROUP, 1)),
        (Trainer().without, (1,), 1),
        (Trainer.of_class, (), "Trainer"),
        (Trainer.static, (), GROUP),
        (Trainer(), (), "called"),
        (lambda *args: Trainer(*args).given, (1,), (GROUP, 1)),
        # Partials.
        (functools.partial(lambda group, x: (group, x), x=2), (), (GROUP, 2)),
        (functools.partial(lambda x, y: (x, y), 1), (), (1, GROUP)),
        (functools.partial(lambda x, y: (x, y), 1, 2), (), (1, 2)),
        (functools.partial(lambda rank, n: (rank, n), 0, 4), (), (0, 4)),
        # Wrappers.
        (forwarding(lambda: "nothing"), (), "nothing"),
        (forwarding(lambda group: group), (), GROUP),
        (with_settings(lambda config: config), (), "settings"),
        (patched, (), (GROUP, True)),
        # A signature, and none.
        (len, (), len(GROUP)),
        (dict, (), None),
    ],
)
def test_the_group_comes_first_where_the_signature_takes_it(function, args, expected):
    if function is dict:
        with pytest.raises(ValueError):
            inspect.signature(dict)
        assert rank_call(dict, ()).takes_group
    else:
        assert called(function, *args) == expected


@pytest.mark.parametrize(
    ("function", "has_hint"),
    [
        (lambda width, lr=0.1: width + lr, True),
        (lambda config, lr=0.1: config.width + lr, True),
        (lambda width, lr=0.1: width.rank + str(lr), False),  # another mistake
        (lambda width, lr: width + lr, False),  # only the call with the group fits
    ],
)
def test_an_error_over_an_unexpected_group_says_why_it_came(function, has_hint):
    with pytest.raises((TypeError, AttributeError)) as raised:
        echelon.simulate(function, 1, (3,))
    hints = [note for note in raised.value.__notes__ if "got the group before args" in note]
    assert len(hints) == has_hint


def test_a_class_is_called_by_its_constructor():
    assert called(OfTwo, 1).given == (GROUP, 1)
    assert called(Trainer).given == (GROUP,)


def needs_three(a, b, c, *, d: int = 4) -> None:
    pass


def test_a_function_that_neither_call_fits_is_shown_with_both():
    with pytest.raises(LaunchError) as caught:
        rank_call(needs_three, ("one",))
    assert str(caught.value) == (
        "fn=needs_three takes neither needs_three(group, 'one') nor needs_three('one'): its signature is "
        "needs_three(a, b, c, *, d=4): correct args, or the function's parameters"
    )
    with pytest.raises(LaunchError, match=re.escape("nor <lambda>(): its signature is <lambda>(*, steps)")):
        rank_call(lambda *, steps: steps, ())
    with pytest.raises(LaunchError, match=re.escape("nor needs_three(): its signature is needs_three(b, c, *, d=5)")):
        rank_call(functools.partial(needs_three, 1, d=5), ())
    with pytest.raises(LaunchError, match=re.escape("neither <lambda>(group, <Tensor>) nor <lambda>(<Tensor>)")):
        rank_call(lambda: None, (torch.ones(100, 100),))


def of_spawn(rank, world_size):
    raise AssertionError("nothing calls it")


def of_one(local_rank):
    raise AssertionError("nothing calls it")


class OfSpawn:
    def main(self, rank, world_size, path):
        raise AssertionError("nothing calls it")


@pytest.mark.parametrize(
    ("function", "args", "advice"),
    [
        (of_spawn, (2,), "`lambda: of_spawn(int(os.environ['RANK']), n)`"),
        (of_spawn, (0, 2), "`lambda: of_spawn(int(os.environ['RANK']), n)`"),
        (of_one, (), "`lambda: of_one(int(os.environ['RANK']))`"),
        (OfSpawn().main, (2, "path"), "`lambda: main(int(os.environ['RANK']), n, ...)`"),
        (forwarding(of_spawn), (2,), "`lambda: of_spawn(int(os.environ['RANK']), n)`"),
    ],
)
def test_a_function_made_for_torchs_spawn_gets_no_group_as_its_rank(function, args, advice):
    with pytest.raises(LaunchError) as caught:
        rank_call(function, args)
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("function", [lambda group, rank: (group, rank), lambda x, *, rank=3: (x, rank)])
def test_a_rank_that_is_not_the_first_parameter_is_an_argument_like_others(function):
    assert called(function, 3)[1] == 3


def test_nothing_starts_if_the_call_does_not_fit(monkeypatch, capsys):
    monkeypatch.setattr("echelon.launch.spawn.Worker", lambda: pytest.fail("started a process"))
    monkeypatch.setattr("echelon.simulation.run.World", lambda *_: pytest.fail("started a simulation"))
    for start in (echelon.simulate, echelon.explore, echelon.spawn, check_same_results):
        with pytest.raises(LaunchError, match="fn=needs_three takes neither"):
            start(needs_three, 2)
        with pytest.raises(LaunchError, match="would get the group there"):
            start(of_spawn, 2, args=(2,))
    with RankPool() as own, pytest.raises(LaunchError, match="fn=needs_three takes neither"):
        own.run(needs_three, 2)
    assert capsys.readouterr().err == "", "it is no failure of a seed"


def test_simulated_ranks_take_programs_without_the_group():
    ranks = echelon.simulate(lambda: echelon.init().rank, 3).results
    assert ranks == [0, 1, 2]
    assert echelon.simulate(lambda settings: settings, 2, args=("settings",)).results == ["settings"] * 2
    assert echelon.explore(lambda: echelon.init().barrier(), 2, seeds=range(3)) == 3


OF_ROLE = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def torch_program(settings):
    """An unmodified program of torch.distributed."""
    dist.init_process_group(settings["backend"])
    tensor = torch.tensor([float(settings["factor"] * (int(os.environ["RANK"]) + 1))])
    dist.all_reduce(tensor)
    result = dist.get_rank(), dist.get_world_size(), tensor.item()
    dist.destroy_process_group()
    return result


def variables():
    found = {name: os.environ.get(name) for name in (*TORCHRUNS, "LEFT_BEHIND")}
    os.environ["LEFT_BEHIND"] = "by a job"
    del os.environ["RANK"]
    return found


def variables_then_failure():
    variables()
    raise KeyError("as planned")


def leaves_torchs_group_open():
    dist.init_process_group("gloo")
    return dist.get_world_size()


def of_spawn_that_runs(rank, world_size):
    return rank, world_size


def test_simulated_ranks_take_programs_of_torch():
    assert echelon.simulate(torch_program, 2, args=({"factor": 2, "backend": "gloo"},)).results == [
        (0, 2, 6.0),
        (1, 2, 6.0),
    ]
    advised = echelon.simulate(lambda: of_spawn_that_runs(int(os.environ["RANK"]), 3), 3)
    assert advised.results == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("backend", ["gloo", "echelon"])
def test_a_program_of_torch_runs_unchanged_on_processes_again_and_again(pool, backend):
    for factor in (2, 5):
        results = pool.run(torch_program, 2, {"factor": factor, "backend": backend})
        assert results == [(rank, 2, 3.0 * factor) for rank in range(2)]


def test_a_job_has_the_variables_of_torchrun_and_leaves_none(pool):
    for job in (variables, variables_then_failure, variables):
        if job is variables_then_failure:
            with pytest.raises(KeyError, match="as planned"):
                pool.run(job, 2)
            continue
        found = pool.run(job, 2)
        assert [(each["RANK"], each["LOCAL_RANK"]) for each in found] == [("0", "0"), ("1", "1")]
        assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) for each in found} == {("2", "2")}
        assert len({(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in found}) == 1
        assert [each["LEFT_BEHIND"] for each in found] == [None, None]


def test_the_variables_of_a_job_hide_those_of_the_launcher_around_it(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    before = dict(os.environ)
    job = Job(b"", 1, 3, "127.0.0.1:1", "127.0.0.1", 2, b"", "", "auto", 1.0, None)
    with rank_variables(job):
        assert [os.environ[name] for name in TORCHRUNS] == ["1", "3", "1", "3", "127.0.0.1", "2"]
        assert [os.environ[name] for name in OF_ROLE] == ["0", "1", "1", "3", "default"]
        assert "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
        os.environ["LEFT_BEHIND"] = "by a job"
    assert dict(os.environ) == before


def test_a_worker_that_leaves_torchs_group_open_is_not_kept(new_pool):
    with new_pool() as own:
        assert own.run(leaves_torchs_group_open, 1) == [1]
        assert repr(own) == "<RankPool: 0 idle workers>"
