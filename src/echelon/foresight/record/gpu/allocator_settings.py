"""Settings of PyTorch's allocator of device memory, as a rank's environment has them.

torch reads PYTORCH_CUDA_ALLOC_CONF, or PYTORCH_ALLOC_CONF if there is none (2.13, c10/cuda/CUDAAllocatorConfig.h). The
value has pairs "name:value" with commas between them, whose values may be lists of pairs in brackets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from echelon.wording import in_words

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NOT_MODELLED = ("backend", "max_split_size_mb", "roundup_power2_divisions", "garbage_collection_threshold")
"""Options that change the segments that are reserved. Others are about memory of the host, or about errors."""
_DEFAULTS = {"backend": "native"}


class AllocatorSettings(NamedTuple):
    """Settings of one rank."""

    has_expandable_segments: bool = False
    assumption: str = ""
    """Options that the model of the allocator leaves out. Empty if none is set."""


def allocator_settings(environment: Mapping[str, str]) -> AllocatorSettings:
    """Returns the settings of an environment."""
    variable = next((name for name in _VARIABLES if name in environment), "")
    text = re.sub(r"\s|\[[^]]*\]", "", environment.get(variable, ""))
    # Of an option that is given twice the last one counts, as in torch.
    options = {name: value for name, _, value in (pair.partition(":") for pair in text.split(","))}
    left_out = [name for name in _NOT_MODELLED if name in options and options[name] != _DEFAULTS.get(name)]
    verb = "is" if len(left_out) == 1 else "are"
    assumption = f"{variable}: {in_words(left_out)} {verb} not modelled" if left_out else ""
    return AllocatorSettings(options.get("expandable_segments") == "True", assumption)
