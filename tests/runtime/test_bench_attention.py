"""`dustin-run bench attention` on a CPU with tiny sizes, end to end; and the parts of it that need no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import dustin_run

from dustin_runtime.bench import checks, timing
from dustin_runtime.bench.attention import KIND, measure
from dustin_runtime.bench.full_kernels import REFERENCE, FullKernel, _bind_packed, _bind_plain, full_kernels
from dustin_runtime.bench.report import attention_markdown, table
from dustin_runtime.bench.synthetic import Synthetic
from dustin_runtime.bench.workload import PAPER_SPEEDUPS, Sizes, Workload, parse_workload
from dustin_runtime.errors import NothingMeasuredError, UsageError

CPU = torch.device("cpu")
SIZES = Sizes(layers=3, query_heads=8, kv_heads=2, head_size=16, budget=64, depth=2)
OPTIONS = [
    *("bench", "attention", "--device", "cpu", "--layers", 3, "--query-heads", 8, "--kv-heads", 2),
    *("--head-size", 16, "--budget", 64, "--depth", 2, "--repeats", 3),
]


def test_the_command_writes_a_document_and_its_markdown(tmp_path: Path) -> None:
    path = tmp_path / "new" / "attention.json"
    shown = dustin_run(*OPTIONS, "--workload", "300x2", "--workload", "1Kx1", "--json", path)
    assert shown.code == 0, shown.err
    document = json.loads(path.read_text())
    assert document["kind"] == KIND
    assert document["device"].startswith("CPU")
    assert {"dustin", "torch", "python"} <= document["versions"].keys()
    assert document["timing"] == timing.CLOCK
    assert document["command"].startswith("dustin-run bench attention --workload 300x2 --workload 1Kx1 --layers 3 ")
    assert str(tmp_path) not in path.read_text()
    assert [(row["context"], row["batch"]) for row in document["rows"]] == [(300, 2), (1024, 1)]
    for row in document["rows"]:
        assert row["data"] == document["data"] == "synthetic"
        (full,) = row["full"]
        assert full["kernel"] == row["best_full"] == REFERENCE
        for part in (full, row["sparse"], row["history"], row["lookahead"], row["selection"]):
            assert 0 < part["min_ms"] <= part["ms"] <= part["max_ms"]
            assert part["repeats"] >= timing.LEAST_REPEATS
            assert part["gb_per_s"] == pytest.approx(part["bytes"] / part["ms"] / 1e6)
            assert part["roofline_ms"] > 0
        parts = sum(row[name]["ms"] for name in ("history", "lookahead", "selection"))
        assert row["estimation_ms"] == pytest.approx(parts)
        assert row["speedup"] == pytest.approx(full["ms"] / (row["sparse"]["ms"] + parts))
        assert row["estimation_of_step"] == pytest.approx(parts / row["sparse_step_ms"])
        assert row["unpacked_ms"] is row["paper_speedup"] is None
        assert all(error < 1e-4 for error in row["errors"].values())
    first = document["rows"][0]
    assert first["full"][0]["bytes"] == 2 * 3 * 2 * 16 * 4 * (2 * 303)
    assert first["sparse"]["bytes"] == 2 * 3 * 2 * 16 * 4 * (2 * 67)
    assert first["history"]["bytes"] == 2 * 300 * 2 * 16 * 4
    assert path.with_suffix(".md").read_text() == shown.out == attention_markdown(document)
    for word in ("synthetic KV caches", "| synthetic | 300x2 ", "CPU wall clock", "full: torch reference", "roofline"):
        assert word in " ".join(shown.out.replace("|", " | ").split()), word


@pytest.mark.parametrize("text", ["16Kx0", "0x4", "16K", "x8", "16Kx", "16Mx8", "-1x2", "16Kx8x2", "1.5Kx2"])
def test_bad_workloads_are_refused(text: str) -> None:
    refused = dustin_run(*OPTIONS, "--workload", "300x1", f"--workload={text}")
    assert refused.code == 2
    assert refused.error.startswith(f"--workload {text}: ")
    assert not refused.out


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--query-heads", 7], 2, "--query-heads 7: must be a multiple of --kv-heads 2"),
        (["--budget", 20], 2, "--budget: 20 leaves no token to choose"),
        (["--json", "."], 2, "--json .: is a folder"),
        (["--json", "/proc/none/attention.json"], 6, "--json /proc/none/attention.json: cannot be written ("),
        (["--dtype", "int8"], 2, "--dtype int8: unknown"),
        (["--device", "tpu"], 2, "--device tpu: unknown"),
        (["--depth", 0], 2, None),
    ],
)
def test_bad_options_are_refused(options: list[object], code: int, message: str | None) -> None:
    refused = dustin_run(*OPTIONS, "--workload", "300x1", *options)
    assert refused.code == code
    assert not refused.out
    assert message is None or refused.error.startswith(message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_cpu_must_be_asked_for() -> None:
    absent = dustin_run("bench", "attention")
    assert absent.code == 5
    assert "--device cpu" in absent.error
    unsized = dustin_run("bench", "attention", "--device", "cpu")
    assert unsized.code == 2
    assert "--workload" in unsized.error


def test_help_loads_nothing_heavy() -> None:
    script = """
import sys
from dustin_runtime.cli.app import main
try:
    main()
except SystemExit:
    pass
print("HEAVY", sorted({"torch", "numpy", "transformers", "triton"} & sys.modules.keys()))
"""
    command = [sys.executable, "-c", script, "bench", "attention", "--help"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--workload" in found.stdout
    assert found.stdout.endswith("HEAVY []\n")


def test_workloads_are_read_and_shown() -> None:
    assert parse_workload("16Kx8") == parse_workload(" 16384X8") == Workload(16384, 8)
    assert str(Workload(16384, 8)) == "16Kx8"
    assert str(Workload(1000, 2)) == "1000x2"
    assert PAPER_SPEEDUPS[Workload(32768, 16)] == 27.85
    assert Sizes().papers and not SIZES.papers


def test_nothing_is_reported_of_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return q * 1.0

    monkeypatch.setattr("dustin_runtime.bench.full_kernels.dense_attention", wrong)
    with pytest.raises(NothingMeasuredError, match="torch reference against its reference: error"):
        _measured()
    monkeypatch.undo()
    monkeypatch.setattr("dustin_runtime.attention.sparse.sparse_reference", lambda q, *rest: q * float("nan"))
    with pytest.raises(NothingMeasuredError, match="sparse attention"):
        _measured()
    monkeypatch.undo()
    monkeypatch.setattr(checks, "select_reference", lambda *scores, **rest: scores[-1] * 0)
    with pytest.raises(NothingMeasuredError, match="selection"):
        _measured()


def test_another_projects_kernel_is_left_out_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        raise RuntimeError("no kernel\nfor this")

    foreign = FullKernel("foreign", _bind_plain(broken), packed=True, required=False)
    found = full_kernels(CPU, torch.float32, 16)[0]
    monkeypatch.setattr("dustin_runtime.bench.attention.full_kernels", lambda *rest: ([*found, foreign], {}))
    document = _measured()
    assert [figures["kernel"] for figures in document["rows"][0]["full"]] == [REFERENCE]
    assert document["missing_kernels"] == {"foreign at 100x2": "no kernel for this"}
    assert "Not measured: foreign at 100x2: no kernel for this." in attention_markdown(document)


def test_packed_and_unpacked_flash_agree_with_their_references() -> None:
    """With a plain softmax in the place of the flash kernel, which has no CPU form."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
        scores = torch.einsum("bthd,bnhd->bhtn", q, k) * q.shape[3] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return torch.einsum("bhtn,bnhd->bthd", scores.softmax(-1), v)

    data = Synthetic(SIZES, Workload(100, 2), torch.float32, CPU)
    ours = full_kernels(CPU, torch.float32, 16)[0][0]
    call = ours.bind(data.q, data.cache.keys[0], data.start)
    result = call(data.cache.keys[0], data.cache.values[0])
    for kernel in (
        FullKernel("packed", _bind_packed(attend), packed=True, causal=False),
        FullKernel("unpacked", _bind_plain(attend), packed=False),
    ):
        assert checks.check_full(kernel, data) < 1e-5
        call = kernel.bind(data.q, data.cache.keys[0], data.start)
        assert checks.check_against(result, kernel, call, data) < 1e-5


def test_work_is_timed_per_unit_and_no_longer_than_the_limit() -> None:
    runs: list[int] = []
    found = timing.measure_ms(lambda: runs.append(sum(range(20_000))), CPU, 5, units=2)
    assert found.repeats == 5 == len(runs) - 1
    assert found.least_ms <= found.ms <= found.most_ms
    assert timing.measure_ms(lambda: sum(range(200_000)), CPU, 1000, limit_s=0.0).repeats == timing.LEAST_REPEATS


def test_tables_are_aligned() -> None:
    lines = table(["name", "ms"], [["a", "1.5"], ["bc", "-"]])
    assert lines == ["| name |  ms |", "|------|----:|", "| a    | 1.5 |", "| bc   |   - |"]


def test_contradicting_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="--kv-heads"):
        Sizes(query_heads=6, kv_heads=4).check()


def _measured() -> dict[str, object]:
    return measure(SIZES, [Workload(100, 2)], dtype=torch.float32, device=CPU, repeats=3, command="")
