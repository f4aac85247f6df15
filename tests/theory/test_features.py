"""Attention by features: its quadratic definition, chunks, steps, gradients, and FAVOR+ against the exact kernel."""

import copy
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import AuxRequest
from regard.features import STATISTICS, Features, LinearAttention, Performer, ReLUFeatures, State, directions
from support.features import MAPS, D, close, definition, seeded, tensors

EVERY = AuxRequest(**dict.fromkeys(STATISTICS, True))


# --- the definition ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("lengths", [(23, 23), (12, 23), (23, 12), (1, 9)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("Hkv", [4, 2, 1])
def test_equal_to_the_quadratic_definition(name, lengths, causal, Hkv):
    q, k, v = tensors(*lengths, Hkv=Hkv)
    module = MAPS[name](chunk=5)
    out, aux = module(q, k, v, causal, scale=0.7, enable_gqa=Hkv == 2, return_aux=EVERY)
    expected, statistics = definition(module, q, k, v, causal, 0.7)
    close(out, expected)
    for statistic, value in statistics.items():
        close(getattr(aux, statistic), value)
    if lengths[0] <= lengths[1]:
        offset = lengths[1] - lengths[0]
        out = module(q, k, v, causal, scale=0.7, enable_gqa=Hkv == 2, alignment="bottom_right")
        close(out, definition(module, q, k, v, causal, 0.7, offset=offset)[0])


def test_the_comparison_fails_for_one_wrong_weight():
    q, k, v = tensors(9)
    module = MAPS["favor"]()
    expected = definition(module, q, k, v, True)[0]
    with pytest.raises(AssertionError):
        close(module(q, k + F.one_hot(torch.tensor(3), 9)[:, None] * 1e-6, v, True), expected)


@pytest.mark.parametrize("name", MAPS)
def test_default_and_negative_scale(name):
    q, k, v = tensors(9)
    module = MAPS[name]()
    close(module(q, k, v), definition(module, q, k, v)[0])
    close(module(q, k, v, True, scale=-0.5), definition(module, -q, k, v, True, 0.5)[0])


@pytest.mark.parametrize("name", MAPS)
def test_the_chunk_size_does_not_change_the_result(name):
    q, k, v = tensors(70)
    whole = MAPS[name](chunk=1000)
    for chunk in (1, 3, 64, None):
        cut = MAPS[name](chunk=chunk)
        for causal in (False, True):
            close(cut(q, k, v, causal), whole(q, k, v, causal), 1e-12)


@pytest.mark.parametrize("name", MAPS)
def test_steps_equal_the_full_call(name):
    q, k, v = tensors(30, H=4, Hkv=2)
    module = MAPS[name](chunk=7)
    full = module(q, k, v, True, enable_gqa=True)
    state, rows = None, []
    for cut in (slice(0, 11), *(slice(n, n + 1) for n in range(11, 20)), slice(20, 30)):
        out, state = module.step(q[:, :, cut], k[:, :, cut], v[:, :, cut], state, enable_gqa=True)
        rows.append(out)
    assert isinstance(state, State)
    close(torch.cat(rows, 2), full)
    end, _ = module.step(q[:, :, :1], k[:, :, :1], v[:, :, :1], state, enable_gqa=True)
    again = module(
        torch.cat([q, q[:, :, :1]], 2), *(torch.cat([t, t[:, :, :1]], 2) for t in (k, v)), True, enable_gqa=True
    )
    close(end, again[:, :, -1:])


@pytest.mark.parametrize("name", MAPS)
def test_the_order_of_keys_does_not_matter_without_a_causal_mask(name):
    q, k, v = tensors(20)
    order = torch.randperm(20, generator=seeded())
    module = MAPS[name](chunk=3)
    close(module(q, k[:, :, order], v[:, :, order]), module(q, k, v))
    close(module(q[:, :, order], k, v), module(q, k, v)[:, :, order])


@pytest.mark.parametrize("name", MAPS)
def test_the_future_is_not_seen(name):
    """Future keys, even huge ones, do not change a single bit of earlier rows, within a chunk or across chunks."""
    q, k, v = tensors(40, dtype=torch.float32)
    module = MAPS[name](chunk=16)
    out = module(q, k, v, True)
    k[:, :, 21:] *= 30.0
    v[:, :, 21:] *= 1e6
    close(module(q, k, v, True)[:, :, :21], out[:, :, :21], 0)


def test_other_ranks_and_broadcasting():
    q, k, v = tensors(9)
    module = MAPS["favor"]()
    full = module(q, k, v, True)
    close(module(q[0], k[0], v[0], True), full[0])
    close(module(q[0, 0], k[0, 0], v[0, 0], True), full[0, 0])
    out, aux = module(*(t[:, None].expand(2, 3, 4, 9, -1) for t in (q, k, v)), return_aux=EVERY)
    assert out.shape == (2, 3, 4, 9, 6) and aux.key_mass.shape == (2, 3, 4, 9)
    assert module(q[:, :, :0], k, v).shape == (2, 4, 0, 6)
    for causal in (False, True):
        assert not module(q, k[:, :, :0], v[:, :, :0], causal).any()


# --- numbers out of range ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_half_types_are_computed_in_float32(dtype, name, causal):
    q, k, v = tensors(200, dtype=dtype)
    module = MAPS[name]()
    out, aux = module(q, k, v, causal, return_aux=AuxRequest(lse=True))
    exact, statistics = definition(module, q.double(), k.double(), v.double(), causal)
    assert out.dtype == dtype and aux.lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    close(aux.lse.double(), statistics["lse"], 1e-5)


def test_keys_of_very_different_sizes():
    """exp(-|k|^2/2) is far below float32's smallest number, before and after ordinary keys in one chunk."""
    q, k, v = tensors(24, dtype=torch.float32)
    k[:, :, :5] *= 12
    k[:, :, 9] *= 25
    module = MAPS["favor"](chunk=16)
    for causal in (False, True):
        exact = definition(module, q.double(), k.double(), v.double(), causal)[0]
        assert exact.isfinite().all() and float(k.square().sum(-1).max()) > 2 * 87 * math.sqrt(D)
        close(module(q, k, v, causal).double(), exact, 1e-4)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_padding_may_hold_nan(name, causal):
    q, k, v = tensors(20)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, :7] = False  # left
    mask[1, 15:] = False  # right
    module = MAPS[name](chunk=6)
    expected, statistics = definition(module, q, k, v, causal, key_mask=mask)
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    with torch.no_grad():
        for t in (k, v):
            t.masked_fill_(~mask[:, None, :, None], math.nan)
    out, aux = module(q, k, v, causal, key_mask=mask, return_aux=EVERY)
    close(out, expected)
    for statistic, value in statistics.items():
        close(getattr(aux, statistic), value)
    assert not causal or (not out[0, :, :7].any() and (aux.lse[0, :, :7] == -math.inf).all())
    grads = torch.autograd.grad(out.square().sum() + aux.lse[aux.lse > -math.inf].sum(), (q, k, v))
    assert all(g.isfinite().all() and g.any() for g in grads)
    assert not any(g.masked_select(~mask[:, None, :, None]).any() for g in grads[1:])
    rest, _ = module.step(*(t[1:, :, :15] for t in (q, k, v)))
    if causal:
        close(out[1:, :, :15], rest)


def test_rows_without_features_give_zero():
    q, k, v = tensors(10)
    q[:, :, 4] = -1.0
    k[:, :, 6] = -1.0
    q.requires_grad_()
    module = ReLUFeatures()
    for causal in (False, True):
        out, aux = module(q, k, v, causal, return_aux=EVERY)
        assert not out[:, :, 4].any() and not aux.mass[:, :, 4].any() and (aux.lse[:, :, 4] == -math.inf).all()
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert grad.isfinite().all() and not grad[:, :, 4].any()


def test_one_key_gives_its_value_however_small_its_weight():
    """An epsilon in the denominator would change the result."""
    q, k, v = tensors(1, dtype=torch.float32)
    for name in MAPS:
        for size in (1e-9, 1.0, 30.0):
            close(MAPS[name]()(q.abs() * size, k.abs() * size, v, True), v, 1e-6)


# --- gradients and transforms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients(name, causal):
    q, k, v = (t.requires_grad_() for t in tensors(5, B=1, H=2, Hkv=1, Dv=2))
    module = MAPS[name](chunk=2)

    def call(q, k, v):
        out, aux = module(q, k, v, causal, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    assert torch.autograd.gradcheck(call, (q, k, v))
    assert torch.autograd.gradgradcheck(call, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("name", MAPS)
def test_gradients_through_a_state(name):
    q, k, v = (t.requires_grad_() for t in tensors(9))
    module = MAPS[name](chunk=4)
    whole = torch.autograd.grad(module(q, k, v, True).sin().sum(), (q, k, v))
    first, state = module.step(q[:, :, :5], k[:, :, :5], v[:, :, :5])
    second, _ = module.step(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], state)
    for a, b in zip(torch.autograd.grad(first.sin().sum() + second.sin().sum(), (q, k, v)), whole, strict=True):
        close(a, b)


@pytest.mark.parametrize("name", ["elu", "favor"])
def test_transforms(name):
    q, k, v = tensors(9, B=3)
    module = MAPS[name](chunk=4)

    def call(q, k, v):
        return module(q, k, v, True)

    close(torch.func.vmap(call)(*(t[:, None] for t in (q, k, v)))[:, 0], call(q, k, v))
    _, tangent = torch.func.jvp(call, (q, k, v), (v[..., :1] * q, k, v))
    step = 1e-6
    moved = [call(q + s * v[..., :1] * q, k + s * k, v + s * v) for s in (step, -step)]
    close(tangent, (moved[0] - moved[1]) / (2 * step), 1e-7)
    grad = torch.func.grad(lambda q: call(q, k, v).sin().sum())(q)
    q.requires_grad_()
    close(grad, torch.autograd.grad(call(q, k, v).sin().sum(), q)[0])


@pytest.mark.parametrize("name", ["elu", "favor"])
def test_compiles_as_one_graph(name):
    module = MAPS[name](chunk=8)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    q, k, v = (t.requires_grad_() for t in tensors(20))
    out, expected = compiled(q, k, v, True), module(q, k, v, True)
    close(out, expected)
    grads = [torch.autograd.grad(result.sin().sum(), (q, k, v)) for result in (out, expected)]
    for a, b in zip(*grads, strict=True):
        close(a, b)


def test_saved_tensors_are_no_larger_than_the_inputs():
    """The forward pass saves O(T D) numbers for backward; a state for each row would be M times as many."""
    saved = []
    T = 32768
    q, k, v = (t.requires_grad_() for t in tensors(T, B=1, H=1, Dv=D, dtype=torch.float32))
    module = Performer(D, 64, chunk=64, generator=seeded())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        module(q, k, v, True)
    assert sum(saved) < 6 * T * D


# --- random features --------------------------------------------------------------------------------------------------


def estimates(module: Features, m: int, q: Tensor, k: Tensor) -> Tensor:
    """Estimates of the kernel of q and k, each from m features of the module; whole blocks are independent."""
    (fq, a), (fk, b) = (module.features(x[None], None) for x in (q, k))
    products = fq * fk if a is None or b is None else fq * fk * (a + b).exp()
    return products.view(-1, m).mean(-1)


def off(found: Tensor, exact: float) -> float:
    """The distance of the mean from the exact value in standard errors."""
    return abs(float(found.mean()) - exact) / (float(found.std()) / math.sqrt(len(found)))


def one_pair(length: float = 1.0) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, D, generator=seeded(3), dtype=torch.float64)
    return length * q, length * k


def test_favor_is_unbiased_and_its_variance_falls_with_features():
    q, k = one_pair(0.8)
    exact = float((q @ k / math.sqrt(D)).exp())
    many = Performer(D, 400_000, generator=seeded())
    spread = {}
    for m in (8, 32, 128):
        found = estimates(many, m, q, k)
        assert off(found, exact) < 3.5
        spread[m] = float(found.var())
    for few, more in ((8, 32), (32, 128)):  # independent blocks: 1/m
        assert 3.3 < spread[few] / spread[more] < 4.7
    independent = estimates(Performer(D, 400_000, orthogonal=False, generator=seeded()), 8, q, k)
    assert off(independent, exact) < 3.5
    assert spread[8] < 0.9 * float(independent.var())


def test_rows_of_length_sqrt_d_are_biased():
    """The test above would notice fixed lengths, a shortcut of some implementations."""
    q, k = one_pair()
    exact = float((q @ k / math.sqrt(D)).exp())
    module = Performer(D, 400_000, generator=seeded())
    assert off(estimates(module, 8, q, k), exact) < 3.5
    module.projection = F.normalize(module.projection, dim=-1) * math.sqrt(D)
    assert off(estimates(module, 8, q, k), exact) > 10


def test_the_module_uses_its_features():
    """`lse` of one key is the log of the estimate by all features."""
    q, k = one_pair()
    for name in ("favor", "relu of projections"):
        module = MAPS[name]()
        _, aux = module(q[None], k[None], k[None], return_aux=AuxRequest(lse=True))
        close(aux.lse.exp(), estimates(module, 20, q, k))


def test_the_output_converges_to_softmax():
    q, k, v = (0.8 * t for t in tensors(64, B=1, H=2))
    exact = regard.attention(q, k, v, is_causal=True)
    errors = [
        torch.stack(
            [(Performer(D, m, generator=seeded(n))(q, k, v, True) - exact).square().mean() for n in range(6)]
        ).mean()
        for m in (16, 64, 256, 1024)
    ]
    assert all(a > 1.5 * b for a, b in pairwise(errors))
    assert errors[-1] < 0.05 * exact.square().mean()


def test_relu_features_estimate_the_arc_cosine_kernel():
    q, k = one_pair()
    angle = torch.acos(F.cosine_similarity(q, k, dim=0))
    exact = float(q.norm() * k.norm() * (angle.sin() + (math.pi - angle) * angle.cos()) / (2 * math.pi))
    assert off(estimates(ReLUFeatures(D, 400_000, generator=seeded()), 8, q, k), exact) < 3.5


def test_directions_are_orthogonal_in_blocks_with_chi_lengths():
    w = directions(5 * 16 + 3, 16, generator=seeded())
    for block in w.split(16):
        gram = block @ block.T
        close(gram, torch.diag(gram.diagonal()))
    lengths = torch.cat([directions(160, 16, generator=seeded(n)).norm(dim=-1) for n in range(20)]).square()
    assert abs(float(lengths.mean()) - 16) < 0.4 and abs(float(lengths.var()) - 32) < 4  # chi-squared: d, 2d
    plain = directions(64, 16, orthogonal=False, generator=seeded())
    assert float((plain[:16] @ plain[:16].T).fill_diagonal_(0).abs().max()) > 1


def test_directions_are_haar():
    """E[trace] = 0 and E[trace^2] = 1 for a Haar matrix; the bare Q of LAPACK's QR has a trace far from 0."""
    n, d = 2000, 4
    blocks = F.normalize(directions(n * d, d, generator=seeded()), dim=-1).view(n, d, d)
    trace = blocks.diagonal(dim1=1, dim2=2).sum(-1)
    assert abs(float(trace.mean())) < 4 / math.sqrt(n)
    assert abs(float(trace.square().mean()) - 1) < 4 * math.sqrt(2 / n)
    bare = torch.linalg.qr(torch.randn(n, d, d, generator=seeded(), dtype=torch.float64))[0]
    assert abs(float(bare.diagonal(dim1=1, dim2=2).sum(-1).mean())) > 20 / math.sqrt(n)


def test_redraw():
    q, k, v = tensors(9)
    module = Performer(D, 16, redraw_interval=2)
    seen = []
    for _ in range(5):
        module(q, k, v)
        seen.append(module.projection.clone())
    same = [bool((a == b).all()) for a, b in pairwise(seen)]
    assert same == [True, False, True, False]
    module.eval()
    for _ in range(3):
        module(q, k, v)
        assert (module.projection == seen[-1]).all()
    before = module.projection.clone()
    module.redraw(seeded(7))
    assert not (module.projection == before).any()
    assert (module.projection == Performer(D, 16, generator=seeded(7)).projection).all()
    with pytest.raises(RuntimeError, match="no random directions"):
        ReLUFeatures().redraw()


def test_activation_checkpointing_uses_the_same_directions():
    q, k, v = (t.requires_grad_() for t in tensors(9))
    module = Performer(D, 16, redraw_interval=1)
    out = torch.utils.checkpoint.checkpoint(module, q, k, v, use_reentrant=False)
    drawn = module.projection.clone()
    found = torch.autograd.grad(out.sin().sum(), q)[0]
    assert (module.projection == drawn).all()
    module.eval()
    close(found, torch.autograd.grad(module(q, k, v).sin().sum(), q)[0])


def test_state_dict_and_dtypes():
    q, k, v = tensors(9)
    module = Performer(D, 16)
    other = Performer(D, 16)
    assert not torch.equal(other(q, k, v), module(q, k, v))
    other.load_state_dict(module.state_dict())
    close(other(q, k, v), module(q, k, v), 0)
    drawn = module.projection.clone()
    half = copy.deepcopy(module).to(torch.bfloat16)
    assert half.projection.dtype == torch.float32 and (half.projection == drawn).all()
    assert module.double().projection.dtype == torch.float64
    assert half(*(t.bfloat16() for t in (q, k, v))).dtype == torch.bfloat16
    assert half(q, k, v).dtype == torch.float64  # the input's dtype, not the buffer's
    with torch.autocast("cpu", torch.bfloat16):
        assert half(q.float(), k.float(), v.float()).dtype == torch.bfloat16


def test_defaults():
    assert Performer(64).num_features == 256 and Performer(64).projection.shape == (256, 64)
    assert repr(Performer(64, 100)) == "Performer(dim=64, num_features=100)"
    assert regard.features.LinearAttention is LinearAttention


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Performer(0), "dim: expected a positive int"),
        (lambda: Performer(8, 0), "num_features: expected a positive int"),
        (lambda: Performer(8, redraw_interval=0), "redraw_interval: expected a positive int"),
        (lambda: ReLUFeatures(8), "dim and num_features, or neither"),
        (lambda: LinearAttention(chunk=0), "chunk: expected a positive int"),
        (lambda: Performer(4)(*tensors(3)), "head size D=4, as Performer"),
        (lambda: LinearAttention()(*tensors(3, Hkv=2)), "key: expected 4 heads"),
        (lambda: LinearAttention()(*tensors(3), scale=math.nan), "scale: expected a finite number"),
        (
            lambda: LinearAttention()(*tensors(3), key_mask=torch.ones(2, 4, dtype=torch.bool)),
            "key_mask: expected shape",
        ),
        (lambda: LinearAttention()(*tensors(3), alignment="left"), "alignment: expected"),
        (
            lambda: LinearAttention()(*tensors(4, 3), True, alignment="bottom_right"),
            "alignment: expected no more",
        ),
        (
            lambda: LinearAttention()(*tensors(3), return_aux=AuxRequest(entropy=True)),
            "entropy needs every single weight",
        ),
        (lambda: LinearAttention().step(*tensors(3, 4)), "key: expected 3 rows"),
        (lambda: LinearAttention().step(*tensors(3), (1, 2)), "state: expected what step gave"),
    ],
)
def test_errors_name_the_argument(make, message):
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(TypeError, match="key_mask: expected a bool tensor"):
        LinearAttention()(*tensors(3), key_mask=torch.ones(3))
