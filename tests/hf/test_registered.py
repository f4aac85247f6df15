"""`regard.hf.register`: problems under a name, and what is passed on to them."""

import math

import pytest
import torch
import transformers as hf
from transformers import masking_utils

import regard
from regard import ALiBi, Bias, Causal, Documents, Free, Rows, RowsAndColumns, Transport, Tsallis, Window
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


# --- lengths ----------------------------------------------------------------------------------------------------------

T = 20
PER_HEAD, FROM_POSITIONS = (
    r"a tensor per head, \[H, 1, 1\]",
    r"a prior that follows from positions \(Causal, Window, ALiBi, Relative\)",
)
FIXED = {
    "bias": (
        Transport(prior=Bias(torch.zeros(1, 1, T, T))),
        r"Bias\(log_prior\).*20 queries and 20 keys",
        FROM_POSITIONS,
    ),
    "bias of keys": (Transport(prior=Causal() * Bias(torch.zeros(T))), r"Bias\(log_prior\).* 20 keys", FROM_POSITIONS),
    "documents": (
        Transport(prior=Documents(torch.zeros(T).long())),
        r"Documents\(query_ids\).* 20 keys",
        "position_ids",
    ),
    "temperature": (Transport(temperature=torch.ones(4, T, 1)), "temperature=.*20 queries", PER_HEAD),
    "sink": (Transport(marginal=Rows(sink=torch.zeros(1, 4, T, 1))), r"Rows\(sink\)=.*20 queries", PER_HEAD),
    "offset": (Transport(marginal=Free(offset=torch.zeros(T, 1))), r"Free\(offset\)=.*20 queries", PER_HEAD),
    "alpha": (Transport(Tsallis(torch.full((4, T, 1), 1.5))), r"Tsallis\(alpha\)=.*20 queries", PER_HEAD),
    "budget": (Transport(temperature=regard.MatchKL(torch.ones(T, 1))), r"MatchKL\(budget\)=.*20 queries", PER_HEAD),
}


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("name", FIXED)
def test_generating_with_a_tensor_of_one_length_raises_with_the_remedy(name, cache):
    problem, part, remedy = FIXED[name]
    model = build("llama")
    model.set_attn_implementation(regard.hf.register("regard-fixed", problem))
    tokens = inputs_of("llama")["input_ids"]
    assert model(tokens).logits.isfinite().all()  # the length that it is made for
    options = {"none": {"use_cache": False}, "static": {"cache_implementation": "static"}}.get(cache, {})
    with pytest.raises(
        ValueError, match=rf"^problem: expected tensors that fit every call .* got {part}.* Tk=2\d; {remedy}"
    ):
        model.generate(tokens, max_new_tokens=4, do_sample=False, **options)


def test_columns_of_one_length_raise_with_the_remedy():
    model, given = build("bert"), inputs_of("bert")
    short = {name: value[:, :12] for name, value in given.items()}
    for marginal, part in (
        (RowsAndColumns(column=torch.ones(T)), "column"),
        (RowsAndColumns(row=torch.ones(T), column=None), "row"),
    ):
        model.set_attn_implementation(regard.hf.register("regard-columns", Transport(marginal=marginal)))
        assert model(**given).logits.isfinite().all()
        with pytest.raises(ValueError, match=rf"got RowsAndColumns\({part}\)=.* for 20 .* in a call with Tq=12, Tk=12"):
            model(**short)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize(
    "prior", [Causal(), Window(5), ALiBi(torch.tensor([0.5, 1.0, 2.0, 0.1])), Causal() * Window(3)], ids=repr
)
def test_generating_with_a_prior_of_positions(prior, side, cache):
    """The same tokens as without a cache, where each pass has all queries."""
    model = build("llama").double()
    model.set_attn_implementation(regard.hf.register("regard-positions", Transport(prior=prior)))
    given = inputs_of("llama", side)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    static = {"cache_implementation": "static"} if cache == "static" else {}
    got, whole = (model.generate(**given, **options, **more) for more in (static, {"use_cache": False}))
    assert torch.equal(got.sequences, whole.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(whole.logits), atol=1e-6, rtol=0)
    regard.hf.register("regard-positions", Transport())
    plain = model.generate(**given, **options)
    assert isinstance(prior, Causal) or not torch.allclose(plain.logits[-1], got.logits[-1], atol=1e-3)


def test_ids_of_queries_and_keys_have_their_own_lengths():
    problem = Transport(prior=Documents(torch.zeros(1).long(), torch.zeros(8).long()))
    q, k = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 9, 4)
    regard.hf.as_call(problem, torch.nn.Module(), q, k[:, :, :8], k[:, :, :8])
    with pytest.raises(
        ValueError, match=r"got Documents\(key_ids\)=.*, which is for 8 keys, in a call with Tq=1, Tk=9"
    ):
        regard.hf.as_call(problem, torch.nn.Module(), q, k, k)


def test_new_tokens_at_different_positions():
    mask = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    mask[1, ..., 5:] = False
    q, k = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 8, 4)
    module, problem = torch.nn.Module(), Transport(prior=Window(3))
    with pytest.raises(ValueError, match=r"problem: expected one position for the new tokens .* got \[5, 8\]"):
        regard.hf.as_call(problem, module, q, k, k, mask)
    assert regard.hf.as_call(problem, module, q, k, k, mask[1:])["key"].shape[2] == 5
