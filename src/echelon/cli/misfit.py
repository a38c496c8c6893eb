"""Arguments that may make a script fit into memory: a smaller batch, or activation checkpointing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeGuard

_BATCH_SIZES = ("bs", "mbs", "gbs", "bsz")
"""Short names that scripts give to the size of a batch, of a microbatch, or of the batch of all ranks."""
_NO_SIZE = re.compile("batches|norm|every|freq|log|val|test")
"""Words in names of other numbers than the size of a training batch. Fewer microbatches are larger ones."""
_RECOMPUTES = re.compile(r"--(?!no[_-]|.*(?:async|disable|resume|skip))[\w-]*(?:recompute|checkpointing|remat)[\w-]*")
"""Option that turns on activation checkpointing. "--checkpoint" alone stores the model."""
_HELPS = re.compile(
    r"(?<!no )(?<!without )\b(?:(?:activation|gradient|selective)[ -]checkpoint|recomput|rematerial)", re.IGNORECASE
)
"""Help of such an option with another name, as "--ac"."""
_NEGATES = re.compile(r"\b(?:disables?|skips?|turns? off|switch(?:es)? off|do(?:es)? not|don't|never)\b", re.IGNORECASE)
_LEFT = 0.75, 0.5, 0.25
"""Parts of a batch that are tried with activation checkpointing, whose memory is not known."""


class _Batch(NamedTuple):
    """Size of a batch among a script's arguments."""

    name: str
    """With what stands before the size, as "--batch " or "--batch="."""
    size: int
    is_global: bool
    """Whether it is that of all ranks. A script may then cut it into microbatches, so that memory stays."""


def cures(arguments: Sequence[str], fitting_share: float, recompute: str) -> list[str]:
    """Returns advice for a script that does not fit, each a phrase after "foresee". Empty if there is none.

    Args:
        arguments: arguments of the script. Defaults of those that are not given may follow.
        fitting_share: share of the activations that would fit. 0: nothing of these arguments helps.
        recompute: option of the script that turns on activation checkpointing. Empty if there is none.
    """
    if not fitting_share:
        return []
    # The batch of a rank decides on its memory, so its name goes first.
    batch = min(_batches(arguments), key=lambda each: each.is_global, default=None)
    smaller, with_recompute = ([], []) if batch is None else _sizes(batch.size, fitting_share)
    found = []
    if batch is not None and smaller:
        found.append(f'smaller batches by --sweep "{_alternatives(batch, smaller)}"')
    if recompute and batch is not None and len(with_recompute) > 1:
        sweep = f"{recompute} {_alternatives(batch, with_recompute)}"
        found.append(f'activation checkpointing by --sweep "{sweep}"')
    elif recompute:
        found.append(f"activation checkpointing by {recompute} after the script's name")
    return found


class Options(NamedTuple):
    """Options of a script that decide on its memory, as its calls of argparse's `add_argument` say."""

    recompute: str = ""
    """Flag that turns on activation checkpointing, as "--recompute". Empty if none is found."""
    batches: tuple[str, ...] = ()
    """Sizes of batches by default, as words of a command line: ("--batch-size", "8")."""


def options_of(path: str) -> Options:
    """Returns the options of a script. The flag is known by its name or its help, the sizes are by their names."""
    try:
        with open(path, "rb") as file:
            calls = [call for call in ast.walk(ast.parse(file.read())) if _adds_an_argument(call)]
        batches = [word for call in calls for word in _default_batch(call)]
        return Options(next((flag for call in calls for flag in _recompute_flags(call)), ""), tuple(batches))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return Options()


def _adds_an_argument(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"


def _names(call: ast.Call) -> list[str]:
    return [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def _default_batch(call: ast.Call) -> Iterator[str]:
    sizes = [each.value for each in call.keywords if each.arg == "default"]
    if sizes and isinstance(size := sizes[0], ast.Constant) and isinstance(size.value, int):
        yield from next(([name, str(size.value)] for name in _names(call) if _is_batch_size(name)), [])


def _recompute_flags(call: ast.Call) -> Iterator[str]:
    actions = [ast.unparse(each.value) for each in call.keywords if each.arg == "action"]
    if any("store_true" in each or "BooleanOpt" in each for each in actions):
        names = _names(call)
        texts = [each.value for each in call.keywords if each.arg == "help"]
        help_text = next((text.value for text in texts if isinstance(text, ast.Constant)), "")
        yield from filter(_RECOMPUTES.fullmatch, names)
        if isinstance(help_text, str) and _HELPS.search(help_text) and not _NEGATES.search(help_text):
            yield from (name for name in names if name.startswith("--") and not name.startswith("--no-"))


def _is_batch_size(name: str) -> bool:
    is_size = "batch" in name and not _NO_SIZE.search(name)
    return name.startswith("--") and (is_size or name.lstrip("-") in _BATCH_SIZES)


def _batches(arguments: Sequence[str]) -> Iterator[_Batch]:
    for word, following in pairwise((*arguments, "")):
        name, equals, value = word.partition("=")
        value = value if equals else following
        if _is_batch_size(name) and value.isdecimal():
            is_global = "global" in name or name.endswith("gbs")
            yield _Batch(f"{name}{equals or ' '}", int(value), is_global)


def _sizes(size: int, fitting_share: float) -> tuple[list[int], list[int]]:
    """Returns the smaller sizes to try, and the sizes to try with activation checkpointing, the largest first.

    A size of 64 is changed in steps of 8, since scripts divide it by other sizes, and one of 8 or 12 in steps of 1.
    """
    step = max(1, (size & -size) // 8)
    while step > 1 and size * fitting_share < 2 * step:
        step //= 2

    def rounded(sizes: Sequence[float]) -> list[int]:
        down = {int(each) // step * step for each in sizes}
        return sorted((each for each in down if 0 < each < size), reverse=True)

    # Fragments of memory may keep the largest one from fitting, so some below it are tried beside it.
    most = min(int(size * fitting_share) // step * step, size - step)
    smaller = rounded((most, most - step, most - 2 * step, most / 2))
    return smaller, [size, *(each for each in rounded([size * part for part in _LEFT]) if each > most)]


def _alternatives(batch: _Batch, sizes: Sequence[int]) -> str:
    return f"{batch.name}{{{','.join(map(str, sizes))}}}"
