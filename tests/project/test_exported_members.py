"""What is public exists, is documented, and is what the docstrings say."""

import builtins
import inspect
import pickle
import re

import pytest

import echelon
from echelon import errors

ERRORS = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.EchelonError)
}


@pytest.mark.parametrize("name", echelon.__all__)
def test_it_exists_and_says_what_it_is(name):
    member = getattr(echelon, name)
    doc = inspect.getdoc(member)
    assert doc, f"echelon.{name} has no docstring"
    assert doc.splitlines()[0].rstrip().endswith((".", ":")) or len(doc.splitlines()) > 1, doc
    if inspect.isclass(member):
        for method, function in inspect.getmembers(member, inspect.isfunction):
            ours = function.__module__.startswith("echelon.")  # torch adds a method to every optimizer's class
            if ours and not method.startswith("_"):
                assert inspect.getdoc(function), f"echelon.{name}.{method} has no docstring"


def test_all_is_sorted_and_has_no_name_twice():
    assert len(set(echelon.__all__)) == len(echelon.__all__)
    assert not [name for name in echelon.__all__ if name.startswith("_")]


def test_the_tree_in_the_docstring_is_that_of_the_classes():
    lines = re.findall(r"[├└]── (\w+) +\(([\w, ]+)\) +(.+)", errors.__doc__)
    drawn = {name: builtin for name, builtin, _ in lines}
    assert len(drawn) == len(lines)
    assert set(drawn) == set(ERRORS) - {"EchelonError"}
    for name, nearest in drawn.items():
        bases = [getattr(builtins, builtin) for builtin in nearest.split(", ")]
        assert ERRORS[name].__bases__ == (errors.EchelonError, *bases), name


def test_the_tree_is_one_level_deep():
    assert all(value.__mro__[1] is errors.EchelonError for name, value in ERRORS.items() if name != "EchelonError")


EXAMPLES = {
    "InvalidRank": errors.InvalidRank(5, 4),
    "SelfSend": errors.SelfSend(2),
    "SizeMismatch": errors.SizeMismatch("float32[2]", "float32[3]", "recv"),
    "PeerFailed": errors.PeerFailed(3, "it died", "all_reduce"),
}


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_an_error_crosses_to_another_process_whole(name):
    error = EXAMPLES.get(name) or ERRORS[name]("what happened: what to do")
    error.add_note("raised on rank 1")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert "\n" not in str(error)
