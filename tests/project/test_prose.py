"""tools/prose.py finds riddles, long sentences and private words, and leaves code and tables alone."""

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "prose.py"
SPEC = importlib.util.spec_from_file_location("prose", TOOL)
prose = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(prose)


def problems(page):
    return [problem for sentence in prose.sentences(page) for problem in sentence.problems()]


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("What is sent goes over TCP.", "opens with a riddle"),
        ("- One item.\n- Those that wait are woken.", "opens with a riddle"),
        ("A rank is\ntold the reason.", "'is told': receives, sees, raises"),
        ("One " * 31 + "end.", "32 words, at most 30"),
    ],
)
def test_a_sentence_that_breaks_a_rule_is_found(page, problem):
    assert any(found.startswith(problem) for found in problems(page))


@pytest.mark.parametrize(
    "page",
    [
        "What does it cost?",
        "# What is sent",
        "| What is sent | those that wait |",
        "```text\nWhat is sent\n```",
        "    What is sent goes over TCP.",
        "It calls [send](what_is_sent.md) and `what is sent`.",
        "One " * 20 + "end. torch has " + "one " * 20 + "more.",
        "Each has a cost: " + "one " * 29,
    ],
)
def test_code_tables_headings_questions_and_short_sentences_pass(page):
    assert problems(page) == []


def test_a_sentence_has_the_line_of_its_paragraph():
    found = list(prose.sentences("# Title\n\nFirst.\n\n- One. Two.\n- Three.\n"))
    assert [(each.line, each.text) for each in found] == [(3, "First."), (5, "One."), (5, "Two."), (6, "Three.")]


def test_a_folder_that_does_not_exist_is_an_error(tmp_path, capsys):
    assert prose.main([str(tmp_path)]) == 0
    assert prose.main([str(tmp_path / "none")]) == 1
    assert capsys.readouterr().out == f"there is no {tmp_path / 'none'}\n"
