"""The budget that the headline names, by its rule, or what is missing to name one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from html_page import Page
from result_files import DRAFT, RESULTS, answers, composed, fidelity

from dustin_profile.reporting.markdown import markdown
from dustin_profile.reporting.page import html
from dustin_profile.reporting.report import Report, compose
from dustin_profile.reporting.sources import gather

pytestmark = pytest.mark.usefixtures("undrawn")

EQUAL = [1.0, 1.0, 0.5, 1.0]
WORSE = [0.5, 0.4, 0.0, 0.6]
UNSURE = [1.0, 0.8, 0.5, 1.0]
KEPT = {("dustin", k): [0.1, 0.2] for k in (512, 256, 128)}


def budget(report: Report) -> str:
    """The sentence that names the budget."""
    line = next(line for line in markdown(report, None).splitlines() if line.startswith("* **Budget,"))
    return line.partition(":** ")[2].replace("\\", "").replace("\N{NO-BREAK SPACE}", " ")


def needles(**scores: list[float]) -> dict[str, Any]:
    """Dustin's by budget, beside vanilla's."""
    own = {("dustin", int(name[1:])): values for name, values in scores.items()}
    return answers("needle", "found", {("vanilla", None): EQUAL, **own})


def test_the_smallest_budget_that_loses_little_is_named(tmp_path: Path) -> None:
    said = budget(composed(tmp_path, fidelity(KEPT, agreement=0.95), needles(k512=EQUAL, k256=EQUAL, k128=WORSE)))
    assert said.startswith("k = 256: there, and at all larger budgets that were judged, 95 % intervals rule out that")
    assert "any task lost 10 % of vanilla's score" in said
    assert "(needle, facts found 0.000 [0.000, 0.000])" in said
    assert "At k = 128, “needle, facts found” is −0.500" in said and "from vanilla's 0.875" in said
    assert "full verification would choose 0.950 [0.950, 0.950] the same." in said


def test_a_difference_that_may_be_large_is_a_fault(tmp_path: Path) -> None:
    """To find no loss is not to show that there is none."""
    said = budget(composed(tmp_path, needles(k512=EQUAL, k256=UNSURE)))
    assert said.startswith("k = 512: there,")
    assert "At k = 256, “needle, facts found” is −0.050 [−0.209, +0.109] from vanilla's 0.875, so that 24 % may" in said


def test_no_budget_is_named_below_one_that_fails(tmp_path: Path) -> None:
    said = budget(composed(tmp_path, fidelity(KEPT, agreement=0.95), needles(k512=WORSE, k256=EQUAL)))
    assert said.startswith("none of those that were judged will do") and "At k = 512, “needle" in said


def test_every_task_of_the_pair_is_asked_for(tmp_path: Path) -> None:
    recalled = answers("recall", "recalled", {("vanilla", None): EQUAL, ("dustin", 512): EQUAL})
    report = composed(tmp_path, fidelity(KEPT, agreement=0.95), needles(k512=EQUAL, k256=EQUAL), recalled)
    assert budget(report).startswith("k = 512: there,")  # 256 passed one task of two


@pytest.mark.parametrize("case", ["tasks", "vanilla", "documents"])
def test_what_is_missing_to_name_a_budget_is_said(case: str, tmp_path: Path) -> None:
    alone = {
        "tasks": [],
        "vanilla": [answers("needle", "found", {("dustin", 512): EQUAL})],
        "documents": [answers("needle", "found", {("vanilla", None): [1.0], ("dustin", 512): [1.0]})],
    }[case]
    said = budget(composed(tmp_path, fidelity(KEPT), *alone))
    assert said.startswith("none is named, since this was not measured: answers beside vanilla's")


def test_tasks_of_different_budgets_are_not_joined(tmp_path: Path) -> None:
    recalled = answers("recall", "recalled", {("vanilla", None): EQUAL, ("dustin", 512): EQUAL})
    said = budget(composed(tmp_path, needles(k64=EQUAL), recalled))
    assert said == (
        "none is named, since no budget has all of them measured: needle, facts found and recall, facts recalled."
    )


def test_the_config_to_deploy_goes_with_the_budget(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "arr-smollm2.yaml", tmp_path / "config.yaml")
    documents = [fidelity(KEPT, agreement=0.95), needles(k512=EQUAL, k256=EQUAL)]
    models = {"target": {"id": "smollm2"}, "draft": {"id": DRAFT}}
    for number, document in enumerate(documents):
        document["inputs"]["models"] = models
        (tmp_path / f"{number}.json").write_text(json.dumps(document))
    found = compose(gather([tmp_path / "config.yaml", *sorted(tmp_path.glob("*.json"))]))
    command = f"**To deploy:** dustin-run generate --config config.yaml --budget 256 (smollm2 with {DRAFT}, k = 256)."
    assert command in markdown(found, None)
    worse = needles(k512=WORSE, k256=EQUAL)
    worse["inputs"]["models"] = models
    (tmp_path / "1.json").write_text(json.dumps(worse))
    found = compose(gather([tmp_path / "config.yaml", *sorted(tmp_path.glob("*.json"))]))
    assert f"**To deploy:** dustin-run generate --config config.yaml (smollm2 with {DRAFT}, k = 128)." in markdown(
        found, None
    )


def test_the_headline_has_what_answers_lose(tmp_path: Path) -> None:
    report = composed(tmp_path, fidelity(KEPT, agreement=0.95), needles(k512=EQUAL, k128=WORSE))
    found = Page(html(report)).table("What each budget keeps")
    place = found.rows[0].index("needle, facts found")
    assert found.row("k = 512")[place] == "0.875 0.000 [0.000, 0.000]"
    assert found.row("k = 128")[place].startswith("0.375 −0.500 [−0.") and found.row("k = 256")[place] == ""
