"""`regard.Monitor`: the metrics of sampled steps, and the stock model between them."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import regard
from regard import FermiDirac, Free, MatchEntropy, Monitor, Transport, Tsallis, dispatch
from support.training import Reader, by_definition, llama, loss_of, reader, samples, tokens


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
    with pytest.warns(UserWarning, match="no attention of Linear was seen in step 0") as caught, monitor(0):
        model(torch.ones(3))
    assert [warning.filename for warning in caught] == [__file__]  # the line of the caller
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
