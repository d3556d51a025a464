"""The gate that this repository's own CI runs on the embedded pair, as a user would in theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dustin_profile.check import check, read_baseline
from dustin_profile.settings import DataSettings, ModelSettings
from dustin_profile.texts import topics
from dustin_runtime.config import load_config
from dustin_runtime.files import digest_text

RESULTS = Path(__file__).parents[2] / "results"
CONFIG, BASELINE = RESULTS / "arr-smollm2.yaml", RESULTS / "arr-smollm2.json"
TOPICS_OF_PYTHON_3_11_7 = "71f2ff5d99bdc1f9c48c5c2353ad138201c5ca1c377e0226857ef8fa89b8bcee"

pytestmark = pytest.mark.skipif(
    digest_text(topics()) != TOPICS_OF_PYTHON_3_11_7,
    reason="the baseline was measured on the reference topics of another Python",
)


def test_arr_of_the_embedded_pair_has_not_fallen() -> None:
    verdict = check(load_config(CONFIG), BASELINE, ModelSettings(offline=True), None, tolerance=0.005)
    assert verdict.passed
    assert abs(verdict.difference) < 0.001
    assert len(verdict.rows) == len(read_baseline(BASELINE)["documents"]["reported"])
    means = {name: now for name, (_, now) in verdict.policies.items()}
    assert means["oracle"] > means["hybrid"] > means["streaming"]


def test_a_perturbed_score_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One document; the draft's scores are those of a model that looks at the wrong end of the prompt."""
    from dustin_profile.traces import collect

    baseline = json.loads(BASELINE.read_text())
    name, entry = next(iter(baseline["documents"]["reported"].items()))
    baseline["documents"]["reported"] = {name: entry}
    (tmp_path / "baseline.json").write_text(json.dumps(baseline))
    rows = collect.attention_rows

    def flipped(q, k, heads, group, position):  # type: ignore[no-untyped-def]
        for entries, found in rows(q, k, heads, group, position):
            yield entries, found.flip(-1)

    original = collect.Collector._trajectory_rows

    def perturbed(self, forced, start, prefixes):  # type: ignore[no-untyped-def]
        with monkeypatch.context() as patch:
            patch.setattr(collect, "attention_rows", flipped)
            return original(self, forced, start, prefixes)

    monkeypatch.setattr(collect.Collector, "_trajectory_rows", perturbed)
    verdict = check(load_config(CONFIG), tmp_path / "baseline.json", ModelSettings(offline=True), None, tolerance=0.005)
    assert not verdict.passed
    assert verdict.difference < -0.01
    assert DataSettings().data == baseline["traces"]["data"]
