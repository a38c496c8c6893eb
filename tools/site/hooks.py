"""Hooks of mkdocs: pages of the site that are made at build time.

README, CONTRIBUTING, CHANGELOG and the benchmarks' pages stay where they are in the repository, and become pages of the
site. The API reference is made from the docstrings, the page of the commands from the command line itself.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import api_pages
import command_page
import smaller
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from repository_pages import Repository

ROOT = Path(__file__).parents[2]


def repository_url() -> str:
    """Returns the address of the repository that pyproject.toml names. An empty text if it names none."""
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    urls: dict[str, str] = settings["project"].get("urls", {})
    of_project: dict[str, str] = settings["tool"].get("echelon", {})
    named = {name.lower(): url for name, url in (urls | of_project).items()}
    return (named.get("repository") or named.get("source") or "").rstrip("/")


REPOSITORY = Repository(ROOT, repository_url())
PARTS = {"reference/": "API reference", "benchmarks/": "measurements"}
"""Ends of titles of pages whose name in the menu is that of a guide as well, by folder."""
_NOT_SEARCHED = (
    *("benchmarks/", "conformance/", "decisions/", "design.md", "project/changelog", "reference/index", "source/"),
)
"""Pages that the search leaves out: notes, tables and lists would stand before the pages that answer a question.

The map of the source, design.md, is for those who change it, and every page loads the index.
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Names the repository, lists the reference, and shows the menu of versions if mike builds one of several."""
    if REPOSITORY.url:
        config.repo_url = REPOSITORY.url
    if os.environ.get("MIKE_DOCS_VERSION"):  # else the page would ask for a list of versions that is not there
        config.extra["version"] = {"provider": "mike"}
    for section in config.nav or ():
        if "Reference" in section:
            pages = section["Reference"]
            end = pages.index({"Glossary": "glossary.md"})
            pages[end:end] = [{api_pages.title(name): api_pages.page_name(name)} for name in api_pages.contents()]
    return config


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets browsers load pictures when they come into view."""
    del page, config, files
    return html.replace("<img ", '<img loading="lazy" ')


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Makes a page smaller."""
    del page, config
    return smaller.page(output)


def on_post_build(config: MkDocsConfig) -> None:
    """Makes the index of the search smaller, which the plugin of the search has written before."""
    path = Path(config.site_dir, "search", "search_index.json")
    path.write_text(smaller.index(path.read_text(encoding="utf-8")), encoding="utf-8")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and pictures that are not in docs/."""
    made = {**api_pages.pages(), "reference/commands.md": command_page.page(), **REPOSITORY.pages()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    for name, path in REPOSITORY.pictures().items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files of the repository into links of the site. Sets titles, and keeps notes out of the search."""
    del config
    for folder, part in PARTS.items():
        if page.file.src_uri.startswith(folder) and page.file.src_uri != f"{folder}index.md":
            page.meta["title"] = f"{page.title}, {part}"
    if page.file.src_uri.startswith(_NOT_SEARCHED):
        page.meta["search"] = {"exclude": True}

    def address(name: str) -> str | None:
        file = files.get_file_from_path(name)
        return None if file is None else file.url_relative_to(page.file)

    return REPOSITORY.with_links_of_site(markdown, page.file.src_uri, address)
