"""A KeyboardInterrupt at a chosen instruction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Interrupter"]


class Interrupter:
    """Raises KeyboardInterrupt at the n-th instruction of some files, once; for ``sys.settrace``.

    Parameters
    ----------
    when : int
        Which instruction, from 1 on.
    *where : str
        Parts of the files' paths.
    """

    def __init__(self, when: int, *where: str) -> None:
        self.left = when
        self.where = where
        self.fired = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Count, and raise."""
        code = frame.f_code
        if code.co_name == "__del__" or not any(part in code.co_filename for part in self.where):
            # What interrupts a finalizer is told of, and ends there.
            return None
        frame.f_trace_opcodes = True
        if event in ("opcode", "call"):
            self.left -= 1
            if self.left == 0:
                self.fired = True
                raise KeyboardInterrupt
        return self
