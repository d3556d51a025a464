"""Numbers and names as texts, the same on page and in Markdown."""

from __future__ import annotations

from dustin_profile.reporting.blocks import Cell, Tone
from dustin_profile.reporting.documents.common import Estimate

MINUS = "−"
NBSP = "\N{NO-BREAK SPACE}"


def signed(value: float, decimals: int = 3) -> str:
    """`+0.012`, `−0.012`, `0.000`."""
    text = f"{value:+.{decimals}f}"
    return text.replace("-", MINUS) if float(text) else text[1:]


def plain(value: float, decimals: int = 3) -> str:
    return f"{value:.{decimals}f}".replace("-", MINUS)


def percent(share: float) -> str:
    """`6 %`, `12.5 %`, never broken between lines."""
    text = f"{100 * share:.1f}" if share < 0.2 else f"{100 * share:.0f}"
    return f"{text.removesuffix('.0')}{NBSP}%"


def count(value: float) -> str:
    """With thousands apart: `32,000`."""
    return f"{value:,.0f}"


def plural(number: int, word: str) -> str:
    """`1 source`, `2 sources`."""
    return f"{count(number)} {word}{'' if number == 1 else 's'}"


def times(value: float) -> str:
    return f"{value:.2f}×"


def interval(value: Estimate, decimals: int = 3, sign: bool = False) -> str:
    """`[0.703, 0.779]`; empty where one document gives none."""
    if value.low is None or value.high is None:
        return ""
    form = signed if sign else plain
    return f"[{form(value.low, decimals)}, {form(value.high, decimals)}]"


def estimate(value: Estimate, decimals: int = 3, sign: bool = False) -> str:
    """`0.741 [0.703, 0.779]`."""
    form = signed if sign else plain
    return f"{form(value.mean, decimals)} {interval(value, decimals, sign)}".strip()


def cell(value: Estimate, decimals: int = 3, sign: bool = False, tone: Tone = "") -> Cell:
    """The mean with its interval below."""
    form = signed if sign else plain
    return Cell(form(value.mean, decimals), interval(value, decimals, sign), tone)


def difference(value: Estimate, decimals: int = 3, *, judged: bool = True) -> Cell:
    """A difference, coloured only where its interval leaves out zero, and grey where it does not.

    Args:
        judged: whether it speaks for or against something; not so of a distance from a bound.
    """
    tone: Tone = ""
    if judged and value.low is not None and value.high is not None:
        tone = "good" if value.low > 0 else "bad" if value.high < 0 else "muted"
    return cell(value, decimals, sign=True, tone=tone)


def certain(value: Estimate) -> bool:
    """Whether the interval leaves out zero."""
    return value.low is not None and value.high is not None and (value.low > 0 or value.high < 0)


def model(name: str) -> str:
    """A model's id without the suffix of its file."""
    return name.removesuffix(".gguf")


def pair(target: str, draft: str) -> str:
    return f"{model(target)} with {model(draft)}"


def listed(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else "".join(words)
