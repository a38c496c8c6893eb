"""The tutorials run, block by block, and print what they show; so do the pages for users of other libraries."""

import warnings
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.helpers.pages import blocks_of, outputs

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted([*(DOCS / "tutorials").glob("*.md"), *(DOCS / "coming_from").glob("*.md")])
QUICK = ("write_a_schedule", "choose_a_schedule")
FORECAST_OF = "2.13"
"""Version of torch whose operators the forecast on a page was recorded with: others fuse and allocate otherwise."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=() if page.stem in QUICK else pytest.mark.slow) for page in PAGES],
)
def test_every_block_prints_what_the_page_shows(page, tmp_path):
    if page.stem == "foresee_a_cluster" and not version("torch").startswith(FORECAST_OF):
        pytest.skip(f"shows a forecast by torch {FORECAST_OF}")
    text = page.read_text(encoding="utf-8")
    ran = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and of libraries, which pages do not show
        for block, printed in outputs(text, tmp_path, page.stem):
            assert printed == block.expected, block.code
            ran += 1
    assert ran == len(list(blocks_of(text)))
    assert "```python" not in text or ran


def test_no_block_of_a_page_is_left_out():
    """A block of Python that no test runs would rot: other code is marked as diff, sh, yaml or text."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        marked = text.count("\n```python\n") + text.count('\n```py title="') + text.count("\n```console\n")
        assert marked == len(list(blocks_of(text))), page.name
        assert "\n```py\n" not in text, page.name
