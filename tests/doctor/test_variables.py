import ast
from pathlib import Path

import pytest

import echelon
from echelon.doctor.checkup import KNOWN, check_variables

HAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OFF = {"ECHELON_TUNED": "off"}


def test_without_variables_all_is_well():
    (finding,) = check_variables({"PATH": "/bin", "HOME": "/nowhere"})
    assert (finding.status, finding.found) == ("ok", "none set")


def test_those_that_are_as_they_should_be_are_named_and_not_shown():
    (finding,) = check_variables({**HAND, **OFF, "ECHELON_SECRET": "0123456789abcdef"})
    assert finding.status == "ok"
    assert "ECHELON_SECRET, ECHELON_TUNED, MASTER_ADDR" in finding.found
    assert "0123456789abcdef" not in finding.found


@pytest.mark.parametrize(
    ("environ", "status", "found", "fix"),
    [
        ({"ECHELON_BACKEND": "bogus"}, "error", "ECHELON_BACKEND='bogus' is unknown", "use one of auto"),
        ({"RANK": "0"}, "error", "RANK set without WORLD_SIZE", "set all four"),
        ({**HAND, "RANK": "2"}, "error", "RANK=2 is not a rank", "use 0 to 1"),
        ({**HAND, "MASTER_PORT": "0"}, "error", "MASTER_PORT='0' is not a port", "correct it"),
        (HAND, "error", "ECHELON_SECRET is not set, and not all ranks are on one host", "openssl rand -hex 32"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "error", "srun does not say on which host", "set MASTER_ADDR"),
        ({**HAND, "OMPI_COMM_WORLD_RANK": "1"}, "error", "RANK=0 contradicts OMPI_COMM_WORLD_RANK=1", "two launchers"),
        ({"ECHELON_ENABLE_GPU_FALLBACK": "maybe"}, "error", "ECHELON_ENABLE_GPU_FALLBACK='maybe'", "use one of 1"),
        ({"ECHELON_TUNED": "/no/such/file"}, "error", "ECHELON_TUNED=/no/such/file", "echelon tune"),
        ({"ECHELON_ALL_REDUCE": "magic"}, "error", "ECHELON_ALL_REDUCE='magic'", "magic"),
        ({"ECHELON_BACKND": "shm"}, "warning", "ECHELON_BACKND is not read", "rename it to ECHELON_BACKEND"),
        ({"ECHELON_XYZZY": "1"}, "warning", "ECHELON_XYZZY is not read", "unset it"),
    ],
)
def test_each_mistake_is_found(environ, status, found, fix):
    (finding,) = check_variables({**OFF, **environ})
    assert finding.status == status
    assert found in finding.found
    assert fix in finding.fix


def test_several_mistakes_are_all_found():
    assert len(check_variables({**OFF, "RANK": "0", "ECHELON_BACKEND": "x", "ECHELON_Y": "z"})) == 3


def test_every_variable_that_the_source_names_is_known():
    named = set()
    for path in Path(echelon.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                if text.startswith("ECHELON_") and text.replace("_", "").isalpha() and text != "ECHELON_":
                    named.add(text)
    assert named <= KNOWN
