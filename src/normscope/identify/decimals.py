"""Numbers in few digits: as few as an error allows, and as many as it takes to tell two apart."""

from __future__ import annotations

MOST = 17
"""significant digits that tell any two float64 numbers apart"""


def shortest(value: float, error: float) -> float:
    """The number of fewest decimal digits within a relative error of ``value``.

    >>> shortest(0.5000000000000001, 1e-13), shortest(1 / 3, 1e-4)
    (0.5, 0.3333)
    """
    for digits in range(1, MOST):
        rounded = float(f"{value:.{digits - 1}e}")
        if abs(rounded - value) <= error * abs(value):
            return rounded
    return value


def apart(a: float, b: float) -> tuple[str, str]:
    """Two numbers with the fewest digits, six at least, that tell them apart.

    >>> apart(1e-5, 1.0000002e-5)
    ('1e-05', '1.0000002e-05')
    """
    digits = MOST if a != b else 6
    digits = next((d for d in range(6, MOST) if f"{a:.{d}g}" != f"{b:.{d}g}"), digits)
    return f"{a:.{digits}g}", f"{b:.{digits}g}"
