"""Smaller files of the site: pages without indentation, and an index of the search without text that it has twice.

A reader's browser loads the whole index with the first page.
"""

from __future__ import annotations

import json
import re

_VERBATIM = re.compile(r"(<(pre|script|style|textarea)\b.*?</\2>)", re.DOTALL)
_SECTION = re.compile(r"<p>(?:Attributes|Parameters|Raises|Returns|Warns|Yields):</p>")
_PARAMETERS = re.compile(r"<p>(?:Attributes|Parameters):</p> ?<ul>(.*?)</ul>", re.DOTALL)
_CODE_BLOCK = re.compile(r"<pre>(.*?)</pre>", re.DOTALL)
_MARKUP = re.compile(r"</?(?:code|em|strong|sub|sup)>")
_MOST_LINES = 2
"""Lines of the longest block of code that the search finds: commands have as many, programs more."""


def page(html: str) -> str:
    """Returns a page without the indentation of its source, which is a sixth of a page of the API reference."""
    parts = _VERBATIM.split(html)
    # Two groups: each third part is text between blocks, the one after it a block, then the name of its tag.
    for place in range(0, len(parts), 3):
        parts[place] = re.sub(r"\s*\n\s*", "\n", parts[place])
    return "".join(part for place, part in enumerate(parts) if place % 3 < 2)


def index(text: str) -> str:
    """Returns the index of the search, as JSON, with less text of each section and all of its words in titles.

    Of the API reference it keeps the description and the names of the parameters. Elsewhere it leaves out long blocks
    of code, whose words the prose around them has.
    """
    found = json.loads(text)
    for section in found["docs"]:
        of_reference = section["location"].startswith("reference/echelon")
        section["text"] = _entry(section["text"]) if of_reference else _prose(section["text"])
    return json.dumps(found, separators=(",", ":"), ensure_ascii=False)


def _entry(text: str) -> str:
    text = _one_line(_CODE_BLOCK.sub("", text))
    names = [name for items in _PARAMETERS.findall(text) for name in re.findall(r"<li> ?([\w*]+)", items)]
    parameters = f"<p>Parameters: {', '.join(names)}</p>" if names else ""
    return _SECTION.split(text)[0].strip() + parameters


def _prose(text: str) -> str:
    return _one_line(_CODE_BLOCK.sub(lambda block: block[0] if block[1].count("\n") <= _MOST_LINES else "", text))


def _one_line(text: str) -> str:
    """Returns text without needless spaces and the markup of words, apart from blocks of code."""
    parts = re.split(r"(<pre>.*?</pre>)", text, flags=re.DOTALL)
    parts[::2] = (re.sub(r"\s+", " ", _MARKUP.sub("", part)) for part in parts[::2])
    return "".join(parts)
