"""How every method is called and drawn, the same on every figure.

Colours are of the Okabe-Ito palette or near it, told apart with any kind of colour vision; relatives share a colour and
differ by dashes and marker, and every line is labelled where it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Dash = Literal["-", "--", ":", "-."]


@dataclass(frozen=True)
class Style:
    label: str
    colour: str
    marker: str = "o"
    dash: Dash = "-"
    own: bool = False
    """The project's own method: drawn bold."""
    bound: bool = False
    """No method but a bound: it knows the answer."""

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of matplotlib's `plot`."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "ls": self.dash,
            "lw": 2.4 if self.own else 1.2,
            "ms": 5 if self.own else 3.5,
            "zorder": 4 if self.own else 2.5,
        }


BLUE, SKY, ORANGE, GREEN, PINK, AMBER, GREY, INK = (
    *("#0a5c9e", "#3f97d3", "#c8520a", "#00795a", "#b0588e", "#a87000", "#6b7280", "#1f2937"),
)
_STYLES = {
    "dustin": Style("Dustin (hybrid)", BLUE, "o", own=True),
    "dustin-t": Style("Dustin-T (history)", SKY, "v", "--"),
    "dustin-d": Style("Dustin-D (lookahead)", SKY, "^", "-."),
    "dustin-look": Style("Dustin, last look", SKY, "o", own=True),
    "dustin-rest": Style("Dustin, with the rest", BLUE, "D", own=True),
    "dustin-rest-look": Style("Dustin, last look and rest", INK, "p", own=True),
    "dustin-merged": Style("Dustin, merged ranking", BLUE, "*", "-."),
    "oracle": Style("oracle, one list", GREY, "d", "--", bound=True),
    "oracle-by-head": Style("oracle, per head", GREY, "D", ":", bound=True),
    "streaming": Style("StreamingLLM", ORANGE, "s"),
    "streaming-prompt": Style("StreamingLLM, prompt", ORANGE, "x", "--"),
    "snapkv": Style("SnapKV", GREEN, "P"),
    "snapkv-8": Style("SnapKV, window 8", GREEN, "p", "--"),
    "quest": Style("Quest", PINK, "X"),
    "specattn-all": Style("SpecAttn, all heads", AMBER, "h"),
    "quest-query-head": Style("Quest, per query head", PINK, "*", "--"),
    "specattn": Style("SpecAttn", AMBER, "H", "--"),
    "h2o": Style("H2O", "#7c5cbf", "<"),
    "smallkv": Style("SmallKV", "#8c564b", ">"),
    "compresskv": Style("CompressKV", "#4d7c0f", "8"),
    "history-top": Style("history, nothing kept", SKY, "v", ":"),
    "lookahead-top": Style("lookahead, nothing kept", SKY, "^", ":"),
    "lookahead-top-all": Style("lookahead, all layers", GREEN, "^", ":"),
    "history-by-layer": Style("history, per layer", GREEN, "v", "-"),
    "oracle-by-layer": Style("oracle, per layer", GREY, "D", "-.", bound=True),
    "quest, pages of 16": Style("Quest, pages of 16", PINK, "X"),
    "all heads of the draft": Style("all heads of the draft", AMBER, "h"),
    "all heads of both models": Style("all heads of both models", GREEN, "P"),
    "vanilla": Style("vanilla", INK, "s"),
    "sd": Style("classic SD", GREY, "P"),
    "magicdec": Style("MagicDec", AMBER, "D"),
    "triforce": Style("TriForce", AMBER, "d", "--"),
}
_SEARCH_NAMES = {"hybrid": "dustin", "dustin_t": "dustin-t", "dustin_d": "dustin-d"}
"""What the search's table calls them."""
_OTHERS = ("#7c5cbf", "#8c564b", "#4d7c0f", "#be123c", "#0f766e", "#475569")


def canonical(name: str) -> str:
    """A policy's name as methods are called."""
    return _SEARCH_NAMES.get(name, name)


def style(name: str) -> Style:
    """Of a method or policy; one that is not listed here gets a colour by its name, the same in every report."""
    name = canonical(name)
    if name not in _STYLES:
        place = sum(name.encode())
        return Style(name, _OTHERS[place % len(_OTHERS)], "<>*8"[place % 4], ("-", "--", "-.")[place % 3])
    return _STYLES[name]


def label(name: str) -> str:
    return style(name).label
