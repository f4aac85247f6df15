"""Functions that share the options of `attention` list them in their signature and refuse others."""

import inspect

import pytest
import torch

import regard
from regard import geometry
from regard.arguments import DEFAULTS, AttentionOptions

SCORE = {"attn_mask": None, "is_causal": False, "scale": None, "enable_gqa": False}
PLAN = SCORE | {"problem": None, "softcap": None, "key_scale": None, "score": "dot", "backend": "auto"}
x = torch.zeros(1, 1, 2, 2)
FUNCTIONS = {
    "estimate": (regard.estimate, (x, x, x), PLAN),
    "evidence": (regard.evidence, (x, x), PLAN | {"level": 0.05}),
    "fisher_vector_product": (geometry.fisher_vector_product, (x, x, x), SCORE),
    "free_energy_hvp": (geometry.free_energy_hvp, (x, x, x), SCORE),
    "jvp": (geometry.jvp, (x, x, x, (x, None, None)), SCORE | {"softcap": None, "score": "dot"}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_signature_lists_every_option_with_its_default(name):
    function, _, expected = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters.values()
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == expected
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_docstring_describes_every_option(name):
    function, _, expected = FUNCTIONS[name]
    assert all(f"`{option}`" in function.__doc__ for option in expected)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("option", ["dropout_p", "return_aux", "mask"])
def test_an_unknown_option_raises(name, option):
    function, given, _ = FUNCTIONS[name]
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument '{option}'"):
        function(*given, **{option: None})


def test_the_defaults_are_those_of_attention():
    """`arguments.DEFAULTS` is what `help()` shows for the functions that share the options."""
    shown = {name: p.default for name, p in inspect.signature(regard.attention).parameters.items()}
    assert {name: shown[name] for name in DEFAULTS} == DEFAULTS
    assert set(DEFAULTS) == set(AttentionOptions.__optional_keys__)
    assert set(shown) - set(DEFAULTS) == {"query", "key", "value", "return_aux"}
