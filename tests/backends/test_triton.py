"""The Triton backend where there is no GPU: it declines, and its kernels are interpreted in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard

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
