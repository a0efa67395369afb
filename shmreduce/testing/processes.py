"""A child process that answers questions; every wait is bounded.

May import the standard library and pytest.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from typing import TYPE_CHECKING, Any, Self

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from types import TracebackType

__all__ = ["OtherProcess"]


class OtherProcess:
    """A child process that calls functions for a test, one after another.

    It is a context manager. At the end of the block the child ends; if it does not, it
    is killed and the test fails.

    Parameters
    ----------
    start_method : {"fork", "forkserver", "spawn"}
        How to start the child.
    patience : float
        Seconds to wait for an answer, or for the end of the child.

    Attributes
    ----------
    process : multiprocessing.Process
        The child.

    Examples
    --------
    >>> import os
    >>> with OtherProcess("fork") as other:
    ...     there = other.ask(os.getpid)
    >>> there == os.getpid()
    False
    """

    def __init__(self, start_method: str, patience: float = 30.0) -> None:
        context: Any = multiprocessing.get_context(start_method)
        self._patience = patience
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_answer, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what ``function(*arguments)`` returns there, or raise what it raises.

        The question travels as one message, and so does the answer.

        Parameters
        ----------
        function : callable
            A function that the child can import by name. Its result must be picklable.
        *arguments
            Its arguments. They stay the caller's.

        Raises
        ------
        Exception
            The one that the function raised.
        pytest.fail.Exception
            If the child does not answer in time, or has died. In the first case it is killed:
            its answer, if it came later, would be taken for that to the next question.
        """
        try:
            self._connection.send((function, arguments))
            if not self._connection.poll(self._patience):
                self.kill()
                pytest.fail(
                    f"the child process did not answer within {self._patience} s, and was killed"
                )
            succeeded, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(self._patience)
            pytest.fail(f"the child process died with exit code {self.process.exitcode}")
        if not succeeded:
            raise answer
        return answer

    def kill(self) -> None:
        """Kill the child by SIGKILL and wait for its end."""
        self.process.kill()
        self.process.join(self._patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A message, since closing our end is not enough: a forked child has a copy of it.
        with contextlib.suppress(BrokenPipeError):
            self._connection.send(None)
        self._connection.close()
        self.process.join(self._patience)
        lingers = self.process.is_alive()
        if lingers:
            self.kill()
        self.process.close()
        if lingers and error is None:
            pytest.fail(f"the child process did not end within {self._patience} s")


def _answer(connection: Connection) -> None:
    while True:
        question = connection.recv()
        if question is None:
            return
        function, arguments = question
        try:
            answer = (True, function(*arguments))
        except Exception as error:
            answer = (False, error)
        connection.send(answer)
        # Do not keep the objects until the next question.
        del question, function, arguments, answer
