"""`regard doctor --device`: the check of a backend on a device, its file, and what "auto" makes of it."""

import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from regard.backends import BACKENDS
from regard.backends.triton import device_record, launch
from regard.cli import app, device
from regard.device_cases import PROBLEMS, cases
from regard.device_check import check

CPU = torch.device("cpu")
SMALL = [case for case in cases(small=True) if case.name in ("softmax", "window, ALiBi, sink", "entmax 1.5")]


@pytest.fixture
def records(tmp_path, monkeypatch):
    """An empty cache directory."""
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    device_record.forget()
    yield tmp_path
    device_record.forget()


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_every_case_passes(backend):
    if backend == "native":
        pytest.importorskip("regard._native", reason="the native engine was not built")
    results = list(check(CPU, backend, list(cases(small=True))))
    assert [result.as_dict() for result in results if not result.passed] == []
    declined = [result.case for result in results if result.declined is not None]
    assert len(results) == len(PROBLEMS)
    assert len(declined) == (0 if backend == "torch" else 1)  # soft top-m, which the native engine has no kernel for


def test_the_whole_list_has_every_dtype_and_more_than_one_tile():
    found = list(cases())
    assert {case.dtype for case in found} == {torch.float32, torch.bfloat16, torch.float16}
    assert min(case.shape.Tk for case in found) > 128 and min(case.shape.Tq for case in found) == 1
    assert len({case.label for case in found}) == len(found)


@pytest.mark.parametrize(("method", "name"), [("forward", "out"), ("backward", "key")])
def test_a_result_that_is_wrong_by_a_thousandth_fails(method, name, monkeypatch):
    pytest.importorskip("regard._native", reason="the native engine was not built")
    backend = BACKENDS["native"]
    plain = getattr(backend, method)

    def wrong(*arguments):
        results = plain(*arguments)
        results[name] *= 1.001
        return results

    monkeypatch.setattr(backend, method, wrong)
    found = list(check(CPU, "native", SMALL))
    assert [result.result for result in found] == ["out" if name == "out" else "gradient of key"] * len(SMALL)
    assert not any(result.passed for result in found)


def test_other_bits_in_the_second_run_fail(monkeypatch):
    pytest.importorskip("regard._native", reason="the native engine was not built")
    backend = BACKENDS["native"]
    plain, calls = backend.forward, []

    def varying(form, names):
        calls.append(1)
        results = plain(form, names)
        results["out"] += len(calls) * 1e-7
        return results

    monkeypatch.setattr(backend, "forward", varying)
    found = next(check(CPU, "native", SMALL))
    assert not found.same_bits and not found.passed and found.error <= found.allowed


def test_what_a_kernel_raises_is_a_finding(monkeypatch):
    def broken(*_):
        raise RuntimeError("out of resource\nmore lines")

    monkeypatch.setattr(BACKENDS["torch"], "forward", broken)
    found = next(check(CPU, "torch", SMALL))
    assert found.raised == "RuntimeError: out of resource" and not found.passed


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_of_a_device(records, monkeypatch):
    reason = device_record.not_checked(CPU)
    assert reason is not None and "was not checked on this device, cpu (regard doctor --device cpu" in reason
    place = device_record.save(CPU, {"passed": True, "cases": []})
    assert place == records / "devices" / "cpu.json" and json.loads(place.read_text())["device"] == "cpu"
    assert device_record.not_checked(CPU) is None
    monkeypatch.setattr(torch, "__version__", "2.99")
    device_record.forget()
    assert "with another version of torch" in str(device_record.not_checked(CPU))


def test_a_file_of_a_failed_check_or_without_meaning(records):
    device_record.save(CPU, {"passed": False})
    assert "failed its check on this device" in str(device_record.not_checked(CPU))
    for text in ("{", "[]", '{"passed": true}'):
        device_record.path(CPU).write_text(text)
        device_record.forget()
        assert "cannot read" in str(device_record.not_checked(CPU)), text


def test_auto_takes_the_kernels_only_where_they_were_checked(records, monkeypatch):
    monkeypatch.delenv("REGARD_TRITON", raising=False)
    query = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))  # PyTorch may have been built without CUDA
    form, triton = SimpleNamespace(query=query), BACKENDS["triton"]
    monkeypatch.setattr(device_record, "device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert "was not checked on this device, NVIDIA A100-SXM4-80GB (regard doctor --device cuda" in str(
        triton.unwise(form, ("out",))
    )
    place = device_record.save(query.device, {"passed": True})
    assert place.name == "nvidia-a100-sxm4-80gb.json"
    assert triton.unwise(form, ("out",)) is None
    device_record.save(query.device, {"passed": False})
    assert "failed its check" in str(triton.unwise(form, ("out",)))
    monkeypatch.setenv("REGARD_TRITON", "1")
    assert triton.unwise(form, ("out",)) is None


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_on_the_cpu(records, monkeypatch):
    pytest.importorskip("regard._native", reason="the native engine was not built")
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(device, "cases", lambda small: SMALL)
    monkeypatch.setattr(device, "timings", lambda *_: [])
    done = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--json"])
    facts = json.loads(done.stdout)
    assert done.exit_code == 0 and facts["passed"] and facts["backend"] == "native"
    assert not device_record.path(CPU).exists()  # "auto" takes the native engine anyway
    shown = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert "3 of 3 cases right and the same bits twice; 0 declined" in shown.stdout


def test_the_command_shows_what_failed(records, monkeypatch):
    pytest.importorskip("regard._native", reason="the native engine was not built")
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(device, "cases", lambda small: SMALL)
    plain = BACKENDS["native"].backward

    def wrong(*arguments):
        results = plain(*arguments)
        results["key"] *= 1.001
        return results

    monkeypatch.setattr(BACKENDS["native"], "backward", wrong)
    done = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert done.exit_code == 1 and "0 of 3 cases right" in done.stdout and "gradient of key" in done.stdout


@pytest.mark.parametrize("name", ["cuda:99", "rocm", "meta", "nothing"])
def test_a_device_that_is_not_there(name):
    if name == "rocm" and torch.version.hip is not None:
        pytest.skip("PyTorch was built for ROCm")
    done = CliRunner().invoke(app, ["doctor", "--device", name])
    assert done.exit_code == 2 and "--device: expected" in done.stderr
