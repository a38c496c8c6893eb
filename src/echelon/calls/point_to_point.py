"""Messages between two ranks of a group."""

from __future__ import annotations

from torch import Tensor

from echelon.backends.base import Work
from echelon.calls.member import Member, Seconds
from echelon.errors import Timeout


class PointToPoint(Member):
    """What one rank says to another; the two need call nothing else in the same order."""

    def send(self, tensor: Tensor, dst: int, tag: int = 0, timeout: Seconds = None) -> None:
        """Sends a tensor to rank `dst`; returns when `tensor` may be changed again, not when it was received."""
        with self.backend.attend():
            self.isend(tensor, dst, tag).wait(self.timeout if timeout is None else timeout)

    def recv(self, src: int, tag: int = 0, out: Tensor | None = None, timeout: Seconds = None) -> Tensor:
        """Returns the next tensor that rank `src` sends with this tag; its shape and dtype travel along.

        Args:
            src: the sender.
            tag: 0 to 2**32 - 1.
            out: written and returned; None: a new tensor.
            timeout: seconds. After a Timeout `out` will not be written any more.

        Raises:
            SizeMismatch: the tensor does not fit `out`; it is dropped, and the group stays usable.
        """
        with self.backend.attend():
            work = self.irecv(src, tag, out)
            try:
                return work.wait(self.timeout if timeout is None else timeout)
            except Timeout:
                self.backend.cancel(work)
                raise

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work[None]:
        """Starts to send a tensor to rank `dst`; it must not change until the Work is done."""
        self._check(tensor, "send")
        return self.backend.isend(tensor.detach().contiguous(), self._peer(dst, "dst"), self._tag(tag))

    def irecv(self, src: int, tag: int = 0, out: Tensor | None = None) -> Work[Tensor]:
        """Starts to receive a tensor from rank `src`; the Work's result is the tensor. `out` must be contiguous."""
        self._check_open()
        return self.backend.irecv(self._peer(src, "src"), self._tag(tag), out=out)
