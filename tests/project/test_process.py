"""The native engine beside other activity of its process: threads, signals, forks, workers, and its own threads."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import regard

engine = pytest.importorskip("regard._native", reason="the native engine was not built")
ROOT = Path(__file__).resolve().parents[2]


def python(script: str, timeout: float = 120) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_and_native_calls_from_several_threads():
    q, k, v = (torch.randn(1, 4, 200, 32, requires_grad=True) for _ in range(3))
    a = torch.randn(200, 200)

    def work():
        out = regard.attention(q, k, v, is_causal=True, backend="native")
        product = a @ a  # PyTorch's own threads run between the calls
        return [out, product, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    expected, failures = work(), []

    def check():
        for _ in range(10):
            for found, truth in zip(work(), expected, strict=True):
                if not torch.allclose(found, truth, rtol=1e-5, atol=1e-4):
                    failures.append((found - truth).abs().max())

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


INTERRUPTED = """
import os, signal, threading, time, torch, regard
from regard.backends import BACKENDS
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is born with it ignored
torch.set_num_threads(2)
kind = "{kind}"
q = torch.randn(1, {heads}, {length}, 64, requires_grad=kind == "backward")
regard.attention(q[:, :, :32], q[:, :, :32], q[:, :, :32], backend="native")
if kind == "backward":
    out = regard.attention(q, q, q, backend="native")
sent = []
def send():
    time.sleep(0.3)
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=send).start()
began = time.monotonic()
try:
    if kind == "backward":
        out.sum().backward()
    elif kind == "reading":
        price = {{name: torch.zeros(q.shape[:3]) for name in ("dual", "peak", "rest")}}
        native = BACKENDS["native"]
        plain, native.forward = native.forward, lambda form, names: price  # what is to be interrupted comes after it
        try:
            for _ in range(100):
                regard.topk(q, q, 4)
        finally:
            native.forward = plain
    else:
        for _ in range(100):
            regard.attention(q, q, q, backend="native")
    raise SystemExit("was not interrupted")
except KeyboardInterrupt:
    print(time.monotonic() - sent[0])
small = torch.randn(1, 2, 50, 8)
right = regard.attention(small, small, small, backend="torch")
assert torch.allclose(regard.attention(small, small, small, backend="native"), right, atol=1e-5)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("kind", ["forward", "backward", "reading"])
def test_ctrl_c_ends_a_long_call(kind):
    # Calls of five seconds and more on two cores. The interrupt waits for jobs that have begun, not for the whole call.
    heads, length = (8, 12000) if kind == "backward" else (4, 40000)
    waited = float(python(INTERRUPTED.format(heads=heads, length=length, kind=kind)))
    assert waited < 3, waited


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_call_continues_after_a_handler_that_does_not_raise():
    script = """
import os, signal, threading, time, torch, regard
calls = []
signal.signal(signal.SIGUSR1, lambda *_: calls.append(1))
q = torch.randn(1, 4, 6000, 64)
expected = regard.attention(q, q, q, backend="native")
threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
for _ in range(3):
    assert torch.equal(regard.attention(q, q, q, backend="native"), expected)
assert calls == [1]
"""
    python(script)


WORKERS = """
import torch, regard
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, n):
        g = torch.Generator().manual_seed(n)
        q = torch.randn(4, 300, 16, generator=g)
        return regard.attention(q, q, q, is_causal=True, backend="native")

if __name__ == "__main__":
    torch.set_num_threads(2)
    here = [Rows()[n] for n in range(8)]  # the engine's threads exist before the workers do
    loader = DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="{how}", timeout=90)
    there = torch.cat(list(loader))
    assert torch.equal(there, torch.stack(here)), (there - torch.stack(here)).abs().max()
    assert torch.equal(torch.stack([Rows()[n] for n in range(8)]), torch.stack(here))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers_of_a_data_loader(how, tmp_path):
    script = tmp_path / "workers.py"  # spawn imports the main module again: it must be a file
    script.write_text(WORKERS.replace("{how}", how))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr


def test_a_build_without_openmp_gives_the_same_results(tmp_path):
    """The engine built with std::thread instead of OpenMP: bit for bit the same (on one instruction set)."""
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if cmake is None or shutil.which("c++") is None:
        pytest.skip("no compiler here")
    options = ["-DREGARD_THREADS=std", "-DREGARD_BASELINE_ONLY=ON", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run([cmake, "-S", str(ROOT), "-B", str(tmp_path), *options], check=True, capture_output=True)
    subprocess.run([cmake, "--build", str(tmp_path), "-j2"], check=True, capture_output=True)
    (built,) = tmp_path.glob("_native*")
    script = """
import sys, torch
sys.path.insert(0, {tests!r})
import conftest, regard
from regard import AuxRequest
from regard.backends.native import engine
engine.extension()[0].use("baseline")
torch.set_num_threads(3)
torch.manual_seed(0)
found = []
for Tq, Tk, Hkv in ((300, 300, 4), (2, 3000, 1), (130, 70, 2)):
    q, k, v = torch.randn(2, 4, Tq, 16), torch.randn(2, Hkv, Tk, 16), torch.randn(2, Hkv, Tk, 16)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out, aux = regard.attention(q, k, v, enable_gqa=True, backend="native", return_aux=AuxRequest.all())
    found += [out.detach(), aux.entropy.detach(), aux.key_mass, *torch.autograd.grad(out.square().sum(), (q, k, v))]
torch.save([engine.extension()[0].threading(), found], sys.argv[1])
""".format(tests=str(ROOT / "tests"))
    results = []
    for name, environment in {"own": {"REGARD_ENGINE": str(built)}, "usual": {}}.items():
        environment = {n: x for n, x in os.environ.items() if n != "REGARD_ENGINE"} | environment
        command = [sys.executable, "-c", script, str(tmp_path / name)]
        subprocess.run(command, check=True, env=environment, timeout=120)
        results.append(torch.load(tmp_path / name))
    assert results[0][0] == "std"
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(a, b)
