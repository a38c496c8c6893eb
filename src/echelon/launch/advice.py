"""Advice on errors of Python and torch that a rank raised, added to them as a note.

Python itself refuses wrong arguments of a group's methods. A check of our own, as in `refuse_others`, would take a
tenth of the time of a small all_reduce. So Python's words are read here, after the call has failed.
"""

from __future__ import annotations

import dis
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any, cast

from echelon.arguments import missing_arguments, no_argument
from echelon.call_site import is_own
from echelon.errors import message_of
from echelon.hint import Hint

_NO_GPU = (
    "torch finds no GPU here: keep tensors on the CPU, as x.to(group.device) does, or run the script for GPUs that are "
    "not there by echelon foresee"
)
_ON_TORCH = {
    **dict.fromkeys(
        (
            *("Torch not compiled with CUDA enabled", "'_cuda_setDevice'", "torch.cuda.Stream requires CUDA support"),
            *(
                "Found no NVIDIA driver on your system",
                "No CUDA GPUs are available",
                "Cannot access accelerator device when none is available",
            ),
        ),
        _NO_GPU,
    ),
    "Distributed package doesn't have NCCL built in": "this build of torch has no NCCL: give init_process_group "
    "'gloo', or run the script for GPUs that are not there by echelon foresee",
    "ProcessGroupNCCL is only supported with GPUs": "NCCL needs GPUs, and torch finds none here: give "
    "init_process_group 'gloo', or run the script for GPUs that are not there by echelon foresee",
    "distributed collective mismatch": "ranks have called different collectives: run the script by echelon "
    "simulate, which names both lines",
    "Unknown backend type echelon": "import echelon.interop.torch_distributed first, which registers it",
    # Accelerate's words, also for Transformers' TrainingArguments. It knows the backends of its own list.
    "Your assigned backend echelon is not available": "call torch.distributed.init_process_group('echelon') before, "
    "and leave out ddp_backend= or backend=",
    "gloo/transport/tcp/pair.cc": "a peer has ended or left: echelon simulate -n N script.py names the line, and so "
    "does init_process_group('echelon') after import echelon.interop.torch_distributed",
}
"""Advice by a part of the error's text, for programs without a group of Echelon, too."""
_ON_TEXTS = {
    **_ON_TORCH,
    **dict.fromkeys(
        (
            *("'ProcessGroup' object is not ", "argument of type 'ProcessGroup'", "non-iterable ProcessGroup object"),
            "object of type 'ProcessGroup' has no len()",
        ),
        "a group has no items: its ranks are range(group.world_size)",
    ),
    "'method' object does not support the context manager protocol": "call the method, as in with ddp.no_sync():",
    **{
        f"'{kind}' object has no attribute 'wait'": "a call of a group returns a Work, which has wait(), with "
        "async_op=True, or as isend and irecv; batch_isend_irecv returns a list of them"
        for kind in ("Tensor", "NoneType", "list")
    },
    "but _scale is None": "a rank without batches in ddp.join(update) has not called scale(): use "
    "echelon.amp.GradScaler(group)",
}
"""Advice by a part of the error's text."""
_HAS_NO_GRAPH = "does not require grad and does not have a grad_fn"
_AFTER_STEP = (
    "if this is the loss of a Pipeline's step(), step() has run the backward already: remove this backward() and call "
    "optimizer.step() next"
)
_HAS_NO_DEFAULT = "Default process group has not been initialized"
_NOT_OF_TORCH = (
    "a group of Echelon is none of torch.distributed: use group.rank, group.world_size and its other calls, or in "
    "place of echelon.init() import echelon.interop.torch_distributed and call init_process_group('echelon')"
)
_NOT_LAST = (
    "if this is the result of a Pipeline's forward(), only the rank of the last stage has it: use it under "
    "if pipe.is_last:"
)
_ON_CALLED = {
    **{name: f"{name} is a value: write group.{name} without ()" for name in ("rank", "world_size", "device")},
    **dict.fromkeys(("plan", "search"), "echelon.pipeline.schedules has search(costs, num_ranks, num_microbatches)"),
    "gpipe": "write schedules.build('gpipe', num_ranks, num_microbatches)",
    "one_f_one_b": "write schedules.build('1f1b', num_ranks, num_microbatches)",
    "dualpipe_v": "write schedules.build('dualpipe-v', num_ranks, num_microbatches)",
}
"""Advice on calls of values and of modules, by the name of the attribute."""
_PIPELINE = ("echelon.pipeline.run.pipeline", "Pipeline")
_GROUP = ("echelon.group.group", "ProcessGroup")
"""Classes by module and name: both modules need torch."""
_UNCALLED = ("'int'", "'torch.device'", "'module'", "'_Watched'")  # the last is a module, for simulated ranks
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")

_RETURNED = " results are returned: leave it out, or give a tensor for all of them as out="
_AT_ONCE = " the call returns a Work already: leave it out"
_MEANT = {
    **dict.fromkeys(("group", "pg", "process_group", "comm", "process_set"), " call the method of that group instead"),
    **dict.fromkeys(("dest", "destination", "group_dst"), "dst"),
    **dict.fromkeys(("source", "group_src"), "src"),
    **dict.fromkeys(("reduce_op", "reduction"), "op"),
    **dict.fromkeys(("obj", "object", "sendobj", "data"), "value"),
    **dict.fromkeys(("object_list", "scatter_list", "input_list"), " give the values of all ranks as one argument"),
    **dict.fromkeys(("gather_list", "tensor_list", "output_tensor_list", "object_gather_list"), _RETURNED),
    **dict.fromkeys(("output", "output_tensor", "recvbuf", "buf"), "out"),
    **dict.fromkeys(("input", "input_tensor", "sendbuf"), "tensor"),
    **dict.fromkeys(("input_split_sizes", "splits"), "in_splits"),
    **dict.fromkeys(("sendtag", "recvtag"), "tag"),
    "output_split_sizes": "out_splits",
    "average": " give op='mean' or op='sum'",
    "name": " calls need no name: leave it out",
    "device_ids": " a group has one device: leave it out",
    "device": " the group's device is group.device: leave it out",
    "backend": " all groups of a job have one backend: leave it out",
}
"""Arguments that other libraries have for these calls, with advice."""
_PEERS = {"dst": "the rank that gets it, as dst=0", "src": "the rank that has it, as src=0"}
_ANY_SOURCE = "; recv_any() takes a message of any rank"


def advice_on_last_words(words: str) -> str:
    """Returns advice for a rank without a group of Echelon, from the last line of its traceback. Empty for others."""
    return next((advice for part, advice in _ON_TORCH.items() if part in words), "")


def advise(error: BaseException) -> None:
    """Adds a note of advice to a known error of Python or torch, once."""
    text = message_of(error)
    advice = next((advice for part, advice in _ON_TEXTS.items() if part in text), "")
    if "NoneType" in text and isinstance(error, TypeError | AttributeError) and not advice:
        advice = _NOT_LAST if any(not pipe.is_last for pipe in _values(error, *_PIPELINE)) else ""
    if _HAS_NO_GRAPH in text and any(_values(error, *_PIPELINE)):
        advice = _AFTER_STEP
    if _HAS_NO_DEFAULT in text and any(_values(error, *_GROUP)):
        advice = _NOT_OF_TORCH
    if type(error) is TypeError and not advice:
        advice = _on_called(error) if text.endswith("object is not callable") else _on_call(text)
    # A class of the program may refuse notes, and its error must still be reported.
    with suppress(Exception):
        if advice and advice not in getattr(error, "__notes__", ()):
            error.add_note(Hint(advice))


def _on_called(error: TypeError) -> str:
    """Returns advice on a call of an attribute that is no function."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not message_of(error).startswith(_UNCALLED):
        return ""
    run = [each for each in dis.get_instructions(trace.tb_frame.f_code) if each.offset <= trace.tb_lasti]
    # The attribute that is called begins where the call does.
    called = [each for each in run if _begin(each) == _begin(run[-1])]
    names = [each.argval for each in called if each.opname in _ATTRIBUTES]
    base = next(
        (each.argval for each in called if each.opname.startswith("LOAD_") and each.opname not in _ATTRIBUTES), ""
    )
    if not names or (len(names) == 1 and _is_of_program(trace.tb_frame, base)):
        return ""
    return _ON_CALLED.get(names[-1], "")


def _is_of_program(frame: FrameType, name: object) -> bool:
    """Whether a variable is known to hold a value that is not of Echelon."""
    scope = {**frame.f_globals, **frame.f_locals}
    if name not in scope:
        return False
    value = scope[name]
    of = value.__name__ if isinstance(value, ModuleType) else type(value).__module__
    return not of.startswith("echelon")


def _values(error: BaseException, module: str, name: str) -> Iterator[Any]:
    """Yields values of a class: variables of the program's functions that raised an error, and attributes of self.

    Args:
        error: the error.
        module: the module of the class. No values if it was not imported.
        name: the class.
    """
    wanted = getattr(sys.modules.get(module), name, None)
    if wanted is None:
        return
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if is_own(frame.f_code.co_filename):  # the frames that start a simulated rank hold its group
            continue
        of_self: dict[str, Any] = {}
        with suppress(Exception):  # of a class with slots, or without self
            of_self = object.__getattribute__(frame.f_locals["self"], "__dict__")
        # Not isinstance, which asks values of the user for their class.
        for value in (*frame.f_globals.values(), *frame.f_locals.values(), *of_self.values()):
            if type(value) is wanted:
                yield value


def _begin(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    at = instruction.positions
    return (at.lineno, at.col_offset) if at else (None, None)


def _on_call(text: str) -> str:
    """Returns advice on a call of a group's method with wrong arguments, from the text of Python's TypeError."""
    callee, found, problem = text.partition("() ")
    owner, _, name = callee.removesuffix(".__new__").rpartition(".")
    method = _method(owner, name) if found else None
    if method is None:
        return ""
    known = [each for each in inspect.signature(method).parameters if each != "self"]
    quoted = problem.split("'")[1::2]
    if "missing" in problem:
        peers = [f"give {_PEERS[each]}" for each in quoted if each in _PEERS]
        advice = missing_arguments(method, quoted) + (f": {', '.join(peers)}" if peers else "")
        return advice + (_ANY_SOURCE if name in ("recv", "irecv") else "")
    if "unexpected keyword" in problem:
        return no_argument(quoted[0], known, _meant(name, known))
    return f"the arguments of {name} are {', '.join(known)}" if "positional argument" in problem else ""


def _meant(method: str, known: list[str]) -> dict[str, str]:
    root = "dst" if "dst" in known else "src"
    at_once = f" write i{method}, which returns a Work" if method in ("send", "recv", "recv_any") else _AT_ONCE
    return {**_MEANT, **dict.fromkeys(("root", "root_rank"), root), "async_op": at_once}


def _method(owner: str, name: str) -> Callable[..., Any] | None:
    """Returns a method of groups by the names that Python gives its class and itself; SendTo and RecvFrom by theirs."""
    groups = sys.modules.get("echelon.group.group")  # which needs torch
    if groups is not None and not owner and name in ("SendTo", "RecvFrom"):
        return cast("Callable[..., Any]", getattr(sys.modules["echelon.group.messages"], name))
    classes = {} if groups is None else {each.__name__: each for each in groups.ProcessGroup.__mro__}
    method = vars(classes[owner]).get(name) if owner in classes else None
    return method if inspect.isfunction(method) and not name.startswith("_") else None
