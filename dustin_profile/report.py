"""Results as tables: one layout for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

NAMES = {
    "oracle": "oracle",
    "hybrid": "hybrid (Dustin-H)",
    "dustin_t": "Dustin-T, history alone",
    "dustin_d": "Dustin-D, lookahead alone",
    "streaming": "StreamingLLM",
}


def rows(results: dict[str, Any]) -> list[list[str]]:
    """The policy table: name, ARR with its interval, prefix ARR, hybrid's gain with its interval, in-sample ARR."""
    table = []
    for name, policy in results["policies"].items():
        gain = results["hybrid_minus"].get(name)
        table.append(
            [
                NAMES.get(name, name),
                with_interval(policy["arr"]),
                f"{policy['prefix_arr']['mean']:.4f}",
                with_interval(gain, sign=True) if gain else "",
                f"{policy['in_sample_arr']:.4f}",
            ]
        )
    return table


HEADER = ["policy", "ARR (95 %)", "prefix ARR", "hybrid minus it (95 %)", "ARR, search documents"]


FRONT_HEADER = [
    "",
    "k",
    "m",
    "draft layers",
    "depth",
    "draft cache",
    "ARR (95 %)",
    "step ms",
    "tokens per step",
    "tokens/s, predicted (95 %)",
]


def front_rows(record: dict[str, Any]) -> list[list[str]]:
    """The candidates that no other one beats in ARR and speed, the fastest first, and the chosen one.

    Args:
        record: `throughput` of the results.
    """
    table = []
    chosen = record["chosen"]
    shown = record["front"] if chosen in record["front"] else [chosen, *record["front"]]
    for index in shown:
        entry = record["candidates"][index]
        speed = with_interval(entry["tokens_per_s"], digits=1)
        table.append(
            [
                "chosen" if index == chosen else "",
                str(entry["budget"]),
                str(entry["m"]),
                ", ".join(map(str, entry["draft_layers"])) or "none",
                str(entry["depth"]),
                entry["draft_cache"],
                with_interval(entry["arr"]),
                f"{entry['step_ms']:.2f}",
                f"{entry['tau']['mean']:.2f}",
                speed,
            ]
        )
    return table


def about_front(record: dict[str, Any]) -> str:
    """What the predictions rest on."""
    rule, window, latency = record["rule"], record["windowed_draft"], record["latency"]
    asked = "within one standard error of the best"
    if rule["choose"] == "least-arr":
        asked = f"at least {rule['least_arr']:g}"
    share = window["least_share_of_tau"]
    pays = f"it pays off if it keeps {share:.1%} of its tokens per step" if share < 1 else "it does not pay off"
    assumed = ""
    if any(entry["assumed_arr"] for entry in record["candidates"]):
        assumed = " ARR of sink+window is assumed to be that of a draft that reads everything."
    return (
        f"The fastest of {len(record['candidates'])} whose ARR on the search documents is {asked}; the table has those"
        " that no other one beats in both. Tokens per step are those of lossless greedy verification: what sparse"
        f" verification changes is left out. Steps: batch {record['batch']}, {record['context']} tokens of synthetic"
        f" context, {latency['device']}, {latency['dtype']}; the model of their time is off by"
        f" {latency['max_relative_error']:.1%} at most on steps that it was not fitted to. ARR is that of the traced"
        f" depth.{assumed} A draft that reads its first and last k tokens would take {window['step_ms']:.2f} instead of"
        f" {window['full_step_ms']:.2f} ms: {pays}."
    )


def with_interval(value: dict[str, Any], sign: bool = False, digits: int = 4) -> str:
    """`0.8312 [0.8170, 0.8441]`; the mean alone where there is no interval."""
    form = f"{'+' if sign else ''}.{digits}f"
    mean = format(value["mean"], form)
    return mean if value["low"] is None else f"{mean} [{format(value['low'], form)}, {format(value['high'], form)}]"


def about_m(m: dict[str, Any]) -> str:
    """How much the chosen m means: where it would go with other documents, and where it hardly matters."""
    highest = m.get("highest", m["chosen"])
    whose = "its ARR" if m["flat"][0] <= m["chosen"] <= m["flat"][1] else f"the highest ARR, that of m = {highest},"
    text = f"; within 0.001 of {whose} from {m['flat'][0]} to {m['flat'][1]}"
    if m["interval"] and whose == "its ARR":
        text += f"; 95 % of resampled documents choose {m['interval'][0]} to {m['interval'][1]}"
    return text


def markdown(results: dict[str, Any]) -> str:
    """The whole result for a pull request or a results folder."""
    traces, chosen, m = results["traces"], results["selection"], results["m"]
    reported = results["documents"]["reported"]
    sources = len({entry["source"] for entry in reported.values()})
    interval = results["policies"]["hybrid"]["arr"]["method"]
    where = "held-out" if results["split"] == "held_out" else "the same"
    lookahead = ", ".join(f"{entry['layer']} {entry['heads']}" for entry in chosen["lookahead"])
    traced = ""
    if (stopping := results.get("stopping")) and stopping["used_documents"] < stopping["asked_documents"]:
        traced = f" Tracing stopped after {stopping['used_documents']} of {stopping['asked_documents']}."
    lines = [
        f"# ARR: {results['pair']['target']['id']} with {results['pair']['draft']['id']}",
        "",
        f"{len(reported)} {where} documents ({sources} sources) of {traces['data']}, "
        f"{traces['context']} tokens each, "
        f"{sum(entry['windows'] for entry in reported.values())} windows; k = {chosen['budget']}, "
        f"depth {results['depth']}, {traces['dtype']}. Intervals are over documents ({interval}).{traced}",
        "",
        *table(HEADER, rows(results)),
        "",
        f"History: target layer {chosen['history']['layer']}, heads {chosen['history']['heads']}. "
        f"Lookahead: draft layers {lookahead}. m = {chosen['m']}{about_m(m)} "
        f"(sampler {m['sampler']}, {m['trials']} trials).",
        "",
        "ARR is the share of full attention that lies on the tokens verification reads, the new ones included; "
        "prefix ARR is that of the prefix alone. Truth: "
        + f"{sum(len(h) for h in traces['heads']['evaluation'].values())} heads of the target.",
    ]
    if guard := results.get("guard"):
        at, errors = guard["estimate"], guard["errors_of"].replace("_", " ")
        lines += [
            "",
            f"Guard: a step's ARR is estimated as {at['intercept']:.3f} {at['history']:+.3f} h {at['lookahead']:+.3f} "
            "l, the shares of the history and of the lookahead score that its list holds; least squares over "
            f"{guard['documents']} documents, error {at['rms']:.4f} (root of the mean square, {errors}), too high by "
            f"more than {at['overestimate']:.4f} in 5 % of windows.",
        ]
    if record := results.get("throughput"):
        lines += ["", "## ARR against speed", "", *table(FRONT_HEADER, front_rows(record)), "", about_front(record)]
        lines += ["", "![ARR against predicted tokens/s](throughput.png)"]
    if provenance := results.get("provenance"):
        packages = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
        lines += ["", f"Device: {provenance['device']}. Versions: {packages}."]
    return "\n".join(lines) + "\n"


def table(header: Sequence[str], cells: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *cells)]
