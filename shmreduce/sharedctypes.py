"""The module :mod:`multiprocessing.sharedctypes`, to be imported from this package.

May import the standard library only.

It is that module itself, not a copy of its names: an attribute that is changed in one
is changed in the other.
"""

from __future__ import annotations

import sys
from multiprocessing import sharedctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import *  # noqa: F403 - its names, whatever they are

# The import system returns what is in sys.modules when the import has ended.
sys.modules[__name__] = sharedctypes
