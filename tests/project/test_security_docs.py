"""docs/security.md: every test that it points to is there."""

import ast
import re
from pathlib import Path

import pytest

from echelon.arguments import MAX_LOCAL_WORLD_SIZE, MAX_WORLD_SIZE
from echelon.backends import delivery
from echelon.backends.connect import acceptor, handshake
from echelon.backends.formats import wire
from echelon.backends.tcp import link_table, peers

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "security.md").read_text()
POINTERS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", DOCS)


def test_there_are_pointers():
    assert len(POINTERS) > 15


@pytest.mark.parametrize(("path", "name"), POINTERS)
def test_the_test_is_there(path, name):
    tree = ast.parse((ROOT / path).read_text())
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


GIB = 1 << 30
LIMITS = {
    "dimensions of a tensor": f"{wire.MAX_DIMS}",
    "note of a message": f"{wire.MAX_NOTE_BYTES:,} bytes",
    "payload of a message": f"{wire.MAX_MESSAGE_BYTES // GIB} GiB (`max_message_bytes`)",
    "messages of a peer that nobody has asked for": f"{peers.MAX_UNCLAIMED_BYTES // GIB} GiB (`max_unclaimed_bytes`), "
    "beyond one message of any size",
    "what each of them counts with, beside its payload": f"{delivery._OVERHEAD_BYTES:,} bytes, "
    f"{delivery._DIM_BYTES} for each dimension, and its note",
    "groups that a peer ends": f"{peers.MAX_REVOKED_CONTEXTS:,}",
    "frames without payload that a peer has not read, when it asks another question": f"{peers.MAX_UNSENT_WORDS:,}",
    "messages in shared memory after a peer has told its end": f"{link_table._MOST_AT_END:,}",
    "reading the connection of a process that has ended": f"{peers._MAX_LAST_WORDS_SECONDS:g} s",
    "greeting of a rank": f"{handshake.MAX_HELLO_BYTES:,} bytes",
    "table of members": f"{handshake.MAX_HELLO_BYTES:,} bytes, and {handshake.MAX_ENTRY_BYTES:,} for each rank",
    "connections that have proved themselves, and have not said which rank they are": f"{acceptor._MAX_STRANGERS} more "
    "than there are ranks",
    "ranks of a world": f"{MAX_WORLD_SIZE:,}",
    "ranks of a host": f"{MAX_LOCAL_WORLD_SIZE:,}",
}
"""The rows of the table of limits, with the numbers of the code."""


def test_the_table_of_limits_has_the_numbers_of_the_code():
    section = DOCS.partition("## Limits on a rank")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    assert {row[0]: row[1] for row in rows[1:]} == LIMITS
