"""Inverse of the short-time Fourier transform by its kernels: torch's own function in C++ reads a value of its result.

Source: `istft` in ATen/native/SpectralOps.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from echelon.foresight.record.here import recording_here
from echelon.foresight.trace import HostWait


def inverse_transform(_: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Computes `torch.istft`, of a spectrum of the shape (..., frequencies, frames)."""
    names = ("input", "n_fft", "hop_length", "win_length", "window", "center", "normalized", "onesided", "length")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    spectrum, size = given["input"], given["n_fft"]
    width = given.get("win_length") or size
    hop = given.get("hop_length") or size // 4
    window = given.get("window")
    if window is None:
        window = torch.ones(width, dtype=spectrum.real.dtype, device=spectrum.device)
    before = (size - width) // 2
    window = F.pad(window, (before, size - width - before)) if width != size else window
    frames = spectrum if spectrum.ndim == 3 else spectrum.unsqueeze(0)
    parts = _inverse(frames.transpose(1, 2), size, given) * window
    num_frames = frames.shape[-1]
    whole = size + hop * (num_frames - 1)
    signal = _overlapped(parts, whole, hop)
    envelope = _overlapped(window.square().expand(1, num_frames, size), whole, hop)
    begin = size // 2 if given.get("center", True) else 0
    length = given.get("length")
    end = begin + length if length is not None else whole - begin if begin else whole
    signal, envelope = (each[:, begin : min(end, whole)] for each in (signal, envelope))
    envelope.abs().min().lt(1e-11)
    if (recording := recording_here()) is not None:  # the host checks that no window leaves a gap
        recording.log.entries.append(HostWait(recording.log.stream, -1, recording.log.place()))
    signal = signal / envelope
    if end > whole:
        signal = F.pad(signal, (0, end - whole))
    return signal if spectrum.ndim == 3 else signal.squeeze(0)


def _inverse(frames: Tensor, size: int, given: dict[str, Any]) -> Tensor:
    norm = "ortho" if given.get("normalized") else "backward"
    frames = frames if given.get("return_complex") else frames[..., : size // 2 + 1]
    transform = torch.fft.ifft if given.get("return_complex") else torch.fft.irfft
    out: Tensor = transform(frames, size, norm=norm)
    return out


def _overlapped(parts: Tensor, length: int, hop: int) -> Tensor:
    """Adds up parts of the shape (batch, parts, width), each `hop` elements after the one before."""
    out: Tensor = torch.ops.aten.unfold_backward(parts, [parts.shape[0], length], 1, parts.shape[-1], hop)
    return out
