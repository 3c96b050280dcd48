"""The size of images: pixels of a side where they are square, else ``HEIGHTxWIDTH``."""

from __future__ import annotations

from apportion.errors import ModelError

Size = int | str
MAX_SIDE = 8192  # pixels, of which a few images still fit in memory


def read_size(text: str) -> Size:
    """A size as it is typed; one that is square is its side alone, so that it is the same however it is given.

    Example:
        >>> read_size("96"), read_size("96x96"), read_size("64x96"), read_size("large")
        (96, 96, '64x96', 'large')
    """
    height, _, width = text.partition("x")
    return int(height) if height.isdecimal() and width in ("", height) and text != f"{height}x" else text


def sides_of(size: Size) -> tuple[int, int]:
    """Height and width in pixels.

    Raises:
        ModelError: it is no size, or one of no pixels or too many.

    Example:
        >>> sides_of(96), sides_of("64x96"), sides_of("96")
        ((96, 96), (64, 96), (96, 96))
    """
    given = read_size(str(size))
    sides = given.split("x") if isinstance(given, str) else [str(given)] * 2
    if len(sides) != 2 or not all(side.isdecimal() and 1 <= int(side) <= MAX_SIDE for side in sides):
        raise ModelError(
            f"images of size {size} were asked for; give a --size such as 96 or, height by width, 64x96, "
            f"with sides from 1 to {MAX_SIDE} pixels"
        )
    return int(sides[0]), int(sides[1])


def explain_size(size: Size) -> str:
    """In words."""
    return f"images of {size} pixels" if isinstance(size, str) else f"images of {size} pixels a side"
