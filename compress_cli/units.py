"""Bytes and seconds as people read them."""

from __future__ import annotations

PREFIXES = "kMGT"


def size_text(count: float) -> str:
    """A number of bytes in decimal units: `13.6 MB`."""
    if abs(count) < 1000:
        return f"{count:.0f} B"
    unit = 0
    count /= 1000
    while abs(count) >= 999.95 and unit + 1 < len(PREFIXES):
        count /= 1000
        unit += 1
    return f"{count:.1f} {PREFIXES[unit]}B"


def time_text(seconds: float) -> str:
    """A duration in seconds as `m:ss` or `h:mm:ss`, rounded to the second."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
