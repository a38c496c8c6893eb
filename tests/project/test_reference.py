"""Each callable of the API reference describes its arguments, its result and its errors.

Some arguments need no line under "Args:": `*args` and `**kwargs`, a single one that the first paragraph names, and
fields with a docstring of their own or a word in that of their class. Nor do constructors of objects that the library
makes, which say "Made by". A method without a docstring of its own is not in the reference.
"""

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from pathlib import Path

import pytest

REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
ROOT = Path(__file__).parents[2]


def api_pages():
    sys.path.insert(0, str(ROOT / "tools" / "site"))
    try:
        return importlib.import_module("api_pages")
    finally:
        sys.path.pop(0)
        sys.modules.pop("api_pages", None)


def resolved(name):
    """The object of a full name such as "echelon.pipeline.Pipeline"."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


def callables():
    """Functions, classes and methods of the reference, by full name."""
    pages, found = api_pages(), {}
    for name in (each for names in pages.contents().values() for each in names):
        member = resolved(name)
        if inspect.isclass(member) and not issubclass(member, BaseException):
            shown = pages.MEMBERS.get(name)
            found[name] = member
            methods = inspect.getmembers(member, lambda each: inspect.isfunction(each) or inspect.ismethod(each))
            found |= {
                f"{name}.{method}": function
                for method, function in methods
                if not method.startswith("_")
                and inspect.unwrap(function).__module__.startswith("echelon.")
                and (shown is None or method in shown)
            }
        elif inspect.isroutine(member):
            found[name] = member
    return {name: member for name, member in found.items() if documentation(member)}


def documentation(member):
    """The docstring. That of a class with the one of its constructor, as the page merges them."""
    docs = [member.__doc__, member.__init__.__doc__ if inspect.isclass(member) and "__init__" in vars(member) else None]
    return "\n\n".join(inspect.cleandoc(doc) for doc in docs if doc)


def described(doc):
    """The arguments that the section "Args:" names. One line may name several."""
    return {
        name.strip().lstrip("*")
        for section in re.findall(r"^Args:\n((?:    .*\n|\n)+)", doc + "\n", re.MULTILINE)
        for names in re.findall(r"^    (\w[\w, *]*):", section, re.MULTILINE)
        for name in names.split(",")
    }


def fields(member):
    """Fields of a class with a docstring of their own, or with a word in that of the class."""
    if not (dataclasses.is_dataclass(member) or hasattr(member, "_fields")):
        return set()
    body = ast.parse(textwrap.dedent(inspect.getsource(member))).body[0].body
    own = {
        field.target.id
        for field, after in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    return own | set(re.findall(r"\w+", member.__doc__))


def untold(member):
    """Arguments that the docstring does not describe."""
    doc = documentation(member)
    is_class = inspect.isclass(member)
    if is_class and re.search(r"\bMade by\b", doc):
        return []
    signature = inspect.signature(member.__init__ if is_class and "__init__" in vars(member) else member)
    named = [
        each.name
        for each in signature.parameters.values()
        if each.name not in ("self", "cls") and each.kind not in REST
    ]
    first = doc.partition("\n\n")[0]
    if len(named) == 1 and re.search(rf"\b{named[0].replace('_', '[ _]')}", first):
        return []
    known = described(doc) | (fields(member) if is_class else set())
    return [name for name in named if name not in known]


def says_result(member):
    """Whether the docstring says what comes back, where something does."""
    signature = inspect.signature(member)
    passes_all_on = all(each.name == "self" or each.kind in REST for each in signature.parameters.values())
    if inspect.isclass(member) or str(signature.return_annotation) in ("None", "NoReturn"):
        return True
    if str(signature.return_annotation) == "Any" and passes_all_on:  # the result is another function's, as torch's Work
        return True
    doc = documentation(member)
    return re.search(r"\b([Rr]eturns?|Yields|Whether)\b|^(Inside|Runs)\b", doc) is not None


RAISE_NOTHING = """
echelon.ProcessGroup.abort
echelon.backends.work.Work
echelon.backends.work.Work.exception is_completed
echelon.DDP.extra_repr named_buffers named_modules named_parameters no_sync state_dict
echelon.DistributedDataParallel.extra_repr named_buffers named_modules named_parameters no_sync state_dict
echelon.data_parallel.AccumulateIn.at_end before_forward load_state_dict state_dict
echelon.data_parallel.CompressTo.at_end before_forward load_state_dict state_dict
echelon.data_parallel.GradientHook
echelon.data_parallel.GradientHook.at_end before_forward load_state_dict state_dict
echelon.data_parallel.LocalSGD.reduce state_dict
echelon.data_parallel.PowerSGD.at_end before_forward state_dict
echelon.pipeline.Pipeline.eval named_parameters no_sync state_dict train
echelon.pipeline.keyed
echelon.timeline.timeline.Timeline.title_of
echelon.pipeline.schedules.loop names vee
echelon.pipeline.schedules.Action.parts
echelon.pipeline.schedules.Overlapped.parts
echelon.pipeline.plan.fuse.exact_stages is_exact
echelon.pipeline.plan.program.lower
echelon.pipeline.schedules.recommendation.table
echelon.checkpoint.Handle PerRank
echelon.checkpoint.Handle.done
echelon.Delay.concerns
echelon.NetworkPartition.concerns
echelon.simulation.Measurements.total
echelon.Foreseen.report
echelon.testing.RankPool clause_names
echelon.testing.RankPool.close
echelon.backends.base.Backend.abort aside compute crosses_network executor
echelon.backends.control.ControlPlane
echelon.backends.control.ControlPlane.abort ask close_reason closed_error difference join keep_silent
echelon.backends.control.ControlPlane.last_heard lines_left message_wait num_sent revoke separation
echelon.backends.delivery.Receive
echelon.backends.delivery.Receive.complete
echelon.backends.formats.wire.Tag.is_collective_of
echelon.backends.formats.wire.as_sent
echelon.backends.matching.Mailbox
echelon.backends.matching.Mailbox.fail_all fail_context fail_peer post take withdraw
echelon.backends.messages.Messages
echelon.backends.messages.Messages.brings_memory cancel keeps_messages prepare_receive prepare_send unreceived
echelon.backends.messages.Messages.will_wait
echelon.backends.modes.normal_mode
echelon.collectives.plans.algorithms.chunk_bytes numbered
echelon.collectives.plans.cost.LinkCosts.of_message
echelon.interop.torch_distributed.EchelonProcessGroup
echelon.interop.torch_distributed.EchelonProcessGroup.abort
echelon.data.DataLoader.state_dict
echelon.data.DistributedSampler.finish indices left take
echelon.logging.MetricsWriter.close
"""
"""Callables that raise no error of their own, a class with several methods on one line."""


def raises_nothing():
    """Full names of the callables of RAISE_NOTHING."""
    names = []
    for line in RAISE_NOTHING.split("\n"):
        first, *others = line.split() or [""]
        names += [first, *(f"{first.rpartition('.')[0]}.{other}" for other in others)] if first else []
    return names


def is_record(member):
    """Whether a class only keeps the values that it is given."""
    is_plain = hasattr(member, "_fields") or (dataclasses.is_dataclass(member) and not hasattr(member, "__post_init__"))
    return inspect.isclass(member) and is_plain


def says_errors(member):
    """Whether the docstring says which errors come."""
    return re.search(r"^Raises:\n    \w", documentation(member), re.MULTILINE) is not None


CALLABLES = callables()


def test_the_reference_has_callables():
    assert len(CALLABLES) > 200


@pytest.mark.parametrize("name", CALLABLES)
def test_each_argument_is_described(name):
    assert untold(CALLABLES[name]) == []


@pytest.mark.parametrize("name", CALLABLES)
def test_the_result_is_described(name):
    assert says_result(CALLABLES[name]), documentation(CALLABLES[name])


@pytest.mark.parametrize("name", [name for name in CALLABLES if not is_record(CALLABLES[name])])
def test_the_errors_are_described(name):
    assert says_errors(CALLABLES[name]) != (name in raises_nothing()), documentation(CALLABLES[name])


def test_the_list_of_callables_without_errors_has_no_other_names():
    assert [name for name in raises_nothing() if name not in CALLABLES or is_record(CALLABLES[name])] == []


def imports_of_docs():
    """Names that blocks of the pages import from Echelon, as (page, full name)."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"^```py(?:thon)?\b[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "echelon":
                    yield from ((page.name, f"{node.module}.{alias.name}") for alias in node.names)


def test_every_name_that_a_page_imports_is_in_the_reference():
    contents = api_pages().contents()
    shown = [resolved(name) for names in contents.values() for name in names]
    imported = sorted(set(imports_of_docs()))
    assert len(imported) > 50
    # By identity: a page may import an object by a longer name than that of the reference.
    missing = [
        (page, name)
        for page, name in imported
        if name not in contents and not any(resolved(name) is each for each in shown)
    ]
    assert missing == []


def test_the_checks_find_what_is_left_out():
    def scale(tensor, factor):
        """Multiplies a tensor.

        Args:
            tensor: the tensor.
        """

    def times(count) -> int:
        """Multiplies."""

    assert untold(scale) == ["factor"]
    assert untold(times) == ["count"]
    assert not says_result(times)
    assert not says_errors(scale)
