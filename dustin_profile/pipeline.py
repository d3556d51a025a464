"""The stages of a run in order. Each command runs those it needs; what is done already is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from dustin_profile.choices import Mode
from dustin_profile.progress import say
from dustin_profile.rundir import check_stage
from dustin_profile.settings import PairChoice, Settings, default_rows, steps_to_time
from dustin_profile.srh.stage import HeadPrompts, find_heads, head_inputs, read_heads, summarise
from dustin_profile.traces.collect import Heads
from dustin_profile.traces.stage import calibration, collect_traces, evaluation_heads, trace_inputs
from dustin_profile.traces.store import TraceStore
from dustin_runtime.errors import MissingError, UsageError
from dustin_runtime.files import read_json, write_json
from dustin_runtime.loading import Pair, open_pair, pick_device, pick_dtype
from dustin_runtime.parallel.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from dustin_profile.data import Calibration
    from dustin_profile.latency.stage import Latency, Serving
    from dustin_profile.search.stage import Found
    from dustin_profile.search.stopping import Decision
    from dustin_profile.traces.windowed import Windowed
    from dustin_runtime.models.decoder import Decoder


class Pipeline:
    """One run: models are loaded when a stage first needs them.

    Args:
        ranks: the processes that share its prompts and documents, each with a device of its own. Each has the whole
            pair, or a team of them one target (and `self:N`) in parts, and the whole draft on each. The first alone
            does what needs the results of all.
    """

    def __init__(self, settings: Settings, choice: PairChoice, ranks: Ranks = ALONE) -> None:
        self.settings = settings
        self.choice = choice
        self.ranks = ranks
        self.run_dir = settings.run_dir
        self.device = pick_device(ranks.device(settings.models.device))
        self.dtype = pick_dtype(settings.models.dtype, self.device)
        self.rows = settings.heads.rows or default_rows(self.device)

    @cached_property
    def pair(self) -> Pair:
        models = self.settings.models
        pair = open_pair(self.choice.target, self.choice.draft, rope=models.rope, offline=models.offline)
        self.ranks.share_in_team(pair.target_shape)  # refuses what cannot be split
        return pair

    @cached_property
    def target(self) -> Decoder:
        say(f"loading target {self.pair.target_id}")
        over = self.ranks.team_collectives(self.device)
        with self.ranks.alike(loading=True):  # a draft may borrow what others of a team hold
            return self.pair.load_target(self.dtype, self.device, over)

    @cached_property
    def draft(self) -> Decoder:
        say(f"loading draft {self.pair.draft_id}")
        return self.pair.load_draft(self.target)

    @cached_property
    def prompts(self) -> Calibration:
        return calibration(self.pair, self.settings.data, self.settings.models.offline)

    @cached_property
    def head_prompts(self) -> HeadPrompts:
        return HeadPrompts(self.pair, self.settings.heads)

    def heads(self) -> tuple[Path, Path]:
        """Find the heads of target and draft; returns their files."""
        self._refuse_conflicts()
        return self._heads()

    def _heads(self) -> tuple[Path, Path]:
        settings, prompts = self.settings.heads, self.head_prompts
        models: dict[str, Callable[[], Decoder]] = {"target": lambda: self.target, "draft": lambda: self.draft}
        found = []
        for side, mode, ranks in self._sides():
            model = models[side]
            with self._timed(f"heads_{side}", self.ranks):
                path = find_heads(
                    self.run_dir / "srh",
                    self.pair,
                    model,
                    self.dtype,
                    side,
                    mode,
                    settings,
                    prompts,
                    self.settings.overwrite,
                    ranks,
                    self._head_rows(mode),
                )
            self.ranks.once(partial(_show, path))
            found.append(path)
        return found[0], found[1]

    def _sides(self) -> tuple[tuple[str, Mode, Ranks], ...]:
        """Each rank has the whole draft, unless that is a part of the target."""
        settings, of_draft = self.settings.heads, self.ranks.in_teams(1) if self.pair.draft_source else self.ranks
        return ("target", settings.mode, self.ranks), ("draft", settings.draft_mode, of_draft)

    def _head_rows(self, mode: Mode) -> int:
        return self.rows if mode == "generate" else 1

    def traces(self) -> tuple[TraceStore, dict[str, Heads]]:
        """Find heads where needed, then collect traces."""
        self._refuse_conflicts(traced=True)
        return self._traces()

    def _traces(self) -> tuple[TraceStore, dict[str, Heads]]:
        data, prompts = self.settings.data, self.prompts
        target_heads, draft_heads = (read_heads(path) for path in self._heads())
        heads: dict[str, Heads] = {
            "history": target_heads,
            "evaluation": evaluation_heads(self.pair, data, target_heads),
            "lookahead": draft_heads,
        }
        with self._timed("traces", self.ranks):
            store = collect_traces(
                self.run_dir / "traces",
                self.pair,
                lambda: (self.target, self.draft),
                self.dtype,
                self.rows,
                data,
                self.choice.depth,
                prompts,
                heads,
                self.settings.overwrite,
                self.ranks,
                self._decision() if data.stop_when_decided else None,
            )
        return store, heads

    def _decision(self) -> Decision:
        """When documents suffice for the search that these settings ask for, or by default."""
        from dustin_profile.search.stage import search_options
        from dustin_profile.search.stopping import Decision

        data, chosen = self.settings.data, self.settings.search
        chosen = replace(chosen, draft_layers=min(chosen.draft_layers, self.pair.draft_shape.layers))
        options = search_options(chosen, self.choice.budget)
        return Decision(options, chosen.held_out, data.decided_within, data.least_documents, self.device)

    def search(self) -> Found | None:
        """Everything up to the emitted config; None on other ranks than the first, which end before the search."""
        from dustin_profile.search.stage import Timed, run_search
        from dustin_profile.search.tau import agreement

        with self.ranks.alike(loading=True):
            asked, layers = self.settings.search.draft_layers, self.pair.draft_shape.layers
            if asked > layers:
                raise UsageError(f"--draft-layers {asked}: the draft has {layers}; give 1 to {layers}")
            if self.settings.objective.objective == "throughput":
                self._check_team()
                self._check_room()
        self._refuse_conflicts(traced=True, searched=True)
        store, heads = self._traces()
        if self.ranks.rank:
            return None
        timed = None
        if self.settings.objective.objective == "throughput":
            agreement(store, 0)  # before steps are timed
            timed = Timed(self.latency(), self._serving().steps, self._windowed(store))
        with self._timed("search", ALONE):
            return run_search(
                self.run_dir,
                self.pair,
                store,
                heads,
                self.settings,
                depth=self.choice.depth,
                budget=self.choice.budget,
                device=self.device,
                seconds=self._seconds(),
                timed=timed,
            )

    def _refuse_conflicts(self, traced: bool = False, searched: bool = False) -> None:
        """Refuse before any work what stages would refuse when they are reached: that they were made from other inputs.

        What rests on the results of an earlier stage cannot be compared yet.

        Raises:
            ConflictError: as the stage says it.
        """
        with self.ranks.alike(loading=True):  # what is wrong with documents and prompts shows at once, too
            if traced:
                _ = self.prompts
            _ = self.head_prompts
            self.pair.provenance()  # hashed by all at the same time
        self.ranks.once(partial(self._check_stages, traced, searched))

    def _check_stages(self, traced: bool, searched: bool) -> None:
        from dustin_profile.search.stage import search_inputs, timed_inputs
        from dustin_profile.traces.windowed import windowed_inputs

        pair, settings, run_dir, overwrite = self.pair, self.settings, self.run_dir, self.settings.overwrite
        for side, mode, ranks in self._sides():
            rows = self._head_rows(mode)
            scored = head_inputs(pair, self.dtype, side, mode, settings.heads, self.head_prompts, rows, ranks.team)
            check_stage(run_dir / "srh" / side, scored, overwrite)
        if traced:
            dtype, team = str(self.dtype).removeprefix("torch."), self.ranks.team
            made = trace_inputs(pair, settings.data, self.choice.depth, self.prompts, dtype, {}, self.rows, team)
            check_stage(run_dir / "traces", made, overwrite, unknown=("heads",))
        if not searched:
            return
        steps = None
        if settings.objective.objective == "throughput":
            serving, measured = self._serving(), self._earlier()
            if settings.objective.draft_cache != "full":
                windowed = windowed_inputs("", serving.steps.budgets)
                check_stage(run_dir / "windowed", windowed, overwrite, unknown=("traces",))
            steps = timed_inputs(serving.steps, measured.sha256 if measured else "to be measured")
        inputs = search_inputs(settings, self.choice.budget, "", steps)
        check_stage(run_dir / "search", inputs, overwrite, unknown=("traces",))

    def latency(self, here: bool = False) -> Latency:
        """Time the steps that a search for throughput may choose among, where that is not done yet.

        Args:
            here: whether it has to be done on this device.
        """
        from dustin_profile.latency.stage import measured

        self._check_room(here)
        with self._timed("latency", ALONE):
            return measured(
                self.run_dir,
                self.pair,
                lambda: (self.target, self.draft),
                self._serving(),
                self.dtype,
                self.device,
                self.settings.overwrite,
                here,
            )

    def _windowed(self, store: TraceStore) -> Windowed | None:
        """What a draft that keeps its first and last tokens proposes, if it may be chosen."""
        if self.settings.objective.draft_cache == "full":
            return None
        from dustin_profile.traces.windowed import windowed_agreement

        budgets = self._serving().steps.budgets
        with self._timed("windowed", ALONE):
            return windowed_agreement(
                self.run_dir / "windowed",
                store,
                self.prompts,
                lambda: self.draft,
                self.pair.shared_vocab,
                budgets,
                self.settings.overwrite,
            )

    def _serving(self) -> Serving:
        from dustin_profile.latency.stage import Serving

        layers = min(self.settings.search.draft_layers, self.pair.draft_shape.layers)
        steps = steps_to_time(self.settings, self.choice)
        return Serving(self.settings.steps.batch, self.settings.data.context, steps, layers)

    def _earlier(self, here: bool = False) -> Latency | None:
        """Steps as they were timed before. Raises ConflictError: others were."""
        from dustin_profile.latency.stage import earlier

        overwrite = self.settings.overwrite
        return earlier(self.run_dir, self.pair, self._serving(), self.dtype, self.device, overwrite, here)

    def _check_team(self) -> None:
        """Refuse what the first process would have to do with a target of which it has a part. Raises UsageError."""
        team, cache = self.ranks.team, self.settings.objective.draft_cache
        if team > 1 and cache != "full":
            raise UsageError(
                f"--draft-cache {cache}: one process alone tries it; give full with --tensor-parallel {team}"
            )
        if team > 1 and not self._earlier():
            raise UsageError(
                f"--tensor-parallel {team}: steps of a target that is split are not timed; put the latency.json that "
                f"dustin-profile latency makes of the same options into {self.run_dir}, or give --objective arr"
            )

    def _check_room(self, here: bool = False) -> None:
        """Refuse early what cannot be timed, unless it is timed already."""
        from dustin_profile.latency.stage import check_room

        if not self._earlier(here):
            check_room(self.pair, self._serving(), self.dtype, self.device)

    @contextmanager
    def _timed(self, stage: str, ranks: Ranks) -> Iterator[None]:
        """Add a stage's time to what earlier, interrupted runs spent on it."""
        began = time.perf_counter()

        def keep() -> None:
            seconds = self._seconds()
            seconds[stage] = round(seconds.get(stage, 0.0) + time.perf_counter() - began, 3)
            write_json(self.run_dir / "seconds.json", seconds)

        try:
            yield
        except BaseException:
            if not ranks.rank:
                keep()
            raise
        ranks.once(keep)

    def _seconds(self) -> dict[str, float]:
        try:
            found: dict[str, float] = read_json(self.run_dir / "seconds.json")
            return found
        except MissingError:
            return {}


def _show(path: Path) -> None:
    draw_heads(path)
    summarise(path)


def draw_heads(path: Path) -> None:
    """Draw a heads file next to it."""
    from dustin_profile.plots import heads_heatmap

    data = read_json(path)
    title = f"retrieval heads of {data['inputs']['model']['id']} ({data['inputs']['mode']}, {data['credit']})"
    heads_heatmap(path.with_suffix(".png"), data["scores"], data["ranking"], title)
