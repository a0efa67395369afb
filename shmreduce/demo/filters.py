"""The demo's work: one image in, one filtered image out.

It runs in the pool's workers, and does not use shmreduce: it is what a user would write
for plain :mod:`multiprocessing`. May import extras and NumPy.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shmreduce.extras import import_extra

if TYPE_CHECKING:
    import numpy as np

    Image = np.ndarray[Any, np.dtype[Any]]

__all__ = ["FILTERS", "apply_filter"]


def _gaussian(image: Image) -> Any:
    ndimage = import_extra("scipy.ndimage", extra="cli")
    return ndimage.gaussian_filter(image, sigma=_per_axis(image, 1.5, other=0))


def _median(image: Image) -> Any:
    ndimage = import_extra("scipy.ndimage", extra="cli")
    return ndimage.median_filter(image, size=_per_axis(image, 3, other=1))


def _sobel(image: Image) -> Any:
    import numpy as np

    ndimage = import_extra("scipy.ndimage", extra="cli")
    return np.hypot(ndimage.sobel(image, axis=0), ndimage.sobel(image, axis=1))


FILTERS = {"gaussian": _gaussian, "median": _median, "sobel": _sobel}
"""The filters by name: functions of one image."""


def apply_filter(task: tuple[str, int, Image]) -> tuple[int, Image, float]:
    """Filter one image.

    Parameters
    ----------
    task : tuple
        The filter's name, the image's number, the image.

    Returns
    -------
    tuple
        The image's number, the filtered image, the seconds that filtering took.
    """
    name, number, image = task
    started = time.perf_counter()
    filtered = FILTERS[name](image)
    return number, filtered, time.perf_counter() - started


def _per_axis(image: Image, value: float, *, other: float) -> tuple[float, ...]:
    """Return a filter parameter for each axis: rows and columns, but not channels."""
    return (value, value) + (other,) * (image.ndim - 2)
