"""`Monitor` on modules of PyTorch, whose attention is `F.scaled_dot_product_attention`."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard import Monitor
from support.training import lines, samples


def encoder(dropout=0.0, norm_first=False):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2)
    with torch.no_grad():
        for one in model.layers:
            one.self_attn.in_proj_weight.normal_()
    return model


def by_definition(model, x, allowed=None, rows=None):
    """Entropies and largest scores of the heads of the first layer, [H] each."""
    attention = model.layers[0].self_attn
    q, k, _ = F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
    q, k = (t.unflatten(-1, (4, 4)).transpose(1, 2).double() for t in (q, k))
    scores = q @ k.mT / 2
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    p = scores.softmax(-1)
    entropy, top = -torch.xlogy(p, p).sum(-1), scores.amax(-1)
    rows = torch.ones(x.shape[:2], dtype=torch.bool) if rows is None else rows
    rows = rows[:, None].expand_as(entropy)
    means = torch.where(rows, entropy, 0.0).sum((0, 2)) / rows.sum((0, 2))
    return means.detach(), torch.where(rows, top, -math.inf).amax((0, 2)).detach()


def assert_line(line, entropy, top):
    assert line["attn/entropy/L00_min"] == pytest.approx(float(entropy.min()), rel=1e-4)
    assert line["attn/entropy/L00_p50"] == pytest.approx(float(entropy.quantile(0.5)), rel=1e-4)
    assert line["attn/max_score/L00"] == pytest.approx(float(top.max()), rel=1e-4)


@pytest.mark.parametrize("kind", ["full", "causal", "padded"])
def test_an_encoder_in_training(tmp_path, kind):
    model, x = encoder(), torch.randn(3, 7, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    padding = torch.arange(7) >= torch.tensor([7, 5, 4])[:, None]
    given = {"full": {}, "causal": {"mask": causal}, "padded": {"src_key_padding_mask": padding}}[kind]
    monitor = Monitor(model, every=1, path=tmp_path / "run.jsonl")
    with monitor(0):
        model(x, **given).sum().backward()
    monitor.close()
    _, layers, line = lines(tmp_path / "run.jsonl")
    assert layers["layers"] == [[0, "layers.0.self_attn", 4], [1, "layers.1.self_attn", 4]]
    allowed = {"full": None, "causal": causal == 0, "padded": ~padding[:, None, None]}[kind]
    assert_line(line, *by_definition(model, x, allowed, ~padding if kind == "padded" else None))
    assert line["rows"] == (16 if kind == "padded" else 21) and "attn/max_score/L01" in line


@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_the_model_computes_what_it_computed_before(tmp_path, mode):
    model, x = encoder(dropout=0.2), torch.randn(3, 7, 16)
    model.train(mode == "training")
    monitor = Monitor(model, every=1, path=tmp_path / "run.jsonl", evaluation=mode == "evaluation")
    stock, kernels = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()

    def output():
        torch.manual_seed(1)
        with torch.set_grad_enabled(mode == "training"):
            return model(x)

    expected = output()
    with monitor(0):
        assert F.scaled_dot_product_attention is not stock
        got = output()
    monitor.close()
    assert F.scaled_dot_product_attention is stock and torch.backends.mha.get_fastpath_enabled() == kernels
    if mode == "training":
        assert torch.equal(got, expected)  # dropout included
    torch.testing.assert_close(got, expected)
    [line] = samples(tmp_path / "run.jsonl")
    assert_line(line, *by_definition(model, x))


def test_evaluation_that_is_not_counted_keeps_its_kernels(tmp_path):
    model, x = encoder().eval(), torch.randn(3, 7, 16)
    monitor = Monitor(model, every=1, path=tmp_path / "run.jsonl")
    message = "no attention of TransformerEncoder was seen in step 0; .*evaluation=True"
    monitor.start(0)
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        model(x)
    with pytest.warns(UserWarning, match=message) as caught:
        monitor.stop()
    assert [warning.filename for warning in caught] == [__file__]  # the line of the caller


def test_an_exception_restores_the_function(tmp_path):
    stock = F.scaled_dot_product_attention
    monitor = Monitor(encoder(), every=1, path=tmp_path / "run.jsonl")
    with pytest.raises(ZeroDivisionError), monitor(0):
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is stock and torch.backends.mha.get_fastpath_enabled()


class Special(torch.Tensor):
    """A subclass that regard.attention refuses."""


def test_a_call_that_regard_refuses_does_not_end_the_training(tmp_path):
    class Model(nn.Module):
        def forward(self, x, mask):
            return F.scaled_dot_product_attention(x, x, x, mask)

    model, x = Model(), torch.randn(1, 2, 5, 4, requires_grad=True)
    monitor = Monitor(model, every=1, path=tmp_path / "run.jsonl")
    with monitor(0):
        model(x, torch.zeros(5, 5).as_subclass(Special)).sum().backward()
        model(x, torch.zeros(5, 5)).sum().backward()
    monitor.close()
    assert x.grad is not None and samples(tmp_path / "run.jsonl")[0]["rows"] == 5


def test_two_monitors_may_stop_in_any_order(tmp_path):
    stock, models = F.scaled_dot_product_attention, [encoder(), encoder()]
    x = torch.randn(3, 7, 16)
    monitors = [Monitor(m, every=1, path=tmp_path / f"{n}.jsonl", evaluation=n == 0) for n, m in enumerate(models)]
    for monitor in monitors:
        monitor.start(0)
    for model in models:
        model(x)
    for monitor in monitors:
        monitor.stop()
    assert F.scaled_dot_product_attention is stock and torch.backends.mha.get_fastpath_enabled()
    for n, monitor in enumerate(monitors):
        monitor.close()
        [line] = samples(tmp_path / f"{n}.jsonl")
        assert line["rows"] == 21


def test_a_replaced_function_is_counted_once(tmp_path, monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", regard.attention)
    model, x = encoder(), torch.randn(3, 7, 16)
    monitor = Monitor(model, every=1, path=tmp_path / "run.jsonl")
    with monitor(0):
        model(x).sum().backward()
    monitor.close()
    [line] = samples(tmp_path / "run.jsonl")
    assert line["rows"] == 21
    assert_line(line, *by_definition(model, x))


def test_watch_names_the_monitor():
    message = r"got TransformerEncoder, which bypasses .* regard\.Monitor records the modules"
    with pytest.raises(ValueError, match=message), regard.watch(encoder()):
        pass
