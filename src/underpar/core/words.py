"""Numbers in words and units, as people read them: on the terminal and on the page."""

from __future__ import annotations

# Larger values are written in short form, and no chart has room for them.
LARGEST_VALUE = 1e15


def number_text(value: float, num_decimals: int = 4) -> str:
    """A number with thousands separators; huge ones and NaN in short form."""
    is_short = abs(value) <= LARGEST_VALUE
    return f"{value:,.{num_decimals}f}" if is_short else f"{value:.3g}"


def count_text(count: float, noun: str) -> str:
    """A number of things, as in "1 document" and "2 documents"."""
    number = number_text(count, 0)
    return f"{number} {noun}{'' if number == '1' else 's'}"


def bytes_text(value: float) -> str:
    """A number of bytes with its unit."""
    return count_text(value, "byte")


def speed_text(bytes_per_second: float) -> str:
    """A speed in bytes, kilobytes or megabytes per second, whichever fits."""
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if bytes_per_second >= size:
            return f"{number_text(bytes_per_second / size, 1)} {unit}/s"
    return f"{number_text(bytes_per_second, 0)} bytes/s"


def percent_text(share: float) -> str:
    """A share in percent."""
    return f"{number_text(100 * share, 1)} %"


def change_text(ratio: float) -> str:
    """A ratio of sizes in words, as in "5.0 % smaller"."""
    return f"{percent_text(abs(ratio - 1))} {'smaller' if ratio < 1 else 'larger'}"


def against_xz(ratio: float) -> str:
    """The size of a text under the model, as a share of its size under xz, in words."""
    return f"{change_text(ratio)} than xz"


def seconds_text(seconds: float) -> str:
    """A time in milliseconds, seconds, minutes or hours, whichever fits."""
    if 0 < seconds < 0.1:
        return f"{number_text(1000 * seconds, 1)} ms"
    if not 120 <= seconds < LARGEST_VALUE:
        return f"{number_text(seconds, 1)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, short = divmod(minutes, 60)
    return f"{hours:,} h {short:02d} min" if hours else f"{minutes} min {rest:02d} s"


def clock_text(seconds: float) -> str:
    """A time as a clock shows it: 0:42, 12:05, 1:02:03."""
    minutes, rest = divmod(round(min(seconds, LARGEST_VALUE)), 60)
    hours, short = divmod(minutes, 60)
    return f"{hours}:{short:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
