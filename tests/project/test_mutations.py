"""The list of mutations fits the source, and the script tells killed, surviving and late ones apart."""

import re

import pytest
from tools import mutations
from tools.mutations import Mutation, Outcome

ROOMS = ("collectives", "data_parallel", "pipeline/run", "pipeline/stage", "simulation", "backends", "interop")


def test_the_list_fits_the_source():
    assert list(mutations.problems(mutations.read())) == []


def test_the_list_has_mutations_of_every_room():
    files = [one.file for one in mutations.read()]
    assert len(files) >= 60
    assert all(any(file.startswith(room) for file in files) for room in ROOMS)


ERRORS = Mutation("", "errors.py", "", "", ("launch/test_exit_status.py",))


@pytest.mark.parametrize(
    ("mutation", "problem"),
    [
        (ERRORS._replace(file="no_such.py"), "there is no file src/echelon/no_such.py"),
        (ERRORS._replace(find="no such text"), "its text occurs 0 times in src/echelon/errors.py, not once"),
        (ERRORS._replace(find="return "), r"its text occurs \d+ times"),
        (ERRORS._replace(find="def fails(", replace="def  fails("), "it changes nothing"),
        (ERRORS._replace(find="def fails(", replace="def no(", tests=("test_no.py",)), "there is no tests/test_no.py"),
    ],
)
def test_an_entry_that_does_not_fit_is_told_of(mutation, problem):
    (found,) = mutations.problems([mutation])
    assert re.search(problem, found)


def test_the_verdicts():
    killed = Outcome(False, False, 1.0, "F\nFAILED tests/test_a.py::test_b[1] - AssertionError: 1 - 2\n")
    assert mutations.verdict(killed) == "killed"
    assert killed.first_failure == "tests/test_a.py::test_b[1]"
    assert mutations.verdict(Outcome(True, False, 1.0, "")) == "survived"
    assert mutations.verdict(Outcome(False, True, 1.0, "")) == "timeout"


def test_words_that_choose_no_mutation_are_an_error(monkeypatch, capsys):
    monkeypatch.setattr(mutations, "problems", lambda _: ())  # which takes seconds
    assert mutations.main(["no such word"]) == 1
    assert capsys.readouterr().out == "no mutation's file or description contains no such word\n"


def test_a_mutation_whose_tests_are_all_left_out_survives(tmp_path):
    make_project(tmp_path, "assert echelon.ONE == 2")
    path = tmp_path / "tests" / "test_one.py"
    path.write_text(f"import pytest\n\npytestmark = pytest.mark.slow\n{path.read_text()}")
    assert mutations.verdict(mutations.run_tests(tmp_path, ["test_one.py"], 50.0)) == "survived"


def make_project(folder, test):
    (folder / "src" / "echelon").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "src" / "echelon" / "__init__.py").write_text("ONE = 1\n")
    (folder / "src" / "echelon" / "pytest_plugin.py").write_text("")  # pytest loads it as an installed plugin
    (folder / "tests" / "test_one.py").write_text(f"import echelon\n\n\ndef test_one():\n    {test}\n")
    return Mutation("one is two", "__init__.py", "ONE = 1", "ONE = 2", ("test_one.py",))


@pytest.mark.parametrize(
    ("test", "deadline", "word"),
    [
        ("assert echelon.ONE == 1", 50.0, "killed"),
        ("assert echelon.ONE", 50.0, "survived"),
        ("__import__('time').sleep(1000)", 1.0, "timeout"),
    ],
)
def test_a_mutation_is_tried_on_a_copy(tmp_path, test, deadline, word):
    mutation = make_project(tmp_path, test)
    trees = mutations.SimpleQueue()
    trees.put(tmp_path)
    _, outcome = mutations.try_one(mutation, trees, deadline)
    assert mutations.verdict(outcome) == word, outcome.output
    assert (tmp_path / "src" / "echelon" / "__init__.py").read_text() == "ONE = 1\n"
    assert trees.get() == tmp_path
