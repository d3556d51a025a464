"""`dustin-profile eval fidelity` on the tiny pair: the table, resumption, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from commands import Outcome, dustin_profile
from tiny_pair import TinyPair

from dustin_profile.data import Prompt
from dustin_profile.evaluation import fidelity_stage, given_texts
from dustin_profile.statistics import percentile, spearman
from dustin_runtime.config import AdaptiveBudget, Guard, load_config, save_config
from dustin_runtime.files import read_json
from dustin_runtime.models.shape import RopeScaling

USAGE, CONFLICT, MISSING, CONFIG = 2, 4, 6, 7
SMALL = ("--context", 140, "--documents", 3, "--tokens", 12)


def fidelity(pair: TinyPair, config: Path, run: Path, *options: object) -> Outcome:
    return dustin_profile("eval", "fidelity", config, *pair.options, "--run-dir", run, "--quiet", *SMALL, *options)


def methods(*names: str) -> list[str]:
    return [option for name in names for option in ("--method", name)]


def test_every_policy_and_its_bounds_in_one_table(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    found = fidelity(tiny_pair, config, tmp_path, "--budget", 64, "--budget", 32, "--json")
    assert found.code == 0, found.err
    document = json.loads(found.out)
    assert document == read_json(tmp_path / "fidelity" / "results.json")
    summary = document["summary"]
    names = [name for name in summary if "-k" in name]
    assert len(names) == 2 * len(fidelity_stage.sparse_methods())
    for budget in (64, 32):
        best = summary[f"oracle-by-head-k{budget}"]["arr"]["mean"]
        for method in ("oracle", "dustin", "dustin-t", "dustin-d", "streaming"):  # others read more than the budget
            assert summary[f"{method}-k{budget}"]["arr"]["mean"] <= best + 1e-9
    for name in names:
        assert 0 < summary[name]["arr"]["mean"] <= 1
        assert summary[name]["kl"]["mean"] >= 0
        assert summary[name]["kl"]["documents"] == 3
    assert summary["dustin-k32"]["read"] == 32
    shown = fidelity(tiny_pair, config, tmp_path, "--budget", 64, "--budget", 32)
    assert "full verification" in shown.out
    assert (tmp_path / "fidelity" / "results.png").read_bytes()[1:4] == b"PNG"
    text = (tmp_path / "fidelity" / "results.md").read_text()
    assert text.count("| ") > len(names) * 6
    assert str(tmp_path) not in json.dumps(document) + text


def test_every_window_is_kept_and_medians_are_over_all(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    asked = [*methods("dustin", "h2o"), "--budget", 32, "--temperature", 0.5]
    found = fidelity(tiny_pair, config, tmp_path, *asked, "--json")
    assert found.code == 0, found.err
    document = json.loads(found.out)
    assert document["inputs"]["temperature"] == 0.5
    size = document["inputs"]["depth"] + 1
    counts = [min(size, 11 - begin) for begin in range(0, 11, size)]  # of 12 tokens the first comes from the prefill
    for name in ("dustin-k32", "h2o-k32"):
        cells = [entry["cells"][name] for entry in document["documents"]]
        for cell in cells:
            kl, arr = cell["windows"]["kl"], cell["windows"]["arr"]
            assert len(kl) == len(arr) == len(counts)
            assert sum(k * n for k, n in zip(kl, counts, strict=True)) / 11 == pytest.approx(cell["kl"], rel=1e-5)
            assert sum(arr) / len(arr) == pytest.approx(cell["arr"], rel=1e-5)
            assert all(value == float(f"{value:.6g}") for value in (*kl, *arr))
        summary = document["summary"][name]
        for figure in ("kl", "arr"):
            every = [value for cell in cells for value in cell["windows"][figure]]
            assert summary["windows"] == len(every) == 3 * len(counts)
            assert summary[f"{figure}_median"] == pytest.approx(median(every), rel=1e-6)
            assert summary[f"{figure}_median"] != summary[figure]["mean"]
    best = document["summary"]["dustin-k32"]
    row = next(row for row in fidelity_stage.rows(document) if row[0] == "dustin-k32")
    assert [fidelity_stage.HEADER[place] for place in (3, 5)] == ["median"] * 2
    assert row[5] == f"{best['kl_median']:.4f}"
    assert row[2].startswith(f"{best['arr']['mean']:.4f} [") and row[3] == f"{best['arr_median']:.4f}"
    assert row[4].startswith(f"{best['kl']['mean']:.4f} [")
    apart = [entry["cells"]["dustin-k32"]["total_variation"] for entry in document["documents"]]
    assert best["total_variation"]["mean"] == pytest.approx(sum(apart) / 3) and 0 < min(apart) <= max(apart) < 1
    assert row[8].startswith(f"{best['total_variation']['mean']:.4f} [")
    assert "at temperature 0.5, mean" in (tmp_path / "fidelity" / "results.md").read_text()
    assert f"| {row[2]} | {row[3]} | {row[4]} | {row[5]} |" in (tmp_path / "fidelity" / "results.md").read_text()


def test_methods_that_a_config_cannot_serve_are_left_out(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    served = load_config(config)
    bare = served.selection.model_copy(update={"retrieval_heads": ()})
    save_config(served.model_copy(update={"selection": bare}), tmp_path / "old.yaml")
    options = (*tiny_pair.options, "--run-dir", tmp_path, *SMALL, "--budget", 32)
    found = dustin_profile("eval", "fidelity", tmp_path / "old.yaml", *options)
    assert found.code == 0, found.err
    assert "left out, since the config does not say what they need: compresskv" in found.err
    assert "compresskv-k32" not in read_json(tmp_path / "fidelity" / "results.json")["summary"]


def test_documents_that_are_done_are_not_measured_again(
    tiny_pair: TinyPair, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = methods("dustin", "snapkv-8")
    whole = fidelity(tiny_pair, config, tmp_path / "whole", *options, "--json")
    measured = []
    original = fidelity_stage.prepare

    def interrupt(*arguments: object, **named: object) -> object:
        measured.append(1)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return original(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(fidelity_stage, "prepare", interrupt)
    assert fidelity(tiny_pair, config, tmp_path / "run", *options).code == 130
    found = fidelity(tiny_pair, config, tmp_path / "run", *options, "--json")
    assert len(measured) == 2 + 2
    assert json.loads(found.out) == json.loads(whole.out)


def test_what_was_made_from_other_inputs_is_refused_by_field(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    assert fidelity(tiny_pair, config, tmp_path, *methods("dustin")).code == 0
    other = fidelity(tiny_pair, config, tmp_path, *methods("dustin"), "--budget", 32)
    assert other.code == CONFLICT
    assert "fidelity: made with cells = ['dustin-k64'], now ['dustin-k32']" in other.error
    assert fidelity(tiny_pair, config, tmp_path, *methods("dustin"), "--budget", 32, "--overwrite").code == 0


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--method", "sd"], USAGE, "--method sd: verifies in full, which is what the others are compared with"),
        (["--method", "eagle"], USAGE, "--method eagle: unknown; give one of oracle, oracle-by-head, "),
        (["--budget", 128], USAGE, "--budget 128: covers a prompt of 128 tokens"),
        (["--budget", 5], USAGE, "--budget: "),
        (["--tokens", 140], USAGE, "--tokens 140: leaves no prompt of --context 140"),
        (["--temperature", 0], USAGE, "--temperature 0.0: give more than 0"),
    ],
)
def test_bad_options(
    options: list[object], code: int, message: str, tiny_pair: TinyPair, config: Path, tmp_path: Path
) -> None:
    refused = fidelity(tiny_pair, config, tmp_path, *options)
    assert (refused.code, refused.out) == (code, "")
    assert refused.error.startswith(message)


def test_a_side_that_does_not_vary_has_no_correlation() -> None:
    assert spearman([(1.0, 0.2), (1.0, 0.1)]) is None
    assert spearman([(1.0, 0.1), (0.9, 0.2), (0.5, 0.4)]) == pytest.approx(-1)


def test_overwriting_leaves_the_config_that_it_was_made_for(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(config.read_bytes())
    options = ("eval", "fidelity", tmp_path, *tiny_pair.options, "--quiet", *SMALL, *methods("dustin"))
    assert dustin_profile(*options).code == 0
    assert dustin_profile(*options, "--budget", 32, "--overwrite").code == 0
    assert (tmp_path / "config.yaml").read_bytes() == config.read_bytes()


def test_a_text_of_one_token_is_left_out(
    tiny_pair: TinyPair, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is verified: its first token comes from the prefill."""
    original = given_texts.split

    def cut(prompt: Prompt, tokens: int) -> tuple[list[int], list[int]]:
        ids, text = original(prompt, tokens)
        return (ids, text[:1]) if prompt.id.endswith("0") else (ids, text)

    monkeypatch.setattr(given_texts, "split", cut)
    options = (*tiny_pair.options, "--run-dir", tmp_path, *SMALL, *methods("dustin"))
    found = dustin_profile("eval", "fidelity", config, *options, "--json")
    assert found.code == 0, found.err
    assert len(json.loads(found.out)["documents"]) == 2
    assert "left out, its text has 1 tokens and 2 are the least" in found.err


def test_a_damaged_result_is_named(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    assert fidelity(tiny_pair, config, tmp_path, *methods("dustin")).code == 0
    (tmp_path / "fidelity" / "document-0001.json").write_text("{}")
    broken = fidelity(tiny_pair, config, tmp_path, *methods("dustin"))
    assert broken.code == MISSING
    assert broken.error.endswith("document-0001.json: is not a result; delete the file to measure its document again")
    (tmp_path / "fidelity" / "document-0001.json").write_text('{"id":')
    half = fidelity(tiny_pair, config, tmp_path, *methods("dustin"))
    assert half.code == MISSING and "document-0001.json: not readable as JSON" in half.error
    assert half.error.endswith("; delete the file to measure its document again")
    long = fidelity(tiny_pair, config, tmp_path / "long", *methods("dustin"), "--context", 9000)
    assert long.error.startswith("--context, prompt and --tokens: 9000 tokens exceed the model's context")


def test_another_scaling_is_another_input(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    options = (*methods("streaming"), "--budget", 32)
    assert fidelity(tiny_pair, config, tmp_path, *options).code == 0
    stretched = tmp_path / "stretched.yaml"
    served = load_config(config)
    save_config(served.model_copy(update={"rope": RopeScaling(type="linear", factor=2.0)}), stretched)
    other = fidelity(tiny_pair, stretched, tmp_path, *options, "--rope", "linear:2")
    assert other.code == CONFLICT and "rope" in other.err


def test_an_8_bit_cache_has_a_row_of_its_own(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    asked = ("--budget", 64, *methods("dustin"))
    assert fidelity(tiny_pair, config, tmp_path, *asked).code == 0
    assert fidelity(tiny_pair, config, tmp_path, *asked, "--kv-dtype", "fp8").code == CONFLICT  # other results
    found = fidelity(tiny_pair, config, tmp_path / "fp8", *asked, "--kv-dtype", "fp8")
    assert found.code == 0, found.err
    document = read_json(tmp_path / "fp8" / "fidelity" / "results.json")
    assert document["inputs"]["kv_dtype"] == "float8_e4m3fn"
    served = document["summary"]["full-served"]
    assert served["kl"]["mean"] > 0 and served["arr"]["mean"] == pytest.approx(1)
    markdown = (tmp_path / "fp8" / "fidelity" / "results.md").read_text()
    assert "| full, 8-bit cache |" in markdown and "8-bit" in found.out
    assert "policies over a float8_e4m3fn cache of the target" in markdown
    assert fidelity(tiny_pair, config, tmp_path / "fp4", *asked, "--kv-dtype", "fp4").code == USAGE


GUARD = {
    "budget": 64,
    "estimate": {"intercept": 0.1, "history": 0.4, "lookahead": 0.4, "rms": 0.02, "overestimate": 0.03},
    "sizes": [64, 128],
    "across": {"intercept": 0.1, "history": 0.4, "lookahead": 0.4, "rms": 0.02, "overestimate": 0.03},
    "documents": 3,
    "errors_of": "held_out",
}


def test_guards_and_several_budgets_are_measured_beside_the_plain_method(
    tiny_pair: TinyPair, config: Path, tmp_path: Path
) -> None:
    asked = ("--guard", 1.0, "--guard", 0.7, "--full-every", 2, "--target-arr", 0.5)
    given = (*methods("dustin", "snapkv"), "--budget", 32, *asked, "--json")
    lacking = fidelity(tiny_pair, config, tmp_path, *given)
    assert lacking.code == CONFIG and "needs guard, which the config lacks" in lacking.err
    served = load_config(config)
    with_guard = tmp_path / "guarded.yaml"
    save_config(served.model_copy(update={"guard": Guard.model_validate(GUARD)}), with_guard)
    found = fidelity(tiny_pair, with_guard, tmp_path, *given)
    assert found.code == 0, found.err
    summary = json.loads(found.out)["summary"]
    names = [name for name in summary if "-k" in name]
    ruled = ["dustin-guard1-k32", "dustin-guard0.7-k32", "dustin-every2-k32", "dustin-arr0.5-k128"]
    assert names == ["dustin-k32", *ruled, "snapkv-k32"]
    assert summary["dustin-guard1-k32"]["full_share"] == 1
    assert summary["dustin-guard1-k32"]["kl_p99"] < 1e-5
    assert summary["dustin-guard1-k32"]["arr"]["mean"] == pytest.approx(1)
    assert 0 < summary["dustin-every2-k32"]["full_share"] < 1
    assert "full_share" not in summary["dustin-k32"] and "full_share" not in summary["dustin-arr0.5-k128"]
    for name in names:
        cell = summary[name]
        assert cell["kl_p99"] >= cell["kl_median"] and cell["tokens_kl_p99"] >= cell["kl_p99"] * (1 - 1e-5)
    text = (tmp_path / "fidelity" / "results.md").read_text()
    assert "| dustin-guard1-k32, 100.0% of steps in full |" in text
    assert "warning: guard.sizes: the estimate of ARR was fitted at k = 64 to 128 and is used at k = 32" in found.err
    cannot = fidelity(tiny_pair, with_guard, tmp_path, *methods("snapkv"), "--guard", 0.5)
    assert cannot.code == USAGE and "--guard: method snapkv cannot" in cannot.err


def test_an_adaptive_budget_that_is_not_measured_is_said(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    adaptive = {
        "guard": Guard.model_validate(GUARD),
        "adaptive_budget": AdaptiveBudget(target_arr=0.5, sizes=(64, 128)),
    }
    save_config(load_config(config).model_copy(update=adaptive), tmp_path / "config.yaml")
    refused = (*methods("dustin"), "--budget", 9999)
    for options, count in ((refused, 1), ((*refused, "--target-arr", 0.5), 0)):
        found = fidelity(tiny_pair, tmp_path / "config.yaml", tmp_path, *options)
        assert found.code == USAGE and found.err.count("warning: adaptive_budget: not used here, k = ") == count


def test_the_99th_percentile_is_a_value_that_so_many_are_not_above() -> None:
    assert percentile([float(x) for x in range(1, 101)]) == 99
    assert percentile([3.0]) == 3 and percentile([1.0, 2.0]) == 2


def test_kl_by_position_is_the_mean_of_each_part_of_the_longest_texts() -> None:
    def document(tokens: int, kl: list[float]) -> dict[str, Any]:
        return {"text_tokens": tokens, "cells": {"dustin-k8": {"windows": {"kl": kl}}}}

    windows = [float(part) for part in range(8) for _ in range(5)]
    found = fidelity_stage.by_position(
        [document(200, windows), document(200, [3 * x for x in windows]), document(20, [99.0] * 4)], ["dustin-k8"]
    )
    assert found == {"dustin-k8": [(25 * part + 12.5, 2.0 * part) for part in range(8)]}
    assert fidelity_stage.by_position([document(100, [1.0] * 31)], ["dustin-k8"]) == {}
