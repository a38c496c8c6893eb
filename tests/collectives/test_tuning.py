"""A table of algorithms is written and read back; what is none is an error that says so."""

import json

import pytest

from echelon.collectives.plans.select import STATIC, Rule
from echelon.collectives.plans.tuning import from_text, to_text
from echelon.errors import PlanError

RULES = {"all_reduce": (Rule("rabenseifner", 9, 12, 3, "one host"), Rule("ring"))}


@pytest.mark.parametrize("table", [RULES, STATIC, {}])
def test_the_text_of_a_table_parses_back(table):
    assert from_text(to_text(table, {"seconds": [1]}), "here") == table


def changed(**values):
    rule = {"algorithm": "ring", "first": 0, "last": None, "ranks": 1, "where": "anywhere", **values}
    return {"echelon": "tuned collectives", "format": 1, "rules": {"all_reduce": [rule]}}


def test_the_form_is_the_documented_one():
    assert from_text(json.dumps(changed()), "here") == {"all_reduce": (Rule("ring"),)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "it is not a table of tuned collectives"),
        ({"echelon": "schedule"}, "it is not a table of tuned collectives"),
        ({**changed(), "format": 2}, "its format is 2, this version reads 1"),
        ({**changed(), "rules": []}, "it has no rules, or far too many"),
        ({**changed(), "rules": {"barrier": [{}] * 10_001}}, "it has no rules, or far too many"),
        ({**changed(), "rules": {"sum": []}}, "it has rules for 'sum', which is no collective"),
        ({**changed(), "rules": {"barrier": "x"}}, "it has rules for 'barrier', which is no collective"),
        ({**changed(), "rules": {"barrier": [{}]}}, "a rule of barrier has not exactly algorithm, first, "),
        (changed(more=1), "a rule of all_reduce has not exactly algorithm, first, "),
        (changed(algorithm="tree"), "all_reduce has no algorithm 'tree': choose from ring, "),
        (changed(algorithm=["ring"]), "a rule of all_reduce is for ['ring'] on 'anywhere'"),
        (changed(where="Mars"), "a rule of all_reduce is for 'ring' on 'Mars'"),
        (changed(where=[]), "a rule of all_reduce is for 'ring' on []"),
        (changed(first=-1), "a rule of all_reduce has sizes -1 to "),
        (changed(ranks=True), "a rule of all_reduce has sizes 0 to "),
        (changed(last=1.5), "a rule of all_reduce has sizes 0 to 1.5 for 1 ranks"),
    ],
)
def test_what_is_no_table_is_an_error_of_one_line(values, message):
    with pytest.raises(PlanError) as caught:
        from_text(json.dumps(values), "tuned.json")
    assert str(caught.value).startswith(f"tuned.json: {message}")
    assert str(caught.value).endswith("; run `echelon tune` again, or set ECHELON_TUNED=off")
    assert "\n" not in str(caught.value)


def test_what_is_not_json_is_an_error():
    with pytest.raises(PlanError, match=r"tuned.json: it is not JSON; run"):
        from_text("{", "tuned.json")
