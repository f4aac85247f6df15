"""Errors that no other test of their subject reaches: each names the argument, what was expected and what came."""

import json

import pytest
import torch

import regard
from regard import FDivergence, LowRank, Transport, geometry
from regard.compiled.library import Unavailable, checked
from regard.estimation import calibrate
from regard.features import LinearAttention
from regard.hf.inputs import batches
from regard.lab.claims.claim import all_match
from regard.lab.judging import interval, verdict

Q = torch.zeros(1, 4, 3, 8)  # [B, H, Tq, D]
K = torch.zeros(1, 2, 5, 8)


def features_of_another_width():
    features = LinearAttention()
    _, state = features.step(Q[:, :, :1], Q[:, :, :1], Q[:, :, :1])
    features.step(Q[:, :, :1], Q[:, :, :1], Q[:, :, :1, :6], state)


def wrong_slope():
    FDivergence(lambda r: (r - 1) ** 2 / 2, lambda t: (t + 1).relu(), lambda t: 2 * (t > -1).to(t), lower=-1.0)


ERRORS = {
    "heads of value": (
        lambda: regard.attention(Q, Q, torch.zeros(1, 3, 3, 8)),
        r"value: expected 4 heads, as key, got \[1, 3, 3, 8\]",
    ),
    "heads of key": (
        lambda: regard.attention(Q, K, K),
        r"key: expected 4 heads, as query, got \[1, 2, 5, 8\] \(enable_gqa=True",
    ),
    "dtype of key": (lambda: regard.attention(Q, Q.double(), Q), "key: expected torch.float32, as query, got"),
    "rows of a factor": (
        lambda: regard.attention(Q, Q, Q, problem=Transport(prior=LowRank(torch.ones(1, 2), torch.ones(3, 2)))),
        r"LowRank\(query_factor\): expected T=3 rows, got \[1, 2\]",
    ),
    "backend of features": (
        lambda: LinearAttention()(Q, Q, Q, backend="sdpa"),
        'backend: expected "auto", "native" or "torch", got \'sdpa\'',
    ),
    "value in a later step": (features_of_another_width, r"value: expected Dv=8, as before, got \[1, 4, 1, 6\]"),
    "tangents": (
        lambda: geometry.jvp(Q, Q, Q, (Q, Q)),
        r"tangents: expected \(dq, dk, dv\), got \(Tensor\(float32, \[1, 4, 3, 8\]\), Tensor",
    ),
    "per": (
        lambda: calibrate(torch.zeros(2, 3), torch.tensor([0, 1]), per="row"),
        'per: expected "global", "head" or "key", got \'row\'',
    ),
    "targets": (
        lambda: calibrate(torch.zeros(2, 3), torch.tensor([0, 1, 2])),
        r"targets: expected integers of shape \[2\], got",
    ),
    "version": (
        lambda: Transport.from_json(json.dumps(json.loads(Transport().to_json()) | {"version": 99})),
        "version: expected .*, got 99; another version of regard wrote it",
    ),
    "inputs": (lambda: list(batches(7)), "inputs: expected token ids .*, got 7"),
    "an item of inputs": (lambda: list(batches([[0.5]])), r"inputs: expected token ids .*, got"),
    "slope": (
        wrong_slope,
        r"slope.*: expected the derivative of link, 1.*, got 2",
    ),
    "printed numbers": (lambda: all_match(["1.0"], [1.0, 2.0]), "printed: expected 2 numbers, got 1"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_error_names_the_argument(name):
    function, message = ERRORS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        function()


def test_no_code_is_loaded_from_a_directory_that_others_can_write(tmp_path):
    ours, link, file = tmp_path / "ours", tmp_path / "link", tmp_path / "file"
    assert checked(ours) == ours
    link.symlink_to(ours)
    file.write_text("")
    for path, reason in ((link, "is a symbolic link"), (file, "is not a directory")):
        with pytest.raises(Unavailable, match=f"the cache {path} {reason}, so no code is loaded from it"):
            checked(path)
    ours.chmod(0o770)
    with pytest.raises(Unavailable, match="can be written by others"):
        checked(ours)


def test_an_interval_the_wrong_way_round():
    with pytest.raises(ValueError, match=r"claimed: expected \(low, high\), got \(2.0, 1.0\)"):
        verdict(interval([1.0, 1.1, 0.9]), (2.0, 1.0))
