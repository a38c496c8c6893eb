"""The parameters of a module as they were when a wrapper began to watch them."""

from __future__ import annotations

import torch
from torch.utils.hooks import RemovableHandle


class Watched:
    """What there was to watch, to compare with what there is, and the hooks that watch it."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Looks at the parameters that there are now."""
        self._module = module
        self.named = list(module.named_parameters())
        self.trainable = [(name, parameter) for name, parameter in self.named if parameter.requires_grad]
        self._requires_grad = [parameter.requires_grad for _, parameter in self.named]
        self.handles: list[RemovableHandle] = []
        """Of the hooks."""

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, frozen ones too."""
        return [parameter for _, parameter in self.named]

    def is_current(self) -> bool:
        """Says whether these are the module's parameters still, and the same of them are trained."""
        now = list(self._module.parameters())
        return len(now) == len(self.named) and all(
            parameter is known and parameter.requires_grad == trainable
            for parameter, (_, known), trainable in zip(now, self.named, self._requires_grad, strict=True)
        )

    def beyond(self, earlier: Watched) -> list[torch.nn.Parameter]:
        """Returns the parameters that there were not earlier."""
        known = set(map(id, earlier.parameters))
        return [parameter for parameter in self.parameters if id(parameter) not in known]

    def release(self) -> None:
        """Takes the hooks off."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
