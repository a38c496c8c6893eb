"""Refusals of operations whose results depend on values, which fake tensors do not have.

The recorder refuses an operator that it sees. Code in C++ that reads a tensor by itself, or torch's own code of fake
tensors, raises an error that says nothing of the program. Such an error becomes a refusal with its operation and line.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from echelon._torch_private.tensors import FakeTensor, is_of_fake_tensors, lacks_implementation
from echelon.call_site import is_foreign, is_own, shortened
from echelon.errors import UnsupportedOp
from echelon.foresight.record.here import Recording, in_ranks
from echelon.replacements import Replacement


def unknown_result(name: str, line: str) -> UnsupportedOp:
    """Returns the refusal of an operation at a line of the program."""
    return UnsupportedOp(
        f"{name} at {line}: torch cannot tell its result without values of tensors, which a recorded program does not "
        "have: foresee the program without it, or run it by echelon simulate"
    )


def refused(error: BaseException) -> BaseException:
    """Returns the refusal for an error of fake tensors, which becomes its cause. Other errors are returned."""
    if not is_of_fake_tensors(error):
        return error
    frames = list(traceback.walk_tb(error.__traceback__))
    of_program = [place for place, (frame, _) in enumerate(frames) if not is_foreign(frame.f_code.co_filename)]
    if not of_program:
        return error
    frame, line = frames[of_program[-1]]
    place = shortened(f"{frame.f_code.co_filename}:{line}")
    if lacks_implementation(error):
        found = UnsupportedOp(
            f"an operator at {place} has no fake implementation, which says the shape of its result: register one by "
            "torch.library.register_fake"
        )
    else:
        found = unknown_result(_called([inner for inner, _ in frames[of_program[-1] + 1 :]]), place)
    found.__cause__ = error
    return found.with_traceback(error.__traceback__)


def _called(frames: list[FrameType]) -> str:
    """Returns the name of the function that a line of the program has called, by the frames of the call."""
    for frame in frames:
        if not is_own(frame.f_code.co_filename):
            return frame.f_code.co_name
        # A mode gets functions of torch that have no frame.
        if (function := frame.f_locals.get("func")) is not None:
            return getattr(function, "__name__", str(function))
    return "an operation"


def not_pickled() -> list[Replacement]:
    """Refuses to pickle tensors of recorded ranks, which have no values to be kept or sent."""
    return [Replacement(Tensor, "__reduce_ex__", in_ranks(_pickle))]


def _pickle(recording: Recording, original: Callable[..., Any], tensor: Tensor, protocol: int) -> Any:
    # torch.save writes its shape, see `saved`.
    if not isinstance(tensor, FakeTensor) or _is_saved():
        return original(tensor, protocol)
    # Frames between: the replacement. The modules of pickle in C have none.
    if sys._getframe(2).f_code.co_filename == copy.__file__:
        return _copied, (tensor,)
    raise UnsupportedOp(
        f"a tensor is pickled at {recording.log.line()}, and one of a recorded program has no values: send or keep a "
        "number, such as loss.item(), or send the tensor by all_gather or broadcast"
    )


def _is_saved() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == torch.serialization.__file__:
            return True
        frame = frame.f_back
    return False


def _copied(tensor: Tensor) -> Tensor:
    """Returns a tensor with the same memory and attributes, as of `copy.copy`. A parameter stays one."""
    out = tensor.detach().requires_grad_(tensor.requires_grad)
    own = vars(out)
    own.update({name: value for name, value in vars(tensor).items() if name not in own})
    return out
