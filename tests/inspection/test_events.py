"""The events of a training run: their rules, a run that collapses, and a resumed one."""

import copy
import json
import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import Monitor
from regard.inspection.events import EventDetector, Heads, Limits
from support.training import WORDS, Reader, events, lines, loss_of, reader, samples, tokens, train

# --- rules ------------------------------------------------------------------------------------------------------------


def heads(layer, entropy, score):
    return Heads(layer, [entropy, entropy + 0.01], entropy, [score, score / 2])


def test_a_large_score_is_reported_once_until_it_has_fallen():
    detector = EventDetector()
    scores = [3, 99, 101, 300, 98, 101, 50, 120]
    found = [detector.sampled(step, [heads(3, 0.8, score)]) for step, score in enumerate(scores)]
    alarms = [[e for e in some if e.rule == "logit-alarm"] for some in found]
    assert [bool(some) for some in alarms] == [False, False, True, False, False, False, False, True]
    [event] = alarms[2]
    assert (event.step, event.layer, event.head, event.value, event.threshold) == (2, 3, 0, 101, 100)
    assert event.severity == "alarm" and "regard.nn.qk_clip_" in event.remedy and event.source and event.why
    assert "docs/stabilize.md" in str(event)  # what the terminal shows


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_spike_is_6_deviations_above_the_last_128_values(name):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400, generator=generator).tolist()
    detector = EventDetector()
    values = [2 + 0.1 * x for x in noise]
    before = torch.tensor(values[300 - 128 : 300], dtype=torch.float64)
    line = float(before.mean() + 6 * before.std(correction=0))
    for step, value in enumerate(values):
        if step == 300:
            almost = copy.deepcopy(detector)
            assert almost.logged(step, **{name: line - 1e-6}) == []
            [event] = detector.logged(step, **{name: line + 1e-6})
            assert (event.rule, event.step, event.metric, event.layer) == ("spike", 300, name, None)
            assert event.threshold == pytest.approx(line)
        else:
            assert detector.logged(step, **{name: value}) == []


def test_a_spike_of_the_largest_score_names_the_head():
    detector = EventDetector()
    for step in range(40):
        assert detector.sampled(step, [heads(1, 0.8, 5 + step % 2)]) == []
    [event] = detector.sampled(40, [heads(1, 0.8, 30)])
    assert (event.rule, event.layer, event.head, event.value) == ("spike", 1, 0, 30)


def test_a_loss_that_is_not_finite():
    detector = EventDetector()
    found = [detector.logged(step, loss=value) for step, value in enumerate([1.0, math.nan, math.inf, 1.0, math.nan])]
    assert [len(some) for some in found] == [0, 1, 0, 0, 1]
    assert found[1][0].rule == "not-finite" and found[1][0].value is None


def series(detector, entropies, losses):
    """A sample every 10 steps."""
    found = []
    for step, loss in enumerate(losses):
        found += detector.logged(step, loss=loss)
        if step % 10 == 9:
            found += detector.sampled(step, [heads(0, entropies[step // 10], 5.0)])
    return [event for event in found if event.rule == "collapse-dip"]


def test_a_collapse_is_a_dip_together_with_an_oscillating_loss():
    generator = torch.Generator().manual_seed(0)
    noise = (0.05 * torch.randn(200, generator=generator)).tolist()
    calm = [3 - 0.01 * step + noise[step] for step in range(200)]
    oscillating = [x + (0.8 * (step % 4 < 2) if 130 <= step < 170 else 0) for step, x in enumerate(calm)]
    steady, dipping = [0.8] * 20, [0.8] * 14 + [0.3] * 6
    assert series(EventDetector(), steady, calm) == []
    assert series(EventDetector(), steady, oscillating) == []  # an oscillating loss alone is no collapse
    assert series(EventDetector(), dipping, calm) == []  # nor is a dip alone
    [event] = series(EventDetector(), dipping, oscillating)
    assert (event.step, event.layer, event.head, event.value) == (149, 0, 0, 0.3)
    assert event.threshold == pytest.approx(0.4) and "2303.06296" in event.source
    slow = [0.8 - 0.02 * n for n in range(20)]
    assert series(EventDetector(), slow, oscillating) == []  # not sharp


EARLY = {  # entropy of the samples, losses before each of them
    "from the first step": ([0.95, 0.1], [[3.0], [20.0, 60.0, 90.0]]),
    "after one sample, a loss for each": ([0.95, 0.1], [[3.0], [5.0]]),
    "after a steep fall": ([0.95, 0.9, 0.2], [[10.8], [8.0, 6.2, 6.0, 6.1], [7.4, 7.5, 7.7, 7.6]]),
    "it falls again before the sample": ([0.95, 0.1], [[3.0], [9.0, 300.0, 150.0, 80.0, *[40.0] * 30]]),
}
HEALTHY = {
    "falling": ([0.95, 0.3], [[3.0], [2.9, 2.7, 2.75]]),
    "noise": ([0.95, 0.3], [[2.0], [2.1, 1.95, 2.12, 2.0, 1.9, 2.1]]),
    "near 0": ([0.95, 0.3], [[3.0], [0.5, 0.02, 0.2, 0.05, 0.3, 0.1]]),
    "an oscillation without a dip": ([0.95, 0.9], [[3.0], [5.0, 9.0]]),
}


def early(name, detector):
    found = []
    entropies, losses = (EARLY | HEALTHY)[name]
    for step, (entropy, some) in enumerate(zip(entropies, losses, strict=True)):
        for loss in some:
            found += detector.logged(step, loss=loss)
        found += detector.sampled(step, [heads(0, entropy, 5.0)])
    return found


@pytest.mark.parametrize("name", [*EARLY, *HEALTHY])
def test_a_collapse_before_the_history_has_filled(name):
    found = early(name, EventDetector())
    if name in HEALTHY:
        assert found == []
        return
    [event] = found
    assert (event.rule, event.step) == ("collapse-dip", len(EARLY[name][0]) - 1)
    assert "while the loss rose from " in event.message


def test_a_full_history_is_compared_with_itself():
    """A loss that is above its lowest, long after it, is not a rise."""
    for window, collapse in ((10, True), (9, False)):  # there are nine losses
        found = early("after a steep fall", EventDetector(Limits(window=window)))
        assert ("collapse-dip" in [event.rule for event in found]) == collapse


@pytest.mark.parametrize("at", [0, 8, 30])
@pytest.mark.parametrize(("every", "logging_steps"), [(5, 1), (50, 1), (50, 10)])
def test_a_run_that_diverges_in_its_first_steps(tmp_path, at, every, logging_steps):
    torch.manual_seed(0)
    model = Reader(width=32)
    monitor = Monitor(model, every=every, path=tmp_path / "run.jsonl")
    log = monitor.log
    monitor.log = lambda loss: log(loss) if monitor.current % logging_steps == 0 else None
    train(model, monitor, 61, fast=0.3, at=at)
    monitor.close()
    steps = [e["step"] for e in events(tmp_path / "run.jsonl") if e["event"] == "collapse-dip"]
    assert steps and at < min(steps) <= at + max(10, every)


def test_a_sudden_fall_of_the_loss_is_no_collapse():
    """A head learns something in a few steps: its entropy dips and the loss falls steeply."""
    generator = torch.Generator().manual_seed(1)
    noise = (0.02 * torch.randn(200, generator=generator)).tolist()
    losses = [(3.0 if step < 140 else max(1.0, 3 - 0.2 * (step - 139))) + noise[step] for step in range(200)]
    assert series(EventDetector(), [0.9] * 14 + [0.2] * 6, losses) == []


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(1e-3, 0.3), st.floats(0.5, 0.999))
def test_a_healthy_series_raises_no_alarm(seed, noise, decay):
    generator = torch.Generator().manual_seed(seed)
    draws = (
        noise * (2 * torch.rand(300, generator=generator) - 1)
    ).tolist()  # uniform, because normal ones may be six deviations away
    detector = EventDetector()
    for step in range(300):
        assert detector.logged(step, loss=2 + 3 * decay**step + draws[step], grad_norm=1 + abs(draws[step])) == []
        if step % 10 == 0:
            entropy = 0.95 - 0.5 * step / 300 + 0.02 * draws[step]
            assert detector.sampled(step, [heads(0, entropy, 3 + step / 20 + abs(draws[step]))]) == []


def test_a_healthy_run_is_silent_and_one_that_collapses_is_not(tmp_path, caplog):
    for name, options in (("healthy", {}), ("collapsing", {"fast": 0.2, "at": 60})):
        torch.manual_seed(0)
        model = Reader(width=32)
        with caplog.at_level(logging.WARNING, "regard.monitor"):
            caplog.clear()
            monitor = Monitor(model, every=5, path=tmp_path / f"{name}.jsonl")
            train(model, monitor, 100, **options)
            monitor.close()
        found = events(tmp_path / f"{name}.jsonl")
        assert [record.getMessage() for record in caplog.records] == [
            f"step {e['step']}: {e['event']}: {e['message']}. Remedy: {e['remedy']}" for e in found
        ]
        if name == "healthy":
            assert found == []
            losses = [line["loss"] for line in samples(tmp_path / "healthy.jsonl")]
            assert losses[-1] < 0.8 * losses[0]
        else:
            assert {"collapse-dip", "logit-alarm", "spike"} <= {e["event"] for e in found}
            assert min(e["step"] for e in found) > 60
            for e in found:
                assert {"step", "layer", "head", "value", "threshold", "why", "remedy", "source"} <= e.keys()


# --- state ------------------------------------------------------------------------------------------------------------


def queries_of(layer):
    """The weights that make a layer's queries."""
    return layer.mix.weight[:32]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    torch.manual_seed(0)
    model = reader(width=32)
    data = [(tokens(4, 12, seed=s), 1.0) for s in range(90)]

    def part(path, first, last, state=None, upto=None):
        monitor = Monitor(model, every=3, path=path, thresholds={"window": 24, "max_score": 12})
        if state is not None:
            monitor.load_state_dict(json.loads(json.dumps(state)))
        saved = None
        for step in range(first, last):
            ids, _ = data[step]
            factor = 8.0 if step >= 60 else 1 + step % 7 / 10
            with torch.no_grad():
                for layer in model.layers:
                    queries_of(layer).mul_(factor)  # larger scores without training: the same in both runs
            with monitor(step):
                loss = loss_of(model, ids)
            with torch.no_grad():
                for layer in model.layers:
                    queries_of(layer).div_(factor)
            swing = 2.0 * (step % 3 == 0) if step >= 58 else 0.0
            monitor.log(float(loss) + swing)
            if step == upto:
                saved = monitor.state_dict()
        monitor.close()
        return saved

    part(tmp_path / "whole.jsonl", 0, 90)
    saved = part(tmp_path / "broken.jsonl", 0, 75, upto=57)  # it continued to step 74 before it was stopped
    part(tmp_path / "broken.jsonl", 58, 90, saved)
    whole, broken = (lines(tmp_path / f"{name}.jsonl")[1:] for name in ("whole", "broken"))
    assert {line["event"] for line in whole if "event" in line and line["step"] >= 58} == {"spike", "collapse-dip"}
    assert len(whole) == len(broken)
    for a, b in zip(whole, broken, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == (pytest.approx(b[name], rel=1e-4) if isinstance(a[name], float) else b[name]), name
    # Without the saved state the events differ:
    part(tmp_path / "forgetful.jsonl", 58, 90)
    assert len(events(tmp_path / "forgetful.jsonl")) != sum(e["step"] >= 58 for e in events(tmp_path / "whole.jsonl"))


def test_wrong_state(tmp_path):
    monitor = Monitor(reader(), path=tmp_path / "run.jsonl")
    for state in (3, {}, {"version": 2}):
        with pytest.raises(ValueError, match="state: expected what"):
            monitor.load_state_dict(state)
    with pytest.raises(ValueError, match="state: expected 'series' in it"):
        monitor.load_state_dict({"version": 1, "step": 0, "since": [], "layers": [], "watch": {}})


def test_limits():
    assert Limits(max_score=50).max_score == 50
    with pytest.raises(ValueError, match="expected window to be an int"):
        Limits(window=1.5)
    assert WORDS == 20
