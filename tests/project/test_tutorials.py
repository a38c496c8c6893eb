"""The tutorials run, block by block, and print what they show; so do the pages for users of other libraries."""

import json
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.helpers.pages import FORECAST_OF, blocks_of, outputs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*(DOCS / "tutorials").glob("*.md"), *(DOCS / "coming_from").glob("*.md")])
QUICK = ("write_a_schedule", "choose_a_schedule")


@pytest.mark.timeout(900)
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


def test_the_notebooks_are_made_from_the_pages(monkeypatch):
    """Their outputs are those of the pages, which the first test compares with a run."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import notebooks

    assert len(notebooks.NAMES) == 3
    for name in notebooks.NAMES:
        path = DOCS / "tutorials" / f"{name}.ipynb"
        made = notebooks.notebook(path.with_suffix(".md").read_text(encoding="utf-8"))
        assert json.loads(path.read_text(encoding="utf-8")) == made, f"{name}: run python tools/notebooks.py"
        assert all(cell["outputs"] or cell["execution_count"] for cell in made["cells"] if cell["cell_type"] == "code")
