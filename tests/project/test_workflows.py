"""The workflows and forms fit their schemas, run targets that exist, and cover what the project supports."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from echelon._torch_versions import TRIED

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PARSED = {path.stem: yaml.safe_load(path.read_text()) for path in WORKFLOWS}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "custom.github-workflows-require-timeout": WORKFLOWS,
    "vendor.github-issue-forms": [ROOT / ".github" / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "idea.yml")],
    "vendor.github-issue-config": [ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_fit_their_schema(schema):
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed: pip install check-jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, SCHEMAS[schema])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_matrix_covers_every_supported_version():
    jobs = PARSED["ci"]["jobs"]
    found = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert jobs["test"]["strategy"]["matrix"]["python"] == found == ["3.11", "3.12", "3.13", "3.14"]
    assert jobs["test"]["strategy"]["matrix"]["machine"] == ["x86-64", "arm64"]
    assert jobs["torch"]["strategy"]["matrix"]["torch"] == list(TRIED)


def steps():
    for name, workflow in PARSED.items():
        for job in workflow["jobs"].values():
            for step in job["steps"]:
                yield name, step


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for name, step in steps():
        command = step.get("run", "")
        if (made := re.match(r"make PYTHON=python ([a-z]+)", command)) and (made[1] != "docs" or "docs:" in makefile):
            assert re.search(rf"^{made[1]}:", makefile, re.MULTILINE), (name, command)
        for script in re.findall(r"python (\S+\.py)", command):
            assert (ROOT / script).exists(), script


def test_a_workflow_runs_every_target_of_tests_that_needs_no_gpu_or_hours():
    commands = " ".join(step.get("run", "") for _, step in steps())
    assert {"lint", "test", "slow", "compat", "docs"} <= set(re.findall(r"make PYTHON=python ([a-z]+)", commands))


def test_actions_have_a_version_and_jobs_few_rights():
    for name, step in steps():
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step.get("uses", "a/b@v1")), (name, step)
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in PARSED.values())
    publish = PARSED["release"]["jobs"]["publish"]
    assert (publish["environment"], publish["permissions"]) == ("pypi", {"id-token": "write"})
    assert "password" not in (ROOT / ".github/workflows/release.yml").read_text()
