"""Recurrent networks on a GPU: the kernels of cuDNN, which takes one step after another.

For each layer and direction, one product computes the gates of the inputs of all steps. Then each step adds a product
of the hidden state, and a kernel computes its gates. Backward goes the same way from the last step, and ends with the
gradients of the weights, a product over all steps each. cuDNN may run layers beside each other, or keep weights in the
multiprocessors; a forecast does neither. Source: Appleyard et al., "Optimizing Performance of Recurrent Neural Networks
on GPUs" (2016, arXiv 1604.01946).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon._torch_private.modules import precision_of
from echelon._torch_private.tensors import FakeTensor, real_tensors, without_functions
from echelon.foresight.record.here import Recording, name_of, recording_here
from echelon.foresight.record.log.placement import GPU
from echelon.foresight.trace import TF32, Kind

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Products for each unit, by the name of the function."""
_KEPT = {"lstm": 6, "gru": 5, "rnn_tanh": 1, "rnn_relu": 1}
"""Values that backward reads for each step, sequence and unit: gates, cells, and parts of them. An estimate."""
ASSUMPTION = "a recurrent network takes one step after another, and keeps an estimated size for its backward"


class _Network(NamedTuple):
    """Shape of a recurrent network and of its input."""

    name: str
    steps: int
    rows: int
    """Elements of all sequences."""
    width: int
    hidden: int
    num_layers: int
    num_directions: int

    @property
    def gates(self) -> int:
        return GATES[self.name] * self.hidden

    @property
    def batch(self) -> int:
        """Sequences of a step, on average."""
        return math.ceil(self.rows / max(1, self.steps))

    def layers(self) -> Iterator[tuple[int, int]]:
        """Yields the number of each layer, once for each direction, and the width of its input."""
        for layer in range(self.num_layers):
            # A layer reads both directions of the one before.
            width = self.hidden * self.num_directions if layer else self.width
            yield from [(layer, width)] * self.num_directions


def recurrent(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs torch.lstm, torch.gru and others by the kernels of a GPU. Projections take the kernels of the CPU."""
    recording = recording_here()
    if recording is None:
        return func(*args, **kwargs)
    name = func.__name__
    if isinstance(args[3], list | tuple):  # packed sequences
        x, batch_sizes, states, params, has_biases, num_layers, _, _, is_bidirectional = args
        steps, rows, shape = batch_sizes.numel(), x.shape[0], x.shape[:1]
    else:
        x, states, params, has_biases, num_layers, _, _, is_bidirectional, batch_first = args
        steps, rows, shape = x.shape[1 if batch_first else 0], x.shape[0] * x.shape[1], x.shape[:2]
    # An LSTM has cells beside its hidden state.
    states = list(states) if name == "lstm" else [states]
    num_directions = 2 if is_bidirectional else 1
    if len(params) != (4 if has_biases else 2) * num_layers * num_directions:
        recording.log.assume("a recurrent network with projections takes the kernels of a CPU, not those of cuDNN")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LSTM with projections")  # of oneDNN, which is for processors
            return func(*args)
    # Raises an error if some are on the CPU, as for each operator.
    if recording.placement is not None and recording.placement.of_call(name, [x, *states, *params]) not in (None, GPU):
        return with_batch_sizes(func, args, kwargs)
    recording.log.assume(ASSUMPTION)
    # The recorded rank's tensors are on the CPU for torch, and so is its autocast.
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        x, states, params = x.to(low), [each.to(low) for each in states], [each.to(low) for each in params]
    network = _Network(name, steps, rows, x.shape[-1], states[0].shape[-1], num_layers, num_directions)
    given = (network, (*shape, network.hidden * num_directions), len(states), x, *states, *params)
    out: tuple[Tensor, ...] = _Recurrent.apply(*given)  # type: ignore[no-untyped-call]
    return out


def with_batch_sizes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs torch.lstm, torch.gru and others by the kernels of a CPU, which read the sizes of packed sequences."""
    recording = recording_here()
    if recording is None or not isinstance(args[3], list | tuple):
        return func(*args, **kwargs)
    sizes = recording.routing.read(args[1])
    assert sizes is not None  # `pack_padded` has made it
    return func(args[0], sizes, *args[2:], **kwargs)


class _Recurrent(torch.autograd.Function):
    """Recurrent network that keeps its inputs, its outputs and a workspace."""

    @staticmethod
    def forward(
        context: Any, network: _Network, shape: Sequence[int], num_states: int, x: Tensor, *others: Tensor
    ) -> tuple[Tensor, ...]:
        states, params = others[:num_states], others[num_states:]
        out = x.new_empty(shape)
        last = tuple(torch.empty_like(each) for each in states)
        # One workspace for all layers, as cuDNN asks for.
        kept = x.new_empty(_KEPT[network.name] * network.num_layers * out.numel())
        launches = _Launches(network, x)
        per_layer = len(params) // (network.num_layers * network.num_directions)
        for index, (_, width_in) in enumerate(network.layers()):
            weights = params[index * per_layer : (index + 1) * per_layer]
            # Biases are added by the kernel of the gates, which the second call writes.
            launches.product((network.rows, network.gates, width_in), [x, weights[0]], [kept])
            launches.steps((network.batch, network.gates, network.hidden), [weights[1], kept], [kept, out])
        context.network, context.num_states = network, num_states
        context.save_for_backward(x, *others, out, kept)
        return out, *last

    @staticmethod
    def backward(context: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        network = context.network
        x, *others, out, kept = context.saved_tensors
        params = others[context.num_states :]
        needed = zip((x, *others), context.needs_input_grad[3:], strict=True)
        found = [torch.empty_like(each) if is_needed else None for each, is_needed in needed]
        launches = _Launches(network, x)
        # A program may use the outputs, the last states, or both.
        given = [each for each in gradients if each is not None]
        per_layer = len(params) // (network.num_layers * network.num_directions)
        of_params = found[1 + context.num_states :]
        for index, (layer, width_in) in reversed(list(enumerate(network.layers()))):
            weights = params[index * per_layer : (index + 1) * per_layer]
            made = of_params[index * per_layer : (index + 1) * per_layer]
            launches.steps((network.batch, network.hidden, network.gates), [weights[1], kept, *given], [kept])
            # The layer before needs the gradient of its outputs, even if the input of the network needs none.
            if layer or found[0] is not None:
                written = kept if layer else found[0]
                launches.product((network.rows, width_in, network.gates), [kept, weights[0]], [written])
            if made[0] is not None:  # frozen weights have no gradients
                launches.product((network.gates, width_in, network.rows), [kept, x], [made[0]])
                launches.product((network.gates, network.hidden, network.rows), [kept, out], [made[1]])
        return None, None, None, *found


# Packed sequences


def pack_padded(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Packs sequences of known lengths, as `pack_padded_sequence` does. Unknown lengths are assumed to be full."""
    x, lengths, batch_first = args
    recording = recording_here()
    if recording is None or not isinstance(x, FakeTensor):
        return func(*args, **kwargs)
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    if (known := recording.routing.read(lengths)) is None:
        recording.log.assume("sequences are of full length")
        of_each = [steps] * batch
    else:
        with real_tensors():
            of_each = known.tolist()
        _check_lengths(of_each, steps, batch)
    # Sequences come by length, so that the first of them are those that reach a step.
    sizes = [sum(each > step for each in of_each) for step in range(max(of_each))]
    # The kernel copies the rows of each step.
    rows = x.flatten(0, 1)[: sum(of_each)].clone()
    return rows, torch.tensor(sizes)


def _check_lengths(lengths: Sequence[int], steps: int, batch: int) -> None:
    """Raises an error for lengths that torch refuses."""
    if len(lengths) != batch:
        raise RuntimeError(f"pack_padded_sequence takes a length for each of {batch} sequences, and got {len(lengths)}")
    if sorted(lengths, reverse=True) != lengths:
        raise RuntimeError(
            f"pack_padded_sequence got lengths {lengths}, which do not decrease: sort them, or pass "
            "enforce_sorted=False"
        )
    if not 0 < lengths[-1] <= lengths[0] <= steps:
        raise RuntimeError(f"pack_padded_sequence got lengths {lengths} of sequences of {steps} steps")


def pad_packed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pads packed sequences, as `pad_packed_sequence` does."""
    rows, batch_sizes, batch_first, value, total = args
    recording = recording_here()
    if recording is None or not isinstance(rows, FakeTensor):
        return func(*args, **kwargs)
    known = recording.routing.read(batch_sizes)
    assert known is not None  # `pack_padded` has made it
    with real_tensors():
        sizes = known.tolist()
    steps, batch = max(total, len(sizes)), sizes[0]
    # The kernel writes each element once, padding or not.
    missing = steps * batch - rows.shape[0]
    padded = torch.nn.functional.pad(rows, (*[0] * (2 * rows.ndim - 2), 0, missing), value=value)
    padded = padded.view((batch, steps, *rows.shape[1:]) if batch_first else (steps, batch, *rows.shape[1:]))
    return padded, torch.tensor([sum(each > index for each in sizes) for index in range(batch)])


class _Launches:
    """Kernels of one pass, written into the log."""

    def __init__(self, network: _Network, like: Tensor) -> None:
        recording = recording_here()
        assert recording is not None
        self._recording: Recording = recording
        self._num_steps, self._of_network = network.steps, f"{network.name}_gates"
        self._dtype = name_of(like.dtype)
        # By default cuDNN computes float32 by TF32, unlike products outside of networks.
        if self._dtype == "float32" and precision_of("cuda", "rnn") == "tf32":
            self._dtype = TF32

    def product(self, shape: tuple[int, int, int], reads: Sequence[Tensor], writes: Sequence[Tensor | None]) -> None:
        """Writes a product over all steps: rows, columns, terms of a sum."""
        self._launch("mm", "matmul", (1, *shape), 1, reads, writes)

    def steps(self, shape: tuple[int, int, int], reads: Sequence[Tensor], writes: Sequence[Tensor | None]) -> None:
        """Writes a product and a kernel for the gates of each step."""
        self._launch("mm", "matmul", (1, *shape), self._num_steps, reads, writes)
        # Weights are for the product alone.
        self._launch(self._of_network, "other", (), self._num_steps, reads[1:], writes)

    def _launch(
        self,
        name: str,
        kind: Kind,
        shape: tuple[int, ...],
        launches: int,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor | None],
    ) -> None:
        number = self._recording.memory.number
        written = [each for each in writes if each is not None]
        with without_functions():
            of_reads, of_writes = (tuple((number(each), each.nbytes) for each in some) for some in (reads, written))
        self._recording.kernel(
            name,
            kind,
            reads,
            of_reads,
            of_writes,
            dtype=self._dtype,
            flops=2 * math.prod(shape) * launches if shape else 0,
            shape=shape,
            launches=launches,
            is_compiled=False,  # the compiler calls cuDNN, too
        )
