"""The site of the documentation has a page for everything public, and works in a browser, wide and narrow."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest

import echelon
from tests.helpers import browser as chromium
from tests.helpers.browser import served

ROOT = Path(__file__).parents[2]
WIDTHS = (1280, 400)


@pytest.fixture
def tools(monkeypatch):
    """The modules of tools/site that need no mkdocs."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "site"))
    names = ("api_pages", "command_page", "repository_pages", "smaller")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]


PUBLIC_MODULES = ["echelon", *(f"echelon.{name}" for name in echelon._SUBMODULES)]
PUBLIC_MODULES += ["echelon.data_parallel", "echelon.pipeline.schedules", "echelon.interop.torch_distributed"]


def test_every_public_name_is_in_the_reference(tools):
    pages = tools["api_pages"].contents()
    listed = {name for names in pages.values() for name in names}
    short = {name.removeprefix("echelon.") for name in listed if name.count(".") == 1}
    for module in map(importlib.import_module, PUBLIC_MODULES):
        defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        for name in getattr(module, "__all__", [name for name in defined if not name.startswith("_")]):
            is_page = f"{module.__name__}.{name}" in pages
            assert f"{module.__name__}.{name}" in listed or name in short or is_page, f"{module.__name__}.{name}"


def test_names_for_the_library_s_own_use_are_not_in_the_reference(tools):
    assert all(
        name.startswith("echelon.") and name.count(".") == 1 for name in tools["api_pages"].contents()["echelon.errors"]
    )
    assert tools["api_pages"].contents()["echelon.foresight.run"] == ["echelon.Foreseen", "echelon.foresee"]


def test_a_name_is_in_the_reference_once(tools):
    listed = [name for names in tools["api_pages"].contents().values() for name in names]
    assert len(set(listed)) == len(listed)


def test_a_page_begins_with_the_names_that_users_call_first(tools):
    found = tools["api_pages"].pages()
    assert found["reference/echelon.md"].count("\n::: ") > 5
    first = {name: text.partition("\n::: ")[2].split()[0] for name, text in found.items() if "\n::: " in text}
    assert first["reference/echelon.md"] == "echelon.init"
    assert first["reference/echelon_pipeline.md"] == "echelon.pipeline.Pipeline"
    assert first["reference/echelon_testing.md"] == "echelon.testing.check_backend"
    short = {full.rpartition(".")[2] for names in tools["api_pages"].contents().values() for full in names}
    assert set(tools["api_pages"].FIRST) <= short


def test_every_command_and_option_is_on_its_page(tools):
    page = tools["command_page"].page()
    commands = dict(tools["command_page"].commands())
    assert {"echelon run", "echelon simulate", "echelon foresee", "echelon plan", "echelon bench"} <= set(commands)
    for name, command in commands.items():
        section = page[page.index(f"## {name}\n") :].partition("\n## ")[0]
        for parameter in command.params:
            for option in parameter.opts if parameter.param_type_name == "option" else ():
                assert f"`{option}`" in section, (name, option)


LINKS = {
    "[a](docs/plan.md)": "[a](plan.md)",
    "[a](docs/plan.md#costs)": "[a](plan.md#costs)",
    "[a](CONTRIBUTING.md)": "[a](project/contributing.md)",
    "[a](https://example.org/x/y/blob/main/docs/plan.md)": "[a](plan.md)",
    "[a]: docs/plan.md#costs": "[a]: plan.md#costs",
    "![a](docs/images/1f1b.svg)": "![a](images/1f1b.svg)",
    '<img src="docs/images/1f1b.svg" alt="a">': '<img src="<images/1f1b.svg>" alt="a">',
    "[a](examples/ddp.py)": "[a](source/examples/ddp.py.md)",
    "[a](https://pytorch.org/)": "[a](https://pytorch.org/)",
    "`[a](docs/plan.md)`": "`[a](docs/plan.md)`",
    "```text\n[a](docs/plan.md)\n```": "```text\n[a](docs/plan.md)\n```",
    "[a](no_such_file.md)": "[a](no_such_file.md)",
}


@pytest.mark.parametrize("link", LINKS)
def test_links_of_the_readme_become_links_of_the_site(link, tools):
    repository = tools["repository_pages"].Repository(ROOT, "https://example.org/x/y")
    assert repository.with_links_of_site(link, "index.md", lambda name: f"<{name}>") == LINKS[link]


def test_links_of_a_page_to_files_outside_docs_become_links_of_the_site(tools):
    repository = tools["repository_pages"].Repository(ROOT)
    text = "[a](../benchmarks/ddp/README.md), [b](../README.md), [c](pipeline.md)"
    moved = repository.with_links_of_site(text, "design.md", lambda name: name)
    assert moved == "[a](benchmarks/ddp/README.md), [b](index.md), [c](pipeline.md)"
    assert "benchmarks/ddp/README.md" in repository.pages()


def test_a_page_gets_smaller_and_looks_the_same(tools):
    page = "<p>\n    a\n    <b>b</b></p>\n\n<pre>\n    c\n</pre>\n    <script>\n  d\n</script>"
    assert tools["smaller"].page(page) == "<p>\na\n<b>b</b></p>\n<pre>\n    c\n</pre>\n<script>\n  d\n</script>"


SECTIONS = {
    ("plan/", "<p>a  <code>b</code></p> <pre><code>$ c  d\n</code></pre> <pre><code>1\n2\n3\n</code></pre>"): (
        "<p>a b</p> <pre><code>$ c  d\n</code></pre> "
    ),
    (
        "reference/echelon/#echelon.f",
        "<pre><code>f(x: int)\n</code></pre> <p>Does <code>f</code>.</p> <p>Parameters:</p> <ul> <li> <code>x</code>"
        "      (<code>int</code>)  – <p>is <code>y</code>.</p> </li> <li> <code>*args</code> – z</li> </ul> <p>Raises:"
        "</p> <ul> <li> <code>E</code> – </li> </ul>",
    ): "<p>Does f.</p><p>Parameters: x, *args</p>",
}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section[0])
def test_the_index_of_the_search_has_prose_and_names(section, tools):
    location, text = section
    index = json.dumps({"config": {}, "docs": [{"location": location, "title": "a", "text": text}]})
    (found,) = json.loads(tools["smaller"].index(index))["docs"]
    assert found == {"location": location, "title": "a", "text": SECTIONS[section]}


def build(folder, **variables):
    """Builds the site as `make docs` does."""
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip('needs mkdocs: pip install -e ".[docs]"')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, served on this machine."""
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    with served(folder) as address:
        yield Site(folder, address)


class Site:
    def __init__(self, folder, address):
        self.folder, self.address = folder, address
        pages = sorted(folder.rglob("index.html"))
        self.pages = [path.parent.relative_to(folder).as_posix().removeprefix(".") for path in pages]

    def num_bytes(self, url):
        """The bytes of a file, before a web server compresses it."""
        path = self.folder / url.removeprefix(self.address).strip("/").partition("?")[0]
        return (path / "index.html" if path.is_dir() else path).stat().st_size


@pytest.fixture(scope="module")
def browser():
    with chromium.browser() as tab:
        yield tab


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_public_name_has_an_anchor_on_the_site(site, tools):
    lines = zlib.decompress((site.folder / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    anchors = {line.split()[0] for line in lines}
    for names in tools["api_pages"].contents().values():
        assert set(names) <= anchors


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_page_has_a_title_of_its_own_and_each_anchor_is_there_once(site):
    titles = Counter()
    for page in site.pages:
        text = (site.folder / page / "index.html").read_text(encoding="utf-8")
        titles[re.search(r"<title>(.*?)</title>", text, re.DOTALL)[1]] += 1
        anchors = Counter(re.findall(r'<[^<>]* id="([^"]*)"', text))
        assert [anchor for anchor, count in anchors.items() if count > 1] == [], page
    assert [title for title, count in titles.items() if count > 1] == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_menu_has_every_page(site):
    """The theme took a README for the page of its section, and left it out of the menu."""
    wanted = re.findall(r"^ +- ([^:\n]+): \S+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    text = (site.folder / "plan" / "index.html").read_text(encoding="utf-8")
    links = re.findall(r'<a href="[^"]*" class="md-nav__link[^"]*">(.*?)</a>', text, re.DOTALL)
    shown = Counter(re.sub(r"<[^>]*>", "", link).strip().replace("&#39;", "'") for link in links)
    assert len(wanted) > 50
    assert Counter(wanted) - shown == Counter()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_opens_without_complaint_and_is_small(width, site, browser):
    faults = []
    assert len(site.pages) > 90
    for page in site.pages:
        if width < 1000 and page.startswith(("decisions/2026", "source/")):
            continue  # notes and sources of one form, whose width the other pages have tried
        browser.open(f"{site.address}/{page}/".replace("//", "/").replace(":/", "://"), width)
        faults += [f"{page}: {each}" for each in browser.complaints]
        browser.run("for (const image of document.images) image.loading = 'eager'")
        browser.wait("[...document.images].every(image => image.complete)")
        requests = loaded(browser)
        faults += [f"{page}: asks for {url}" for url in requests if not url.startswith(site.address)]
        # The index of the search is loaded at once, and pictures further down when they come into view.
        size = sum(map(site.num_bytes, {*requests, f"{site.address}/search/search_index.json"}))
        faults += [f"{page}: {size} bytes with all pictures and the index of the search"] * (size >= 1_000_000)
        faults += [f"{page}: {each}" for each in browser.run(LOOKS)]
    assert not faults


def loaded(browser):
    """Returns the addresses of the files that a page asked for."""
    return [url for url in browser.requests if not url.startswith("data:")]


LOOKS = """(() => {
    const found = []
    for (const image of document.images) {
        if (!image.complete || !image.naturalWidth) found.push("no picture: " + image.src)
        if (!image.alt.trim()) found.push("no alternative text: " + image.src)
        if (image.width < Math.min(image.naturalWidth, 700)) found.push("too small to read: " + image.src)
    }
    for (const frame of document.querySelectorAll("p:has(> img:only-child)")) {
        const hint = getComputedStyle(frame, "::before").content.includes("Scroll sideways")
        if (hint != frame.scrollWidth > frame.clientWidth) found.push("hint " + hint + " at " + frame.firstChild.src)
    }
    const wide = document.documentElement.scrollWidth
    if (wide > innerWidth) found.push("scrolls sideways: " + wide)
    if (document.querySelectorAll("h1").length != 1) found.push("not one title")
    if (!document.documentElement.lang) found.push("no language")
    return found
})()"""


CONTRAST = """(() => {
    const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d")
    const parsed = color => {
        canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1)
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data
        return [r, g, b, a / 255]
    }
    const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1)
    const ground = element => {
        if (!element) return [255, 255, 255, 1]
        const own = parsed(getComputedStyle(element).backgroundColor)
        return own[3] == 1 ? own : over(own, ground(element.parentElement))
    }
    const light = color => color.slice(0, 3).map(value => value / 255)
        .map(value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0)
    const found = {}
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement
        const style = getComputedStyle(element)
        const box = element.getBoundingClientRect()
        if (!walker.currentNode.textContent.trim() || !box.width || style.visibility == "hidden") continue
        let opacity = 1
        for (let each = element; each; each = each.parentElement) opacity *= getComputedStyle(each).opacity
        if (opacity < 0.05) continue  // shown on demand, such as the mark of a heading
        const below = ground(element)
        const text = parsed(style.color)
        text[3] *= opacity
        const [a, b] = [light(over(text, below)), light(below)].sort((a, b) => b - a)
        const ratio = (a + 0.05) / (b + 0.05)
        const size = parseFloat(style.fontSize)
        const enough = size >= 24 || size >= 18.66 && style.fontWeight >= 700 ? 3 : 4.5
        if (ratio < enough) found[element.tagName + "." + element.className] =
            ratio.toFixed(2) + " " + walker.currentNode.textContent.trim().slice(0, 30)
    }
    return Object.entries(found).map(pair => pair.join(": "))
})()"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_texts_have_enough_contrast(width, scheme, site, browser):
    for page in ("", "plan/", "reference/echelon/", "reference/commands/", "glossary/", "simulation/"):
        browser.open(f"{site.address}/{page}", width)
        browser.run(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
        assert browser.run(CONTRAST) == [], page


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_search_is_reached_by_keys_and_finds_a_word(width, site, browser):
    browser.open(f"{site.address}/", width)
    browser.key("f")  # the theme's key for the search
    browser.wait("document.activeElement.matches('.md-search__input')")
    browser.type("deadlock")
    browser.wait("document.querySelectorAll('.md-search-result__link').length > 3")
    found = browser.run("[...document.querySelectorAll('.md-search-result__item')].map(item => item.textContent)")
    assert all("deadlock" in text.lower() for text in found[:3])
    browser.key("ArrowDown")
    browser.press("Enter")
    browser.wait("location.pathname != '/' && document.body?.textContent.toLowerCase().includes('deadlock')")
    assert browser.complaints == []


FOUND = {
    "DistributedDataParallel": "/reference/echelon_data_parallel/#echelon.DistributedDataParallel",  # a class
    "all_reduce_coalesced": "/reference/echelon/#echelon.ProcessGroup.all_reduce_coalesced",  # a method
    "num_microbatches": "/reference/echelon_pipeline/#echelon.pipeline.Pipeline",  # an argument
    "oversubscription": "/reference/commands/#echelon-foresee",  # an option
    "--sweep": "/foresee/",
    "ECHELON_SECRET": "/security/",
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("words", FOUND)
def test_the_search_finds_the_page_of_a_name(words, site, browser):
    browser.open(f"{site.address}/", 1280)
    browser.key("f")
    browser.wait("document.activeElement.matches('.md-search__input')")
    browser.type(words)
    browser.wait(f"""[...document.querySelectorAll(".md-search-result__link")].some(
        link => (new URL(link.href).pathname + link.hash).startsWith("{FOUND[words]}")
    )""")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_keys_reach_the_content_and_the_tabs(site, browser):
    browser.open(f"{site.address}/plan/", 1280)
    reached = []
    for _ in range(60):
        browser.key("Tab")
        reached.append(browser.run("document.activeElement.textContent.trim().slice(0, 40)"))
        assert browser.run(IS_SEEN), reached[-1]
    assert reached[0] == "Skip to content"
    assert {"Reference", "How-to guides", "Checkpoints"} <= set(reached)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_keys_pass_by_the_menu_that_is_folded_away(site, browser):
    browser.open(f"{site.address}/plan/", 400)
    away = []
    for _ in range(30):
        browser.key("Tab")
        if not browser.run(IS_INSIDE):
            away.append(browser.run("document.activeElement.textContent.trim().slice(0, 40)"))
    assert away in ([], ["Initializing search"], ["Type to start searching"])  # the theme's own, which is empty


IS_INSIDE = """(() => {
    const box = document.activeElement.getBoundingClientRect()
    return document.activeElement == document.body || box.right > 0 && box.left < innerWidth
})()"""


IS_SEEN = """(() => {
    const element = document.activeElement, style = getComputedStyle(element)
    return element == document.body || style.outlineStyle != "none" || style.boxShadow != "none"
        || element.matches("input")
})()"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_versions_are_a_matter_of_configuration(site, tmp_path):
    """Under mike the page asks for the list of versions; otherwise it must not, as there is none."""
    build(tmp_path, MIKE_DOCS_VERSION="1.0")
    assert '"version": {"provider": "mike"}' in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert '"version": null' in (site.folder / "index.html").read_text(encoding="utf-8")
