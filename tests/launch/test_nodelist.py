import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import LaunchError
from echelon.launch.slurm import MAX_HOSTS, expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("vm", ["vm"]),
        ("a,b-1,c.example.org", ["a", "b-1", "c.example.org"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[008-010]", ["n008", "n009", "n010"]),
        ("rack[1-2]n[0,5]", ["rack1n0", "rack1n5", "rack2n0", "rack2n5"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
    ],
)
def test_a_list_is_written_out_in_its_order(text, hosts):
    assert expand(text) == tuple(hosts)


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 40)), min_size=1, max_size=6), st.integers(1, 5))
def test_ranges_are_what_they_say(ranges, width):
    text = ",".join(f"{first:0{width}}-{first + more:0{width}}" for first, more in ranges)
    expected = [f"n{number:0{width}}" for first, more in ranges for number in range(first, first + more + 1)]
    assert expand(f"n[{text}]") == tuple(expected)


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", "a,,b", "n[", "n[]", "n[1-]", "n[3-1]", "n[a-c]", "n]1[", "n[1-2", "n[1-[2]]", "n[0-99999999]"],
)
def test_what_is_no_list_is_refused_in_one_line(text):
    with pytest.raises(LaunchError) as caught:
        expand(text)
    assert "\n" not in str(caught.value)
    assert repr(text) in str(caught.value)


def test_a_list_of_too_many_hosts_is_refused_before_it_is_written_out():
    with pytest.raises(LaunchError, match=f"more than {MAX_HOSTS} hosts"):
        expand("a[0-999]b[0-999]c[0-999]")
