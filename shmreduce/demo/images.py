"""The demo's input: images that scikit-image ships, or an array from a file.

May import errors, extras and NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmreduce.errors import ConfigurationError
from shmreduce.extras import import_extra

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np

    Image = np.ndarray[Any, np.dtype[Any]]

__all__ = ["IMAGE_NAMES", "load_file", "load_images"]

IMAGE_NAMES = (
    "astronaut",
    "camera",
    "coffee",
    "chelsea",
    "rocket",
    "hubble_deep_field",
    "retina",
    "immunohistochemistry",
    "brick",
    "grass",
    "gravel",
    "moon",
)
"""Images inside scikit-image's wheel: `skimage.data
<https://scikit-image.org/docs/stable/api/skimage.data.html>`_ needs no download for them."""
_FILTERED_AS = {"e": "float32", "g": "float64"}
"""From the code of a type that SciPy's filters do not accept to one that they do."""


def load_images(side: int, names: Sequence[str] = IMAGE_NAMES) -> list[Image]:
    """Return the images by name, enlarged by tiling to ``side`` x ``side`` pixels.

    Parameters
    ----------
    side : int
        Pixels. The shipped images are too small for their transport to matter.
    names : sequence of str
        From :data:`IMAGE_NAMES`.

    Returns
    -------
    list of ndarray
        float32, three channels, values from 0 to 1; the caller's own.

    Raises
    ------
    MissingExtraError
        If scikit-image is not installed.
    ConfigurationError
        If there is no memory for them.
    """
    data = import_extra("skimage.data", extra="cli")
    try:
        return [_enlarge(getattr(data, name)(), side) for name in names]
    except (MemoryError, ValueError) as error:
        # NumPy raises ValueError for an array that is too large for any machine.
        raise ConfigurationError(
            f"no memory for {len(names)} images of {side} x {side} pixels: {error}",
            setting="--side",
            value=side,
        ) from error


def load_file(path: Path) -> list[Image]:
    """Return the images in a ``.npy`` file.

    Parameters
    ----------
    path : path
        An array of 3 or more dimensions is a stack of images along its first
        axis; one of 2 dimensions is one image.

    Raises
    ------
    ConfigurationError
        If the file cannot be read as such an array of numbers.

    Notes
    -----
    Numbers of half and extended precision, which SciPy's filters do not accept, are
    converted to the nearest type that they do.
    """
    import numpy as np

    try:
        # Opened here, since NumPy does not close a damaged archive. Pickled objects are
        # refused: a data file must not run code.
        with path.open("rb") as file:
            stack = np.load(file, allow_pickle=False)
    except Exception as error:
        # For a damaged file, NumPy raises whatever its parsers raise (tokenize.TokenError for
        # a header, errors of zipfile), or asks for far too much memory.
        raise _bad_input(path, f"{error}") from error
    if not isinstance(stack, np.ndarray):
        raise _bad_input(path, "it holds several arrays, save one with numpy.save")
    if stack.dtype.kind not in "biuf":
        raise _bad_input(path, f"its dtype is {stack.dtype}, not a real number")
    if stack.ndim < 2 or stack.size == 0:
        raise _bad_input(path, f"its shape is {stack.shape}, not that of an image or a stack")
    if stack.dtype.char in _FILTERED_AS:
        stack = stack.astype(_FILTERED_AS[stack.dtype.char])
    if stack.ndim == 2:
        return [stack]
    return [image.copy() for image in stack]


def _enlarge(image: Image, side: int) -> Image:
    import numpy as np

    coloured = image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2)
    rows, columns = (-(-side // length) for length in coloured.shape[:2])
    tiled = np.tile(coloured[:, :, :3], (rows, columns, 1))[:side, :side]
    return np.ascontiguousarray(tiled, dtype=np.float32) / np.float32(255)


def _bad_input(path: Path, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"cannot use {path} as the demo's input: {reason}", setting="--input", value=str(path)
    )
