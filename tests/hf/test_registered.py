"""`regard.hf.register`: problems under a name, and what is passed on to them."""

import math

import pytest
import torch
import transformers as hf
from transformers import masking_utils

import regard
from regard import Causal, Rows, Transport, Tsallis
from support.models import build, inputs_of, logits

hf.logging.set_verbosity_error()
regard.hf.register()


def test_a_named_problem():
    entmax = pytest.importorskip("entmax")
    name = regard.hf.register("regard-entmax15", Transport(Tsallis(1.5)))
    assert name == "regard-entmax15"

    def by_entmax(module, query, key, value, attention_mask, scaling=None, **_):
        key, value = (t.repeat_interleave(2, 1) for t in (key, value))
        scores = (query @ key.mT * scaling).masked_fill(~attention_mask, -math.inf)
        return (entmax.entmax_bisect(scores, 1.5, n_iter=60) @ value).transpose(1, 2).contiguous(), None

    hf.AttentionInterface.register("entmax-oracle", by_entmax)
    masking_utils.AttentionMaskInterface.register(
        "entmax-oracle", lambda **kwargs: masking_utils.sdpa_mask(**kwargs | {"allow_is_causal_skip": False})
    )
    model, given = build("mistral").double(), inputs_of("mistral")
    got, expected = (logits(model, i, given) for i in (name, "entmax-oracle"))
    assert torch.allclose(got, expected, atol=1e-6)
    assert not torch.allclose(got, logits(model, "regard", given), atol=1e-2)


def test_a_problem_with_a_prior_of_its_own():
    regard.hf.register("regard-near", Transport(prior=Causal() * regard.Window(3)))
    model, given = build("llama").double(), inputs_of("llama")
    near = build("mistral", sliding_window=4).double()
    near.load_state_dict(model.state_dict())
    assert torch.allclose(logits(model, "regard-near", given), logits(near, "sdpa", given), atol=1e-6)


def test_names_and_problems_that_cannot_be_registered():
    for name in ("sdpa", "my-sdpa", "flex_attention", "a/b", "paged|regard", "flash", "eager", ""):
        with pytest.raises(ValueError, match="name"):
            regard.hf.register(name)
    with pytest.raises(TypeError, match="problem"):
        regard.hf.register("regard-bad", Tsallis(1.5))
    with pytest.raises(TypeError, match="name"):
        regard.hf.register(Transport())


def test_a_registered_problem_must_not_require_grad():
    """It belongs to no model: learned tensors would be in no state dict."""
    sink = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match=r"problem: expected tensors that do not require grad, got marginal\.sink"):
        regard.hf.register("regard-learned", Transport(marginal=Rows(sink=sink)))
    assert "regard-learned" not in hf.AttentionInterface()

    class Scaled(regard.features.LinearAttention):
        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(()))

    with pytest.raises(ValueError, match="problem: expected tensors that do not require grad, got gain"):
        regard.hf.register("regard-learned", Scaled())
    name = regard.hf.register("regard-constant", Transport(marginal=Rows(sink=sink.detach())))
    assert logits(build("llama"), name, inputs_of("llama")).isfinite().all()


def test_sinks_need_plain_rows():
    regard.hf.register("regard-relaxed", Transport(marginal=Rows(relax=1.0)))
    with pytest.raises(ValueError, match="s_aux"):
        logits(build("gpt_oss"), "regard-relaxed", inputs_of("gpt_oss"))


def test_dropout_and_scaling_are_passed_on():
    q = torch.randn(1, 2, 3, 4)
    call = regard.hf.as_call(None, torch.nn.Module(), q, q, q, None, dropout=0.25, scaling=0.7, softcap=3.0)
    assert (call["dropout_p"], call["scale"], call["softcap"]) == (0.25, 0.7, 3.0)
