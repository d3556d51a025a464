"""The emitted config in words, so that whoever deploys it knows what it does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dustin_profile.reporting.blocks import Block, Bullets, Code, Content, Figure, Figures, Heading
from dustin_profile.reporting.charts import columns, curve, stacked
from dustin_profile.reporting.documents.search import Latency, SearchResults
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sections.throughput import front_table, rests_on, steps_table
from dustin_profile.reporting.sources import Evidence, Source
from dustin_profile.reporting.titles import pair_of, slug, titles
from dustin_profile.reporting.wording import count, listed, percent
from dustin_runtime.config import DustinConfig, Selection
from dustin_runtime.validation import dump_yaml

Described = Source[SearchResults] | Source[DustinConfig]


def build(evidence: Evidence) -> Content | None:
    searches, configs = evidence.of(SearchResults), evidence.of(DustinConfig)
    described: list[Described] = [*searches]
    described += [config for config in configs if not any(_same(config, search) for search in searches)]
    timed = evidence.of(Latency)
    if not described and not timed:
        return None
    blocks: list[Block] = []
    for number, (source, title) in enumerate(zip(described, titles(described), strict=True)):
        yaml = next((config for config in configs if _same(config, source)), None)
        blocks.append(Heading(title))
        blocks.append(_words(source, yaml))
        if isinstance(source.data, SearchResults):
            suffix = slug(number, len(described))
            blocks.append(Figures([_spent(source.data.selection, suffix, title)]))
            blocks.append(Figures(_figures(source.data, suffix, title)))
            if source.data.throughput:
                blocks.append(front_table(source.data.throughput, title))
                under = [one for one in timed if one.run == source.run and rests_on(source.data.throughput, one.data)]
                timed = [one for one in timed if one not in under]
                blocks += [steps_table(one.data, title) for one in under]
        if yaml:
            blocks.append(Code(_served(yaml.data), f"What the runtime reads of {yaml.name}"))
            blocks.append(Code(f"dustin-run generate --config {yaml.name} --file PROMPT.txt"))
    blocks += [steps_table(one.data, one.name) for one in timed]
    return Content(
        "What verification does at every step under the emitted config, and how much its choices matter.", blocks
    )


def _same(config: Source[DustinConfig], other: Described) -> bool:
    """Whether both say the same; what only one of them says is of another version."""
    ours, theirs = config.data.selection, other.data.selection
    fields = ours.model_fields_set & theirs.model_fields_set
    return pair_of(config.data) == pair_of(other.data) and (
        ours.model_dump(include=fields) == theirs.model_dump(include=fields)
    )


def _words(source: Described, yaml: Source[DustinConfig] | None) -> Bullets:
    data = source.data
    chosen, depth = data.selection, data.depth
    history = chosen.budget - chosen.m - chosen.sink - chosen.window
    of = ""
    if isinstance(data, SearchResults):
        of = f" ({percent(chosen.budget / data.traces.context)} of the {count(data.traces.context)} it was tuned on)"
    layers = listed([str(entry.layer) for entry in chosen.lookahead])
    heads = ", ".join(map(str, chosen.history.heads))
    words = [
        f"The draft proposes {depth} tokens; the target verifies them in one pass, reading {count(chosen.budget)}"
        f" tokens of what came before{of} and the {depth + 1} new ones. Nothing is evicted: the choice is made anew at"
        " every step.",
        f"The first {chosen.sink} and the last {chosen.window} tokens.",
        f"{chosen.m} of them: what the draft attends to while it drafts, in its layers {layers},"
        f" {len(chosen.lookahead[0].heads)} heads each."
        if chosen.m and chosen.lookahead
        else "Nothing: this is Dustin-T.",
        f"{history} of them: what the target attended to last, in its layer {chosen.history.layer}, heads {heads}."
        if history
        else "Nothing: this is Dustin-D.",
    ]
    leads = ["Each step.", "Always read.", "Lookahead.", "History."]
    if isinstance(data, SearchResults):
        leads.append("The split is not sharp.")
        words.append(_about_m(data))
    if yaml:
        full = yaml.data.draft_cache == "full"
        reads = "its whole cache" if full else f"its first and last {yaml.data.draft_budget} tokens"
        leads.append("The draft")
        words.append(f"itself reads {reads}.")
        if yaml.data.rope:
            leads.append("RoPE scaling")
            words.append(f"replaces the models' own: {yaml.data.rope.model_dump(exclude_none=True)}.")
    return Bullets(words, leads)


def _about_m(data: SearchResults) -> str:
    low, high = data.m.flat
    text = f"Any m from {low} to {high} is within 0.001 of the best ARR on the search documents"
    if data.m.interval:
        text += f"; other documents of this kind would choose {data.m.interval[0]} to {data.m.interval[1]} (95 %)"
    return text + f". Found by the sampler {data.m.sampler} in {data.m.trials} trials."


def _served(config: DustinConfig) -> str:
    """The functional part of the YAML; evidence and provenance are the other sections."""
    data = config.model_dump(mode="json", exclude={"evidence", "provenance"})
    return dump_yaml(data).strip()


def _spent(chosen: Selection, suffix: str, title: str) -> Figure:
    return Figure(
        f"config-budget{suffix}",
        f"What the {chosen.budget} tokens are spent on.",
        f"Parts of the budget: {title}",
        partial(stacked, rows=[("", _parts(chosen))], parts=_PARTS, xlabel="prefix tokens read"),
        height=1.45,
    )


def _figures(data: SearchResults, suffix: str, title: str) -> list[Figure]:
    chosen = data.selection
    bounds: tuple[str, ...] = ("oracle", "streaming")
    levels = {name: data.policies[name].in_sample_arr for name in bounds if name in data.policies}
    figures = [
        Figure(
            f"config-m{suffix}",
            "ARR on the search documents by m, the tokens chosen by lookahead (0: Dustin-T, most: Dustin-D); shaded:"
            " within 0.001 of the best.",
            f"ARR over m: {title}",
            partial(
                curve,
                values=data.m.curve,
                chosen=data.m.chosen,
                flat=data.m.flat,
                levels=levels,
                xlabel="m, tokens chosen by lookahead",
                ylabel="ARR",
            ),
        ),
    ]
    if _any(data.layers.target_history_arr):
        figures.append(
            Figure(
                f"config-target-layers{suffix}",
                "ARR of history alone by the target layer that is asked; blue: chosen.",
                f"ARR by target layer: {title}",
                partial(
                    columns,
                    values=data.layers.target_history_arr,
                    chosen=[chosen.history.layer],
                    xlabel="target layer",
                    ylabel="ARR, history alone",
                ),
            )
        )
    if data.layers.draft_rounds_arr and _any(data.layers.draft_rounds_arr[0]):
        figures.append(
            Figure(
                f"config-draft-layers{suffix}",
                "ARR of the hybrid by the first draft layer that is asked; blue: chosen in this and later rounds.",
                f"ARR by draft layer: {title}",
                partial(
                    columns,
                    values=data.layers.draft_rounds_arr[0],
                    chosen=[entry.layer for entry in chosen.lookahead],
                    xlabel="draft layer",
                    ylabel="ARR, hybrid",
                ),
            )
        )
    return figures


def _any(values: Sequence[float | None]) -> bool:
    return any(value is not None for value in values)


_PARTS = {"sink": "first tokens", "lookahead": "lookahead (draft)", "history": "history (target)", "window": "last"}


def _parts(chosen: Selection) -> dict[str, float]:
    history = chosen.budget - chosen.m - chosen.sink - chosen.window
    return {"sink": chosen.sink, "lookahead": chosen.m, "history": history, "window": chosen.window}


SECTION = Section("config", "The config in words", "dustin-profile search", build)
