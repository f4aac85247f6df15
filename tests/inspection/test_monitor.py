"""`regard.Monitor`: the metrics of sampled steps, the stock model between them, and events."""

import copy
import json
import logging
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import regard
from regard import FermiDirac, Free, MatchEntropy, Monitor, Transport, Tsallis, dispatch
from regard.inspection.events import EventDetector, Heads, Limits
from support.training import WORDS, Reader, by_definition, events, lines, llama, loss_of, reader, samples, tokens, train


def padding(B, T):
    mask = torch.ones(B, T, dtype=torch.long)
    for b in range(B):
        mask[b, T - 2 * b :] = 0
    return mask


def one_step(model, path, *batches, every=1, **options):
    """The line of a step over these micro-batches."""
    monitor = Monitor(model, every=every, path=path, **options)
    with monitor(0):
        for batch in batches:
            loss_of(model, *batch).backward()
    monitor.close()
    return samples(path)[0]


def assert_same(a, b, tolerance=1e-5):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == pytest.approx(b[name], rel=tolerance, abs=tolerance), name


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
def test_quantiles_are_those_of_the_matrices(tmp_path, padded):
    model, ids = reader(), tokens(3, 12)
    mask = padding(3, 12) if padded else None
    line = one_step(model, tmp_path / "run.jsonl", (ids, mask))
    for n, layer in enumerate(model.layers):
        found = by_definition(*layer.seen, torch.ones(3, 12).bool() if mask is None else mask.bool())
        for name, heads in found.items():
            if name == "max_score":
                assert line[f"attn/max_score/L{n:02d}"] == pytest.approx(float(heads.max()), rel=1e-4)
                continue
            for quantile in (10, 50, 90):
                expected = float(heads.quantile(quantile / 100))
                assert line[f"attn/{name}/L{n:02d}_p{quantile}"] == pytest.approx(expected, rel=1e-4), name
            lowest = name in ("entropy", "entropy_norm")
            extreme = float(heads.min() if lowest else heads.max())
            assert line[f"attn/{name}/L{n:02d}_{'min' if lowest else 'max'}"] == pytest.approx(extreme, rel=1e-4)
    assert line["max_attention_logit"] == max(line["attn/max_score/L00"], line["attn/max_score/L01"])
    assert line["rows"] == (36 if mask is None else int(mask.sum()))


@pytest.mark.parametrize("padded", [False, True])
def test_a_transformers_model_has_the_metrics_of_an_inspection(tmp_path, padded):
    model, ids = llama(), tokens(3, 12)
    mask = padding(3, 12) if padded else None
    line = one_step(model, tmp_path / "run.jsonl", (ids, mask))
    batch = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
    inspection = regard.inspect(model, batch)
    for name, column in (("entropy_norm", "normalized_entropy"), ("first_key_mass", "first_key_mass")):
        for n, heads in enumerate(inspection.mean(column)):
            assert line[f"attn/{name}/L{n:02d}_p10"] == pytest.approx(float(heads.quantile(0.1)), rel=1e-4)
    assert line["max_attention_logit"] == pytest.approx(float(inspection.maximum("max_scores").max()), rel=1e-4)


@pytest.mark.parametrize("make", [reader, llama])
def test_micro_batches_are_weighted_by_their_rows(tmp_path, make):
    ids, mask = tokens(5, 12), padding(5, 12)
    whole = one_step(make(), tmp_path / "whole.jsonl", (ids, mask))
    parts = one_step(make(), tmp_path / "parts.jsonl", (ids[:1], mask[:1]), (ids[1:], mask[1:]))
    assert_same(whole, parts)
    other = one_step(make(), tmp_path / "other.jsonl", (ids[:1], mask[:1]))
    with pytest.raises(AssertionError):
        assert_same(whole, other)


@pytest.mark.parametrize("repeat", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("make", [reader, llama])
def test_passes_that_checkpointing_repeats_count_once(tmp_path, make, repeat):
    ids, mask = tokens(3, 12), padding(3, 12)
    plain, twice = make(), make()
    if isinstance(twice, Reader):
        twice.repeat = repeat
    else:
        twice.gradient_checkpointing_enable({"use_reentrant": repeat == "reentrant"})
        # Reentrant checkpointing needs an input that requires grad.
        twice.enable_input_require_grads()
    calls = []
    original = dispatch.compute

    def counted(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    expected = one_step(plain, tmp_path / "plain.jsonl", (ids, mask), (ids, None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "compute", counted)
        found = one_step(twice, tmp_path / "twice.jsonl", (ids, mask), (ids, None))
    assert len(calls) > 2 * 2 * len(mask[0].new_zeros(1))  # the layers ran again
    assert_same(expected, found)
    for (name, p), q in zip(plain.named_parameters(), twice.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-5), name


@pytest.mark.parametrize("make", [reader, llama])
def test_evaluation_counts_only_if_asked_for(tmp_path, make):
    ids, others = tokens(3, 12), tokens(4, 12, seed=1)
    expected = one_step(make(), tmp_path / "a.jsonl", (ids,))

    def evaluated(name, **options):
        model = make()
        monitor = Monitor(model, every=1, path=tmp_path / name, **options)
        with monitor(0):
            loss_of(model, ids).backward()
            with torch.no_grad():
                loss_of(model.eval(), others)
        monitor.close()
        return samples(tmp_path / name)[0]

    assert_same(evaluated("b.jsonl"), expected)
    assert evaluated("c.jsonl", evaluation=True)["rows"] == 7 * 12


def test_other_models_are_not_counted(tmp_path):
    model, teacher = reader(), reader(1)
    expected = one_step(reader(), tmp_path / "a.jsonl", (tokens(2, 9),))
    monitor = Monitor(model, every=1, path=tmp_path / "b.jsonl")
    with monitor(0):
        loss_of(teacher, tokens(5, 7)).backward()
        loss_of(model, tokens(2, 9)).backward()
    monitor.close()
    assert_same(samples(tmp_path / "b.jsonl")[0], expected)


class Anything(nn.Module):
    """One call of attention, with any problem and shape."""

    def __init__(self, shape, **call):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.call = nn.Parameter(2 * torch.randn(shape)), call

    def forward(self):
        return regard.attention(self.weight, 1.1 * self.weight, self.weight, **self.call)


@pytest.mark.parametrize(
    "call",
    [
        {"problem": Transport(Tsallis(1.5)), "is_causal": True},
        {"problem": Transport(FermiDirac(), marginal=Free(offset=-2.0))},
        {"problem": Transport(temperature=0.0)},
        {"problem": Transport(temperature=MatchEntropy(1.0))},
        {"attn_mask": torch.arange(6)[:, None] > 2},  # rows without keys
        {"dropout_p": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(6, 8), (3, 6, 8), (2, 3, 6, 8), (2, 2, 3, 6, 8)])
def test_any_problem_in_any_shape(tmp_path, call, shape):
    model = Anything(shape, **call)
    monitor = Monitor(model, every=1, path=tmp_path / "run.jsonl")
    torch.manual_seed(1)
    with monitor(0):
        out = model()
    monitor.close()
    torch.manual_seed(1)
    assert torch.equal(out, model())  # a sampled step computes what any step does, dropout included
    [line] = samples(tmp_path / "run.jsonl")
    request = regard.AuxRequest(entropy=True, max_scores=True)
    q = model.weight.detach()
    aux = regard.attention(q, 1.1 * q, q, return_aux=request, **call | {"dropout_p": 0})[1]
    counted = (aux.max_scores > -math.inf).reshape(-1, *shape[-3:-1][: len(shape) - 1])
    entropy = aux.entropy.reshape(counted.shape)
    if len(shape) == 2:
        counted, entropy = counted[:, None], entropy[:, None]
    means = torch.where(counted, entropy, 0.0).sum((0, 2)) / counted.sum((0, 2))
    assert line["attn/entropy/L00_min"] == pytest.approx(float(means.min()), rel=1e-4, abs=1e-6)
    assert line["max_attention_logit"] == pytest.approx(float(aux.max_scores.max()), rel=1e-5)
    assert ("attn/score_variance/L00_p10" in line) == (call != {"problem": Transport(temperature=0.0)})
    assert 0 <= line["attn/entropy_norm/L00_p50"] <= 1 + 1e-6


def test_the_padding_can_be_given_by_a_function(tmp_path):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = reader()

        def forward(self, ids, ignored):
            return self.inner(ids, attention_mask=~ignored)

    mask = padding(3, 12).bool()
    model = Wrapped()
    expected = one_step(reader(), tmp_path / "a.jsonl", (tokens(3, 12), mask))
    monitor = Monitor(model, every=1, path=tmp_path / "b.jsonl", real=lambda given: ~given["ignored"])
    with monitor(0):
        model(tokens(3, 12), ~mask)
    monitor.close()
    assert_same(samples(tmp_path / "b.jsonl")[0], expected)
    with pytest.raises(ValueError, match="real: expected None"):
        Monitor(llama(), path=tmp_path / "c.jsonl", real=lambda given: None)


def test_a_compiled_model(tmp_path):
    model, ids = reader(), tokens(2, 9)
    expected = one_step(reader(), tmp_path / "a.jsonl", (ids,))
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    monitor = Monitor(compiled, every=2, path=tmp_path / "b.jsonl")
    frames = []
    for step in range(6):
        with monitor(step):
            compiled(ids).sum().backward()
        frames.append(counter.frame_count)
    monitor.close()
    assert frames[1:] == [frames[1]] * 5  # one compilation for sampled steps, one for the others
    found = samples(tmp_path / "b.jsonl")
    assert [line["step"] for line in found] == [0, 2, 4]
    for line in found:
        assert_same({**line, "step": 0}, {k: v for k, v in expected.items() if not k.startswith("loss")})


# --- the stock model --------------------------------------------------------------------------------------------------


def hooks(model):
    return [
        hook
        for module in model.modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        for hook in getattr(module, kind).values()
    ]


def test_a_step_that_is_not_sampled_is_a_step_of_the_stock_model(tmp_path, monkeypatch):
    runs = []
    original = dispatch.compute
    monkeypatch.setattr(dispatch, "compute", lambda *a, **k: runs.append(a) or original(*a, **k))
    for model in (reader(dropout=0.2), llama()):
        before, names = copy.deepcopy(model), set(ALL_ATTENTION_FUNCTIONS)
        monitor = Monitor(model, every=3, path=tmp_path / f"{type(model).__name__}.jsonl")
        for step in range(7):
            runs.clear()
            torch.manual_seed(step)
            with monitor(step):
                assert bool(hooks(model)) == bool(dispatch.observers or step % 3 == 0) == (step % 3 == 0)
                loss = loss_of(model, tokens(2, 9))
                inside = len(runs)
            assert hooks(model) == [] and dispatch.observers == []
            assert set(ALL_ATTENTION_FUNCTIONS) == names
            if isinstance(model, Reader):
                assert inside == (4 if step % 3 == 0 else 2)
                exact = True  # the statistics come from a pass of their own
            else:
                assert model.config._attn_implementation == "sdpa"
                assert inside == (2 if step % 3 == 0 else 0)
                exact = step % 3 != 0
            torch.manual_seed(step)
            stock = loss_of(before, tokens(2, 9))
            assert torch.equal(loss, stock) if exact else torch.allclose(loss, stock, atol=1e-5)
        monitor.close()


@pytest.mark.parametrize("make", [reader, llama])
def test_an_exception_leaves_no_hooks_and_no_line(tmp_path, make):
    model = make()
    monitor = Monitor(model, every=1, path=tmp_path / "run.jsonl")
    with pytest.raises(IndexError), monitor(0):
        (loss_of(model, tokens(2, 9)) + loss_of(model, tokens(2, 9) + 1000)).backward()
    assert hooks(model) == [] and dispatch.observers == []
    with monitor(1):
        loss_of(model, tokens(2, 9)).backward()
    monitor.close()
    assert [line["step"] for line in samples(tmp_path / "run.jsonl")] == [1]
    assert samples(tmp_path / "run.jsonl")[0]["rows"] == 18


def test_a_model_without_attention_warns_once(tmp_path):
    model = nn.Linear(3, 3)
    monitor = Monitor(model, every=1, path=tmp_path / "run.jsonl")
    with pytest.warns(UserWarning, match="no attention of Linear was seen in step 0"), monitor(0):
        model(torch.ones(3))
    with warnings.catch_warnings(), monitor(1):  # once
        warnings.simplefilter("error")
        model(torch.ones(3))
    monitor.close()
    assert not (tmp_path / "run.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every: expected a positive int, got 0"),
        ({"statistics": ["entropies"]}, "statistics: expected names among .* got 'entropies'"),
        ({"statistics": ["key_mass"]}, "statistics: expected"),
        ({"thresholds": {"spike": -1}}, "expected spike to be a positive number, got -1"),
        ({"thresholds": {"spikes": 1}}, "thresholds: expected names among .* got 'spikes'"),
        ({"thresholds": 3}, "thresholds: expected a Limits, a dict or None, got 3"),
        ({"writer": 3}, "writer: expected a SummaryWriter, a folder or None, got 3"),
    ],
)
def test_wrong_arguments(tmp_path, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Monitor(reader(), path=tmp_path / "run.jsonl", **options)
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got 3"):
        Monitor(3)
    with pytest.raises(ValueError, match="step: expected an int >= 0"):
        Monitor(reader(), path=tmp_path / "a.jsonl").start(-1)


# --- the run file -----------------------------------------------------------------------------------------------------


def steps(path):
    return [line["step"] for line in samples(path)]


def go(model, path, first, last, every=2, state=None, **options):
    monitor = Monitor(model, every=every, path=path, **options)
    if state is not None:
        monitor.load_state_dict(state)
    for step in range(first, last):
        with monitor(step):
            loss = loss_of(model, tokens(2, 9, seed=step))
        monitor.log(loss)
    monitor.close()
    return monitor


def test_a_run_that_goes_back_moves_later_lines_aside(tmp_path):
    model, path = reader(), tmp_path / "run.jsonl"
    go(model, path, 0, 9)
    assert steps(path) == [0, 2, 4, 6, 8]
    go(model, path, 5, 7)
    assert steps(path) == [0, 2, 4, 6]
    assert [line["step"] for line in lines(tmp_path / "run.jsonl.stale")] == [6, 8]
    assert sum("format" in line for line in lines(path)) == sum("layers" in line for line in lines(path)) == 1


def test_an_incomplete_line_is_dropped(tmp_path):
    model, path = reader(), tmp_path / "run.jsonl"
    go(model, path, 0, 5)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    go(model, path, 4, 7)
    assert steps(path) == [0, 2, 4, 6]
    path.write_bytes(b'{"format": "rega')  # incomplete in the first line
    go(model, path, 0, 3)
    assert steps(path) == [0, 2]


def test_another_file_is_not_changed(tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text('{"mine": 1}\n')
    with pytest.raises(ValueError, match=r"expected a run file of regard\.Monitor"):
        Monitor(reader(), path=path)
    assert path.read_text() == '{"mine": 1}\n'


def test_a_folder_gets_a_file(tmp_path):
    go(reader(), tmp_path / "runs" / "first", 0, 1)
    assert steps(tmp_path / "runs" / "first" / "attention.jsonl") == [0]


def test_a_line_has_the_loss_logged_inside_or_after_the_step(tmp_path):
    model, path = reader(), tmp_path / "run.jsonl"
    monitor = Monitor(model, every=2, path=path)
    for step in range(5):
        with monitor():  # the next step
            loss = loss_of(model, tokens(2, 9, seed=step))
            if step == 0:
                monitor.log(loss, 0.5)  # inside
        if step == 1:
            monitor.log(7.0)
        if step == 2:
            monitor.log(loss.item(), torch.tensor(0.25))  # after
    monitor.close()  # step 4: never
    first, second, third = samples(path)
    assert (first["step"], first["grad_norm"]) == (0, 0.5) and first["loss"] > 0
    assert (second["step"], second["grad_norm"], second["loss_max"]) == (2, 0.25, 7.0)
    assert "loss" not in third and "loss_max" not in third


def test_tensorboard_receives_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tb")) as writer:
        go(reader(), tmp_path / "run.jsonl", 0, 5, writer=writer, thresholds={"max_score": 1e-3})
    go(reader(), tmp_path / "other.jsonl", 0, 1, writer=tmp_path / "own")  # a folder: closed with the monitor
    book = EventAccumulator(str(tmp_path / "tb")).Reload()
    found = samples(tmp_path / "run.jsonl")
    for name in ("attn/entropy_norm/L01_p10", "attn/max_score/L00", "max_attention_logit"):
        scalars = book.Scalars(name)
        assert [s.step for s in scalars] == [0, 2, 4]
        assert [s.value for s in scalars] == pytest.approx([line[name] for line in found], rel=1e-5)
    assert [s.step for s in book.Scalars("attn/event/logit-alarm")] == [0, 0]
    [text] = [book.Tensors(tag) for tag in book.Tags()["tensors"] if tag.startswith("attn/events")]
    assert b"logit-alarm: largest score" in text[0].tensor_proto.string_val[0]
    assert EventAccumulator(str(tmp_path / "own")).Reload().Scalars("max_attention_logit")


class Run:
    """The part of a W&B run that we use: a row ends at a commit or at a later step."""

    def __init__(self):
        self.rows, self.row, self.step, self.metrics = {}, {}, 0, {}

    def define_metric(self, name, **options):
        self.metrics[name] = options

    def log(self, data, step=None, commit=None):
        if step is not None:
            assert step >= self.step, "W&B would drop this"
            if step > self.step:
                self._end(step)
        self.row |= data
        if commit or (commit is None and step is None):
            self._end(self.step + 1)

    def _end(self, step):
        if self.row:
            self.rows[self.step] = self.row
        self.row, self.step = {}, step


@pytest.mark.parametrize("user", ["explicit", "plain", "silent"])
def test_wandb_keeps_our_values_and_those_of_the_user(tmp_path, user):
    run, model = Run(), reader()
    monitor = Monitor(model, every=2, path=tmp_path / "run.jsonl", wandb=run)
    for step in range(6):
        with monitor(step):
            loss = loss_of(model, tokens(2, 9))
        monitor.log(loss)
        if user == "explicit":
            run.log({"mine": step}, step=step)
        elif user == "plain":
            run.log({"mine": step})
    monitor.close()
    run._end(10**6)
    ours = [row for row in run.rows.values() if "max_attention_logit" in row]
    assert [row["attn/step"] for row in ours] == [0, 2, 4]
    assert run.metrics["attn/*"]["step_metric"] == "attn/step"
    if user != "silent":
        assert [row["mine"] for row in run.rows.values() if "mine" in row] == list(range(6))


def test_wandb_itself(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), project="p", settings=wandb.Settings(console="off")) as run:
        go(reader(), tmp_path / "run.jsonl", 0, 5)  # the active run is found
        run.log({"mine": 1})  # also completes our last row
        assert run.summary["attn/step"] == 4
        assert run.summary["max_attention_logit"] == pytest.approx(
            samples(tmp_path / "run.jsonl")[-1]["max_attention_logit"], rel=1e-5
        )
    assert wandb.run is None
    go(reader(), tmp_path / "none.jsonl", 0, 1)  # no run is active


# --- events -----------------------------------------------------------------------------------------------------------


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
    assert event.severity == "alarm" and "QK-clip" in event.remedy and event.source and event.why


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
            f"step {e['step']}: {e['event']}: {e['message']}" for e in found
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
