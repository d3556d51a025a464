"""An ARR evaluation as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dustin_profile.evaluation.arr.layers import DISTANCE_RULES, LAYER_ORACLE, LAYER_POLICIES
from dustin_profile.evaluation.arr.policies import ORACLE
from dustin_profile.report import table, with_interval

Result = Mapping[str, Any]

BUDGET_HEADER = ["k", "policy", "tokens read", "ARR (95 %)", "prefix ARR", "oracle minus it (95 %)"]
SPLIT_HEADER = [
    *("documents of", "n", "T (m = 0)", "D (largest m)", "H", "best m, flat from … to", "H minus T (95 %)"),
    *("H minus D (95 %)", "best of T, D, H", "best m of the group", "best of T, D, H per window", "best m per window"),
]


def budget_rows(result: Result) -> list[list[str]]:
    """A row per budget and policy, the best of a budget first."""
    order = sorted(result["budgets"], key=lambda entry: (-entry["budget"], -entry["arr"]["mean"]))
    return [
        [
            str(entry["budget"]),
            entry["policy"],
            f"{entry['read']:.0f}",
            with_interval(entry["arr"]),
            f"{entry['prefix_arr']['mean']:.4f}",
            with_interval(entry["below_oracle"], sign=True) if entry["below_oracle"] else "",
        ]
        for entry in order
    ]


def split_rows(result: Result) -> list[list[str]]:
    """A row per kind of document, all documents last."""
    found = []
    for entry in result["splits"]:
        mean = {name: f"{value['mean']:.4f}" for name, value in entry["arr"].items()}
        behind = {name: _negated(value) for name, value in entry["minus_dustin"].items()}
        found.append(
            [
                entry["group"],
                str(entry["documents"]),
                mean["dustin-t"],
                mean["dustin-d"],
                mean["dustin"],
                f"{entry['best_m']}, {entry['flat'][0]} … {entry['flat'][1]}",
                with_interval(behind["dustin-t"], sign=True),
                with_interval(behind["dustin-d"], sign=True),
                f"{mean['best_of_three']} ({entry['best_of_three']})",
                mean["best_m"],
                mean["best_of_three_per_window"],
                mean["best_m_per_window"],
            ]
        )
    return found


def _negated(value: Mapping[str, Any]) -> dict[str, Any]:
    """The interval of the opposite difference."""
    ends = {end: None if value[other] is None else -value[other] for end, other in (("low", "high"), ("high", "low"))}
    return {"mean": -value["mean"], **ends}


def layer_rows(result: Result) -> list[list[str]]:
    """A row per target layer."""
    layers = result["layers"]
    return [
        [str(layer), *(f"{layers[name][layer]['mean']:.4f}" for name in LAYER_POLICIES)]
        for layer in range(len(layers[LAYER_ORACLE]))
    ]


def distance_rows(result: Result) -> list[list[str]]:
    """A row per rule and distance, a column per budget: what is lost to the oracle."""
    entries = result["distances"]
    found: dict[tuple[str, int], list[str]] = {}
    for entry in entries:
        cell = with_interval(entry["below_oracle"], sign=True)
        found.setdefault((entry["rule"], entry["distance"]), []).append(cell)
    order = sorted(found, key=lambda cell: (list(DISTANCE_RULES).index(cell[0]), cell[1]))
    return [[rule, str(distance), *found[rule, distance]] for rule, distance in order]


def markdown(result: Result) -> str:
    """The whole evaluation for people."""
    pair, selection, documents = result["pair"], result["selection"], result["documents"]
    data = ", ".join(f"{traces['data']} ({traces['context']} tokens, {traces['dtype']})" for traces in result["traces"])
    groups = len({entry["group"] for entry in documents.values()})
    all_row = result["splits"][-1]
    gain = all_row["minus_dustin"]["best_m_per_window"]
    lines = [
        f"# ARR: {pair['target']['id']} with {pair['draft']['id']}",
        "",
        f"{len(documents)} {'held-out' if result['split'] == 'held-out' else 'searched and held-out'} documents of "
        f"{groups} kinds, {sum(entry['windows'] for entry in documents.values())} windows of {data}; config: "
        f"k = {selection['budget']}, m = {selection['m']}, depth {result['depth']}, history of target layer "
        f"{selection['history']['layer']}, lookahead of draft layers "
        f"{', '.join(str(entry['layer']) for entry in selection['lookahead'])}. "
        f"Intervals are over documents ({all_row['arr']['dustin']['method']}), differences paired.",
        "",
        "## By budget",
        "",
        *table(BUDGET_HEADER, budget_rows(result)),
        "",
        *(f"* `{name}`: {about}." for name, about in result["policies"].items()),
        "",
        "m keeps its share of the budget. Methods that ask other heads, keep a memory or choose in each layer are not",
        "in traces: `eval fidelity` measures them.",
        "",
        "![ARR by budget](budgets.png)",
        "",
        "![lookahead and the oracle](lookahead.png)",
        "",
        f"## By m, at k = {selection['budget']}",
        "",
        *table(SPLIT_HEADER, split_rows(result)),
        "",
        "The last four columns choose with the truth at hand: what a perfect chooser would reach on these documents.",
        f"Choosing m anew in every window could add {with_interval(gain, sign=True)} to the configured m.",
        "",
        "![ARR by m](splits.png)",
    ]
    if result["layers"]:
        lines += [
            "",
            f"## By target layer, at k = {selection['budget']}",
            "",
            *table(["layer", *LAYER_POLICIES], layer_rows(result)),
            "",
            *(f"* `{name}`: {about}." for name, about in LAYER_POLICIES.items()),
            "",
            "![ARR by layer](layers.png)",
        ]
    if result["distances"]:
        columns = dict.fromkeys(str(entry["budget"]) for entry in result["distances"])
        lines += [
            "",
            "## By distance of history: ARR of the oracle minus it (95 %)",
            "",
            *table(["rule", "distance", *(f"k = {k}" for k in columns)], distance_rows(result)),
            "",
            *(f"* `{name}`: {about}." for name, about in DISTANCE_RULES.items()),
            "",
            "![ARR by distance](distances.png)",
        ]
    names = ", ".join(f"{name} {version}" for name, version in result["provenance"]["versions"].items())
    again = f" Layers and distances: {result['forced_pass']['device']}." if result["layers"] else ""
    return "\n".join([*lines, "", f"Versions: {names}.{again}"]) + "\n"


def headline(result: Result) -> list[list[str]]:
    """The rows of the config's own budget, for the terminal; of the nearest where it was not asked for."""
    budgets: Sequence[int] = [entry["budget"] for entry in result["budgets"] if entry["policy"] == ORACLE]
    near = min(budgets, key=lambda k: abs(k - result["selection"]["budget"]))
    return [row for row in budget_rows(result) if row[0] == str(near)]
