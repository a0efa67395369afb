"""Each object of a list is reduced by itself, though who reduces its class is found once."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import pytest

from shmreduce import Message, Reducer, ReducerError, pickling, unpickling
from tests.conftest import registered

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("shmreduce_no_leaks")


class Mark:
    """Says how it arrived."""

    def __init__(self, way: str = "ordinary") -> None:
        self.way = way


class MarkReducer(Reducer):
    """Gives the answers that it was told to give, one after the other."""

    types = (Mark,)

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.seen: list[Any] = []

    def reduce(self, obj: Any, message: Message) -> Any:
        assert message.allocate(1000) is not None
        self.seen.append(obj)
        return self.answers.pop(0)


@pytest.fixture
def reducer() -> Iterator[MarkReducer]:
    with registered(MarkReducer()) as found:
        yield found


REDUCED = Mark, ("reducer",)


def ways(obj: Any) -> list[str]:
    """Send to this very process; return how each of a list arrived."""
    data, message = pickling.dumps(obj)
    if message is not None:
        # Nobody takes its blocks over.
        message.rollback()
    return [each.way for each in unpickling.loads(data)]


def test_each_is_asked_for(reducer: MarkReducer) -> None:
    """The answer for one is not that for the next; NotImplemented is for one object only."""
    sent = [Mark() for _ in range(5)]
    reducer.answers = [NotImplemented, REDUCED, NotImplemented, REDUCED, REDUCED]
    assert ways(sent) == ["ordinary", "reducer", "ordinary", "reducer", "reducer"]
    assert reducer.seen == sent


@pytest.mark.parametrize("answers", [[3], [REDUCED, 3], [REDUCED, NotImplemented, REDUCED, 3]])
def test_nonsense_is_named_wherever_it_comes(reducer: MarkReducer, answers: list[Any]) -> None:
    """Also for an object whose like were reduced before; the message's memory is given back."""
    reducer.answers = list(answers)
    with pytest.raises(ReducerError, match=r"MarkReducer.*returned int") as caught:
        pickling.dumps([Mark() for _ in answers])
    assert caught.value.type_name == f"{__name__}.Mark"


def test_a_registered_function_outranks_it_for_all(
    reducer: MarkReducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ForkingPickler.register`` holds for each object of the class."""
    extra: Any = vars(ForkingPickler)["_extra_reducers"]
    monkeypatch.setitem(extra, Mark, lambda _: (Mark, ("registered",)))
    assert ways([Mark() for _ in range(3)]) == ["registered"] * 3
    assert reducer.seen == []
