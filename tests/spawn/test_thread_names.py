"""Names that the kernel has for threads."""

from __future__ import annotations

import sys
import threading

import pytest

from shmreduce import PlatformError, get_thread_name, set_thread_name
from tests.conftest import PATIENCE


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("reader", "reader"),
        ("", ""),
        ("a name that is too long", "a name that is "),
        ("fourteen chars\u00e9", "fourteen chars"),
        ("\u00e4\u00f6\u00fc", "\u00e4\u00f6\u00fc"),
    ],
)
def test_name_is_kept_as_far_as_it_fits(name: str, kept: str) -> None:
    """The kernel keeps 15 bytes; no character is cut in half."""
    found: list[str] = []

    def look() -> None:
        set_thread_name(name)
        found.append(get_thread_name())

    before = get_thread_name()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join(PATIENCE)
    assert found == [kept]
    assert get_thread_name() == before


def test_systems_without_prctl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the error says what is missing."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(PlatformError) as caught:
        set_thread_name("reader")
    assert caught.value.missing == "prctl"
