"""Base class of wrappers that look like the wrapped module from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from echelon.errors import UnsupportedOp


class ModuleProxy(torch.nn.Module):
    """Module that delegates to `module`: attributes, state_dict and the names of parameters.

    Once `module` is set, new attributes become the module's, except for attributes that the wrapper already has.
    """

    module: torch.nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self.module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yields the module's parameters under the module's names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the module's buffers under the module's names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yields the module and its submodules under the module's names."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's own state_dict, which the bare module can load."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state_dict of the bare module, on this rank only.

        Load the same on every rank, or call broadcast_parameters() afterwards.

        Raises:
            ValueError: assign=True, which would replace the parameters that have the hooks.
        """
        if assign:
            raise ValueError("assign=True replaces the parameters: load into the module first, then wrap it")
        return self.module.load_state_dict(state_dict, strict)

    def __getattr__(self, name: str) -> Any:
        # Before `module` is set, and for `module` itself, delegation would recurse for ever.
        own = self.__dict__.get("_modules", {})
        if name == "module" or "module" not in own:
            return super().__getattr__(name)
        return getattr(own["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A new value for something that the module reads must reach the module.
        own = name in self.__dict__ or any(name in cls.__dict__ for cls in type(self).__mro__)
        if own or name == "module" or "module" not in self.__dict__.get("_modules", {}):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __getstate__(self) -> Any:
        raise UnsupportedOp("a wrapper belongs to its group and cannot be copied or pickled: take ddp.module instead")
