"""Log records have the rank, before and after there is a group, and other ranks' records can be left out."""

import io
import logging

import pytest

import echelon
from echelon.errors import InvalidArgument
from echelon.logging import RankFilter


def logged(group, rank_filter):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("[%(rank)d/%(world_size)d] %(message)s"))
    handler.addFilter(rank_filter or RankFilter(group))
    logger = logging.Logger("training")
    logger.addHandler(handler)
    logger.warning("step %d", 3)
    return stream.getvalue()


def test_records_have_the_rank_of_the_group():
    assert echelon.simulate(logged, 2, (None,)).results == ["[0/2] step 3\n", "[1/2] step 3\n"]
    assert echelon.simulate(logged, 2, (RankFilter(),)).results == ["[0/2] step 3\n", "[1/2] step 3\n"]


def test_records_of_some_ranks():
    for ranks in ([0, 2], (rank for rank in range(0, 3, 2))):
        found = echelon.simulate(logged, 3, (RankFilter(ranks=ranks),)).results
        assert found == ["[0/3] step 3\n", "", "[2/3] step 3\n"]


def test_before_there_is_a_group_the_launcher_says_the_rank(monkeypatch):
    assert logged(None, RankFilter()) == "[0/1] step 3\n"
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert logged(None, RankFilter()) == "[1/4] step 3\n"


def test_wrong_arguments():
    with pytest.raises(InvalidArgument, match=r"give a list of ranks, such as \[0\]"):
        RankFilter(ranks=0)
    with pytest.raises(InvalidArgument, match="group is 0"):
        RankFilter(0)
