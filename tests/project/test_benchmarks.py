"""The benchmarks themselves: right implementations pass their check and wrong ones fail; results are written."""

import csv
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import contest
import inspection
import measure
import models
import report
import suite
from contest import Case, Skip
from regard import acceleration, timing
from regard.backends.native import engine
from support.programs import fresh

SMALL = [
    Case("forward", 300, H=2, D=16),
    Case("training", 300, H=2, D=16, kind="causal", train=True, telemetry=True),
    Case("window", 400, H=2, D=16, kind="window"),
    Case("decode", 300, H=4, Hkv=2, Tq=1, D=16, half=True),
    Case("entmax", 200, H=2, D=16, kind="causal", family="entmax15", train=True),
    Case("sparsemax", 200, H=2, D=16, family="sparsemax", train=True, sharpness=4.0),
]


@pytest.fixture(autouse=True)
def any_backend(monkeypatch):
    monkeypatch.setattr(contest, "BACKEND", "torch")  # available everywhere


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", ["regard", "SDPA", "eager", "x-transformers"])
def test_right_implementations_pass_the_check_and_wrong_ones_fail(case, implementation):
    if implementation == "x-transformers" and (case.kind == "window" or case.family != "softmax" or case.half):
        pytest.skip("does not support this case")
    if implementation == "eager" and case.Hkv:
        pytest.skip("does not support this case")
    try:
        attention, reference = contest.enter(implementation, case)
    except Skip as reason:
        pytest.skip(str(reason))
    inputs = case.inputs()
    assert contest.error(attention, reference, inputs) <= contest.tolerance(reference)
    shift = torch.zeros(case.D)
    shift[3] = 0.2 if case.half else 1e-2
    assert contest.error(lambda *x: attention(*x) + shift, reference, inputs) > contest.tolerance(reference)
    if case.train:  # the output is right, the gradient is wrong
        wrong = lambda q, k, v: attention(q, 0.99 * k + 0.01 * k.detach(), v)  # noqa: E731
        assert contest.error(wrong, reference, inputs) > contest.tolerance(reference)


def test_an_implementation_that_cannot_run_gives_the_reason():
    with pytest.raises(Skip, match="no backward"):
        contest.flex(Case("c", 64, train=True))
    with pytest.raises(Skip, match="for GPUs only"):
        contest.adasplash(Case("c", 64, family="entmax15"))
    with pytest.raises(Skip, match="would take"):
        contest.eager(Case("c", 2**20))


def test_density():
    case = Case("c", 200, H=2, D=16, family="sparsemax")
    assert contest.density(replace(case, sharpness=1e-3), replace(case, sharpness=1e-3).inputs()) == 1.0
    assert contest.density(replace(case, sharpness=100.0), replace(case, sharpness=100.0).inputs()) < 0.05


def test_every_entry_of_the_suite_can_be_made():
    for entries in (suite.entries(False), suite.entries(True), suite.gpu(False), suite.gpu(True)):
        assert len({e.case for e in entries}) == len(entries)
        for entry in entries:
            assert {*entry.targets, *entry.sparse} <= set(entry.case.peers) <= set(contest.IMPLEMENTATIONS)
            assert entry.case.operations > 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_peak_memory():
    """In a new process, where no freed memory can be used again: 64 MiB, freed at the end."""
    folder = Path(measure.__file__).parent
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import measure, torch"
    assert 60 < float(fresh(code + "; print(measure.peak_of(lambda: torch.ones(2**24).sum()))")) < 80


def test_paired_cost(monkeypatch):
    """On a fake clock: one job takes three times as long as the other, with an occasional disturbance."""
    now, calls = 0.0, 0

    def job(duration):
        nonlocal now, calls
        calls += 1
        now += duration * (1 + 0.01 * math.sin(calls)) + (50 if calls % 11 == 0 else 0)

    monkeypatch.setattr(timing, "clock", lambda: now)
    low, middle, high = measure.paired_cost(lambda: job(3.0), lambda: job(1.0), 200.0)
    assert 1.9 < low <= middle <= high < 2.1


def test_results_are_written(tmp_path):
    rows = []
    for T in (128, 256):
        row = report.Row("softmax, forward", "SDPA", "full", T, D=64)
        row.ratios(measure.Spread.of([1.0, 2.0, 3.0]))
        row.judge(">= 1.3", True)
        rows.append(row)
    table, page, plot = report.write(rows, {"cpu": "one & only", "torch": "2"}, tmp_path)
    with table.open() as file:
        found = list(csv.DictReader(file))
    assert [r["T"] for r in found] == ["128", "256"] and found[0]["cpu"] == "one & only"
    assert "2.00 (1.20–2.80)" in page.read_text() and "reached" in page.read_text()
    tree = ElementTree.fromstring(plot.read_text())
    assert len(tree.findall(".//{http://www.w3.org/2000/svg}circle")) == 2


def test_the_table_of_goals_in_a_page_is_replaced(tmp_path):
    own = report.Row("entmax15, forward", "regard", "causal", 4096, D=64, density=0.0101)
    peer = report.Row("entmax15, forward", "SDPA", "causal", 4096, D=64)
    peer.ratios(measure.Spread.of([1.5] * 3))
    peer.judge(">= 2", False)
    memory = report.Row("memory, forward", "regard", "causal", 65536, extra_mib=17.2)
    memory.judge("< 64 MiB", True)
    table, _, _ = report.write([own, peer, memory], {"cpu": "one"}, tmp_path)
    assert report.read(table) == [own, peer, memory]
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{report.GOALS}\n|---|\n| old |\n\nafter\n")
    found = report.goals(report.read(table))
    assert report.with_goals(found, page) == (
        f"before\n\n{report.GOALS}\n|---|---|---|---|---|---|---|\n"
        "| entmax 1.5, forward, 1.0 % of keys | causal | 4096 | SDPA | **1.50** [1.50, 1.50] | ≥ 2 | not reached |\n"
        "| memory, forward | causal | 65536 |  | 17 MiB | < 64 MiB |  |\n\nafter\n"
    )
    page.write_text(f"{report.GOALS}\n|---|\n| old |\n")
    assert report.with_goals(found, page) == found
    page.write_text(f"{report.GOALS}\n|---|\n" + "| old |\n" * 3)
    with pytest.raises(SystemExit, match="more rows than the last run"):
        report.with_goals(found, page)
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="expected a table that begins with"):
        report.with_goals(found, page)


def test_the_cost_of_inspection_is_the_ratio_within_a_round():
    times = {"sdpa": [1.0, 2.0, 4.0], "with statistics": [1.1, 2.2, 8.0]}
    stock, watched = inspection.rows_of("case", 64, times, "sdpa")
    assert stock.ratio is None and watched.ratio is not None and watched.ratio.middle == pytest.approx(1.1)
    assert "1.10 (1.10–" in watched.line() and watched.line().count("|") == inspection.HEADING.count("|") + 1
    assert inspection.matrices(8192) == pytest.approx(67.5)
    done = []
    inspection.take_turns({name: lambda name=name: done.append(name) for name in "ab"}, 2)
    assert done == ["a", "b", "b", "a"]


def test_a_wrong_model_is_not_timed(monkeypatch):
    rows = list(inspection.gpt_oss([48], 1))
    assert [row.implementation for row in rows] == ["eager", "regard"] * 2 and "times as fast" in rows[1].verdict
    plain = inspection.regard.hf.as_call
    monkeypatch.setattr("regard.hf.calls.as_call", lambda *a, **k: plain(*a, **k) | {"scale": 0.1})
    with pytest.raises(inspection.Wrong, match="differ"):
        list(inspection.gpt_oss([48], 1))


def small_whisper():
    sizes = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_layers": 1}
    config = models.transformers.WhisperConfig(d_model=64, decoder_attention_heads=4, decoder_ffn_dim=64, **sizes)
    return models.transformers.WhisperModel(config).get_encoder()


@pytest.mark.skipif(engine.extension()[0] is None, reason="the native engine is not built")
@pytest.mark.parametrize("dtype", models.DTYPES)
def test_an_accelerated_model_is_checked_before_it_is_timed(dtype, monkeypatch):
    monkeypatch.setitem(models.MAKERS, "Whisper-base encoder", small_whisper)
    forward, step = models.rows(["Whisper-base encoder"], [dtype], False, 1)
    assert forward.case == "Whisper-base encoder, forward" and step.ratio.middle > 0 and "1 × 1500" in step.line()
    plain = acceleration._forward

    def doubled(*arguments, **options):
        out, lse = plain(*arguments, **options)
        return 2 * out, lse

    for wrong in (doubled, lambda stock, *arguments, **options: stock(*arguments, **options)):
        monkeypatch.setattr(acceleration, "_forward", wrong)
        with pytest.raises(models.Wrong, match=r"off by|expected \(2, 0\) calls"):
            list(models.rows(["Whisper-base encoder"], [dtype], False, 1))


@pytest.mark.parametrize("name", [name for name in models.MAKERS if name != "SmolLM2"])
def test_every_model_of_the_benchmark_can_be_made(name):
    with torch.device("meta"):  # of real size, without its memory
        model = models.MAKERS[name]()
    case = next(case for case in models.CASES if case.model == name)
    given = {
        n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in models.arguments(case, torch.float32).items()
    }
    assert model(**given)[0].shape[:2] == (case.batch, case.T)
