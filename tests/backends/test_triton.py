"""The Triton backend where there is no GPU: it declines, and its kernels are interpreted in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard
from regard import Blocks, Causal, Documents, Prefix, Selected, Transport, Window
from regard.backends.triton import launch
from regard.backends.triton.schedule import bounds, schedule

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_gpu_it_declines():
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(NotImplementedError, match='backend "triton" cannot serve this problem'):
        regard.attention(q, q, q, backend="triton")


def test_importing_regard_does_not_import_triton():
    code = "import sys, regard; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_interpreted_kernels():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout.splitlines()[-1]


def masked_problems(Tq, Tk):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 3, (2, Tk), generator=g)
    return {
        "documents": Transport(prior=Documents(ids.sort(-1).values[:, :Tq], ids.sort(-1).values)),
        "documents in any order": Transport(prior=Documents(ids[:, :Tq], ids)),
        "one document": Transport(prior=Documents(torch.zeros(Tk, dtype=torch.long))),
        "selected": Transport(prior=Selected(torch.randint(-1, 5, (2, Tq, 2), generator=g), Tk // 5 + 1)),
        "single selected keys": Transport(prior=Selected(torch.randint(-1, Tk, (2, Tq, 3), generator=g))),
        "union in a band": Transport(prior=(Prefix(70) | Window(6, 3)) * Window(150, 0, alignment="top_left")),
        "blocks": Transport(prior=Blocks(torch.rand(4, 4, generator=g) < 0.5, -(-Tk // 4)) | Window(3, 1)),
    }


@pytest.mark.parametrize("size", [(64, 64), (128, 32), (32, 128), (16, 64)])
def test_a_schedule_leaves_out_no_pair(size):
    """A tile that is left out has no admissible pair, and one that is called full has no other."""
    BM, BN = size
    skipped = full = 0
    for Tq, Tk in ((200, 200), (130, 257)):
        q, k = torch.zeros(2, 2, Tq, 4), torch.zeros(2, 2, Tk, 4)
        problems = {} if Tq != Tk else masked_problems(Tq, Tk)
        mask = torch.rand(1, 2, Tq, Tk, generator=torch.Generator().manual_seed(1)) < 0.5
        mask[..., :128, :128], mask[..., 64:] = True, mask[..., 64:] & (torch.arange(Tk - 64) > 90)
        problems["mask"] = Transport(prior=Causal("top_left"))
        for name, problem in problems.items():
            form = regard.lowering.lower(q, k, k, mask if name == "mask" else None, problem=problem)
            assert launch.parts(form), name
            admissible = form.admissible(Tq, Tk, q.device).expand(2, 2, Tq, Tk)
            pad = torch.nn.functional.pad(admissible.float(), (0, -Tk % BN, 0, -Tq % BM))
            tiles = pad.unflatten(3, (-1, BN)).unflatten(2, (-1, BM))
            some, every = (t.expand(2, 2, *t.shape[2:]) for t in bounds(form, BM, BN))
            assert some[tiles.amax((3, 5)) > 0].all(), name
            assert (tiles.amin((3, 5))[every] == 1).all(), name
            skipped, full = skipped + int((~some).sum()), full + int((some & every).sum())
            order, counts = schedule(form, BM, BN, by_key=True)
            assert torch.equal(counts[..., 1].expand(2, 2, -1), some.mT.sum(-1)), name
            assert order.shape[2:] == (-(-Tk // BN), -(-Tq // BM)), name
    assert skipped and full  # else nothing was left out


def test_a_prior_that_is_a_function_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q = torch.randn(1, 1, 4, 8)
    problem = Transport(prior=regard.prior(lambda b, h, i, j: -(i - j).abs() * 0.1, alignment="top_left"))
    with pytest.raises(NotImplementedError, match="no kernel for a prior that is a function"):
        regard.attention(q, q, q, problem=problem, backend="triton")
