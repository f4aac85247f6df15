"""The problem algebra: frozen, comparable, printable, a pytree."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

import regard
from regard import KL, ALiBi, Bias, Causal, Documents, FDivergence, FermiDirac, Free, Rows, Transport, Tsallis, Window

slopes = torch.rand(4)


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Transport(), "Transport(KL())"),
        (Transport(Tsallis(1.5), temperature=0.5), "Transport(Tsallis(1.5), temperature=0.5)"),
        (
            Transport(prior=Causal("bottom_right") * Window(255) * ALiBi(slopes)),
            "Transport(KL(), prior=Causal('bottom_right') * Window(255) * ALiBi(Tensor(float32, [4])))",
        ),
        (Transport(marginal=Rows(sink=0.5)), "Transport(KL(), marginal=Rows(sink=0.5))"),
        (Transport(FermiDirac(), marginal=Free(-1.0)), "Transport(FermiDirac(), marginal=Free(-1.0))"),
        (Transport(prior=Window(None, 2)), "Transport(KL(), prior=Window(None, 2))"),
        (Transport(marginal=Rows(mass=3)), "Transport(KL(), marginal=Rows(3))"),
    ],
)
def test_repr(problem, text):
    assert repr(problem) == text


def test_equality_is_structure_and_tensor_identity():
    def make(tensor):
        return Transport(Tsallis(1.5), prior=Causal() * ALiBi(tensor), marginal=Rows(sink=tensor))

    assert make(slopes) == make(slopes) and hash(make(slopes)) == hash(make(slopes))
    assert make(slopes) != make(slopes.clone())
    assert Transport() == Transport(KL(), marginal=Rows()) and Transport() != Transport(Tsallis(1.5))
    assert KL() != FermiDirac() and Causal() != Causal("top_left") and Transport() != "softmax"
    assert Causal() * Window(3) != Window(3) * Causal()
    assert len({Transport(), Transport(KL()), Transport(temperature=2.0)}) == 2


def test_frozen():
    for part in (Transport(), Tsallis(1.5), Rows(), Causal()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.temperature = 2.0


def test_default_argument():
    def attend(q, problem=Transport(Tsallis(1.5))):  # noqa: B008
        return regard.attention(q, q, q, problem=problem)

    assert attend(torch.randn(1, 1, 3, 4)).shape == (1, 1, 3, 4)


def test_products_flatten():
    product = (Causal() * Window(3)) * (ALiBi(slopes) * Bias(slopes))
    assert [type(f) for f in product.factors()] == [Causal, Window, ALiBi, Bias]


def test_pytree():
    bias, ids = torch.randn(5), torch.zeros(5).long()
    problem = Transport(
        Tsallis(torch.tensor(1.5)),
        prior=Causal() * Bias(bias) * Documents(ids),
        marginal=Rows(sink=slopes),
        temperature=slopes,
    )
    leaves, spec = pytree.tree_flatten(problem)
    assert [id(x) for x in leaves[1:]] == [id(bias), id(ids), id(slopes), id(slopes)]
    assert pytree.tree_unflatten(leaves, spec) == problem
    doubled = pytree.tree_map(lambda t: t * 2, problem)
    assert torch.equal(doubled.marginal.sink, 2 * slopes) and doubled.prior.factors()[0] == Causal()
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(problem)[0]]
    assert paths[0] == ".regularizer.alpha" and ".marginal.sink" in paths


def test_own_regularizer_survives_a_tree_map():
    own = FDivergence(lambda x: x * x / 2, torch.relu, lambda t: (t > 0).to(t.dtype), lower=0.0)
    problem = pytree.tree_map(lambda t: t, Transport(own))
    s = torch.randn(3, 5)
    assert torch.allclose(regard.solve(s, problem).weights, regard.solve(s, Transport(Tsallis(2.0))).weights, atol=1e-6)


def test_copies_and_checkpoints(tmp_path):
    problem = Transport(Tsallis(1.5), prior=Causal() * Bias(torch.randn(4)), marginal=Rows(sink=0.5))
    for clone in (copy.deepcopy(problem), pickle.loads(pickle.dumps(problem))):
        assert repr(clone) == repr(problem)
    torch.save({"problem": problem}, tmp_path / "problem.pt")
    assert repr(torch.load(tmp_path / "problem.pt")["problem"]) == repr(problem)


def test_from_cu_seqlens():
    ids = Documents.from_cu_seqlens(torch.tensor([0, 2, 2, 5]), query_length=7).query_ids
    assert ids.tolist() == [0, 0, 2, 2, 2, -1, -1]
    both = Documents.from_cu_seqlens(torch.tensor([0, 1, 3]), torch.tensor([0, 2, 5]))
    assert both.query_ids.tolist() == [0, 1, 1] and both.key_ids.tolist() == [0, 0, 1, 1, 1]
    q = torch.randn(1, 2, 5, 4)
    packed = regard.attention(
        q, q, q, problem=Transport(prior=Documents.from_cu_seqlens(torch.tensor([0, 2, 5])) * Causal())
    )
    apart = [regard.attention(x, x, x, is_causal=True) for x in (q[:, :, :2], q[:, :, 2:])]
    assert torch.allclose(packed, torch.cat(apart, 2), atol=1e-6)


def test_two_packings_multiply():
    q = torch.randn(1, 2, 6, 4)
    one, two = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 1, 1, 1, -1])
    product = regard.attention(q, q, q, problem=Transport(prior=Documents(one) * Documents(two)))
    joint = regard.attention(q, q, q, problem=Transport(prior=Documents(torch.tensor([0, 1, 1, 2, 2, -1]))))
    assert torch.allclose(product, joint)


def test_slopes_and_windows_multiply():
    q = torch.randn(1, 2, 6, 4)
    twice = Transport(prior=ALiBi(0.3) * ALiBi(torch.tensor([0.1, 0.2])) * Window(3) * Window(5, 1) * Causal())
    once = Transport(prior=ALiBi(torch.tensor([0.4, 0.5])) * Window(3))
    assert torch.allclose(*(regard.attention(q, q, q, problem=p) for p in (twice, once)), atol=1e-6)


def _chi2(x):
    return (x - 1) ** 2 / 2


def _plus_one(t):
    return 1 + t


def test_a_copied_regularizer_is_independent():
    """A copy must stay valid without the original, and must have a name of its own."""
    own = FDivergence(_chi2, _plus_one, torch.ones_like, lower=-1.0)
    s = torch.tensor([1.0, 0.5, 0.0])
    expected = regard.solve(s, Transport(own)).weights
    clones = [copy.deepcopy(Transport(own)), pickle.loads(pickle.dumps(Transport(own))), copy.copy(Transport(own))]
    assert len({clone.regularizer.family for clone in clones[:2]} | {own.family}) == 3
    del own
    for clone in clones:
        assert torch.equal(regard.solve(s, clone).weights, expected)


def test_large_document_ids():
    q = torch.randn(1, 2, 4, 4)
    one, two = torch.tensor([2**31, 2**31, 5, 5]), torch.tensor([2**32, 2**32, 2**32, -1])
    product = regard.attention(q, q, q, problem=Transport(prior=Documents(one) * Documents(two)))
    joint = regard.attention(q, q, q, problem=Transport(prior=Documents(torch.tensor([0, 0, 1, -1]))))
    assert torch.allclose(product, joint, atol=1e-6)


def test_numpy_numbers():
    numpy = pytest.importorskip("numpy")
    q = torch.randn(1, 2, 6, 4)
    ours = Transport(prior=Causal() * Window(numpy.int64(2)), temperature=numpy.float32(0.5))
    theirs = Transport(prior=Causal() * Window(2), temperature=0.5)
    assert torch.equal(*(regard.attention(q, q, q, problem=p, scale=numpy.float64(0.3)) for p in (ours, theirs)))


def test_priors_of_version_0_1_load():
    """Version 0.1 had the priors in regard.problem: pickles and checkpoints name them so."""
    assert pickle.loads(b"cregard.problem\nCausal\n.") is regard.Causal
    known = {entry[1] for entry in torch.serialization.get_safe_globals() if isinstance(entry, tuple)}
    assert {"regard.problem.Causal", "regard.problem.Product"} <= known
    assert regard.problem.ALiBi is regard.ALiBi


def test_a_prior_that_depends_on_positions_has_an_alignment():
    with pytest.raises(TypeError, match="Lost: expected a field `alignment`"):
        type("Lost", (regard.priors.Prior,), {"positioned": True, "__annotations__": {}})
