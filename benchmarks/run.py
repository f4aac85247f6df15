"""All benchmarks: regard's native engine against PyTorch and other packages, in one process.

    python benchmarks/run.py [--full] [--only decode] [--seconds 3] [--threads 2] [--device cuda]

Before a case is timed, the output (and gradients) of every implementation are compared with float64. One that is wrong
is not timed, and the run fails. Then all implementations run in every round. The table shows medians and the middle
80 % of the rounds. "× regard" is an implementation's time divided by regard's time in the same round: above 1, regard
is faster. "sgemm" is the share of the speed of torch.mm, measured together with each case, and "FMA" that of
multiply-adds on registers. "MiB" is the peak memory beyond the inputs, outputs included, in a process of its own. A
target that is not reached does not fail the run.

With --device cuda the Triton kernels are compared instead, in bfloat16, with PyTorch's kernels, FlexAttention and, if
it is installed, adasplash. This part was never run on a GPU by the authors.

Results are written to benchmarks/results/: results.csv, results.md, ratios.svg. After Ctrl-C the results so far are
written.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

import contest
import measure
import regard
import report
import suite
from contest import Case, Skip
from measure import Spread
from regard import doctor
from report import Row

CALLS = 50  # tiny calls per measurement


def machine() -> dict[str, str]:
    facts, engine = doctor.machine(), doctor.engine()
    device = {"device": torch.cuda.get_device_name(contest.DEVICE)} if contest.DEVICE.type == "cuda" else {}
    return device | {
        "cpu": facts["cpu"],
        "cores": str(facts["cores"]),
        "threads": f"{torch.get_num_threads()} threads",
        "isa": engine.get("isa", "no native engine"),
        "regard": f"regard {regard.__version__}",
        "torch": f"PyTorch {torch.__version__}",
        "python": f"Python {doctor.versions()['python']}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


class Bench:
    """Runs the cases and collects failures in `wrong`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.gpu = contest.DEVICE.type == "cuda"
        self.fma = None if self.gpu else measure.fma_rate()
        self.wrong: list[str] = []

    def row(self, case: Case, implementation: str) -> Row:
        dtype = "bfloat16" if case.half else "float32"
        return Row(case.name, implementation, case.kind, case.T, case.Tq, case.H, case.Hkv or case.H, case.D, dtype)

    def compare(self, entry: suite.Entry) -> Iterator[Row]:
        """Time regard and its peers in interleaved rounds."""
        case = entry.case
        inputs = case.inputs()
        jobs, rows = {}, {}
        for implementation in ("regard", *case.peers):
            row = rows[implementation] = self.row(case, implementation)
            try:
                attention, reference = contest.enter(implementation, case)
                row.error = contest.error(attention, reference, inputs)
            except Skip as reason:
                row.note = str(reason)
                if case.family != "softmax":
                    row.note += f" (queries x {case.sharpness:g})"
                if implementation == "regard":  # nothing to compare with
                    yield row
                    return
                continue
            if not row.error <= contest.tolerance(reference):
                row.note = f"WRONG by {row.error:.1e}: not timed"
                self.wrong.append(
                    f"{case.name}, T = {case.T}, {case.kind}: {implementation} is wrong by {row.error:.1e}"
                )
                continue
            jobs[implementation] = contest.runner(attention, case, inputs)
        density = None
        targets = dict(entry.targets)
        if case.family != "softmax" and "regard" in jobs:
            density = contest.density(case, inputs)
            rows["regard"].note = f"queries x {case.sharpness:g}: density {density:.1%}"
            if density < 0.05:
                targets |= entry.sparse
        sgemm = measure.matrix_rate(5, contest.DEVICE, inputs[0].dtype)
        bandwidth = measure.read_bandwidth() if case.name == "decode" and not self.gpu else None
        times = measure.interleave(jobs, self.seconds, least=3 if case.T > 8192 else 5)
        for implementation, row in rows.items():
            row.density = density
            if implementation in times:
                self._fill(row, case, times, implementation, sgemm, bandwidth)
                if implementation in targets and row.ratio is not None:
                    row.judge(f">= {targets[implementation]:g}", row.ratio >= targets[implementation])
                if entry.memory and implementation != "FlexAttention":  # its peak would be that of the compiler
                    row.extra_mib = measure.memory(case, implementation, timeout=300)
            yield row

    def _fill(
        self,
        row: Row,
        case: Case,
        times: dict[str, list[float]],
        implementation: str,
        sgemm: float,
        bandwidth: float | None,
    ) -> None:
        spread = Spread.of(times[implementation])
        row.time(spread)
        if implementation != "regard" and "regard" in times:
            row.ratios(Spread.of([a / b for a, b in zip(times[implementation], times["regard"], strict=True)]))
        reference = dataclasses.replace(case, **contest.IMPLEMENTATIONS[implementation][1])
        rate = reference.operations / spread.middle
        row.gflops = rate / 1e9
        if case.family == "softmax" and not case.Tq:  # otherwise matrix products do not dominate the time
            row.of_sgemm = rate / sgemm
            row.of_fma = rate / self.fma if self.fma else None
        if bandwidth is not None:
            size = 2 * case.Hkv * case.T * case.D * (2 if case.half else 4)
            row.of_bandwidth = size / spread.middle / bandwidth
            row.note = f"{row.dtype}, reads at {row.of_bandwidth:.0%} of {bandwidth / 1e9:.0f} GB/s"

    def telemetry(self, case: Case) -> Row:
        row, inputs = self.row(case, "regard"), case.inputs()
        quiet = dataclasses.replace(case, telemetry=False)
        on, off = (contest.runner(contest.ours(c), c, inputs) for c in (case, quiet))
        low, middle, high = measure.paired_cost(on, off, 3 * self.seconds)
        row.ratios(Spread(1 + low, 1 + middle, 1 + high))
        row.note = f"{middle:+.1%}, 95 % interval {low:+.1%} to {high:+.1%}"
        row.judge("<= 3 %", middle <= 0.03)
        if low <= 0.03 < high:
            row.note += " (the interval includes the target)"
        return row

    def memory(self, case: Case, limit: float) -> Row:
        row = self.row(case, "regard")
        row.extra_mib = measure.memory(case, "regard", timeout=600)
        if row.extra_mib is None:
            row.note = "could not be measured here"
        else:
            row.judge(f"< {limit:g} MiB", row.extra_mib < limit)
        return row

    def overhead(self, case: Case, backward: bool, limit: float | None) -> Iterator[Row]:
        inputs, jobs = case.inputs(), {}
        for implementation in ("regard", "SDPA"):
            attention, reference = contest.enter(implementation, case)
            if not (error := contest.error(attention, reference, inputs)) <= contest.tolerance(reference):
                self.wrong.append(f"{case.name}: {implementation} is wrong by {error:.1e}")
                return
            once = contest.runner(attention, case, inputs)
            if case.train and not backward:
                once = lambda attention=attention: attention(*inputs)  # noqa: E731
            jobs[implementation] = lambda once=once: [once() for _ in range(CALLS)]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so that starting a second thread is not measured
        times = measure.interleave(jobs, self.seconds / 2, least=20)
        torch.set_num_threads(threads)
        for implementation, spent in times.items():
            row = self.row(case, implementation)
            spread = Spread.of([t / CALLS for t in spent])
            row.time(spread)
            row.note = f"{1e6 * spread.middle:.0f} us a call"
            if implementation != "regard":
                row.ratios(Spread.of([a / b for a, b in zip(spent, times["regard"], strict=True)]))
            elif limit is not None:
                row.judge(f"<= {limit:g} us", 1e6 * spread.middle <= limit)
            yield row

    def bandwidth(self, rows: list[Row]) -> Iterator[Row]:
        """The bandwidth of decoding: for each length, the better one of the two element types."""
        found = [
            r for r in rows if r.case == "decode" and r.implementation == "regard" and r.of_bandwidth and r.Tq == 1
        ]
        for T in sorted({r.T for r in found if r.T <= 32768}):
            best = max((r for r in found if r.T == T), key=lambda r: r.of_bandwidth or 0)
            row = Row("decode, bandwidth", "regard", T=T, D=best.D, dtype=best.dtype, of_bandwidth=best.of_bandwidth)
            row.note = f"{best.of_bandwidth:.0%} of the read bandwidth, {best.dtype}"
            row.judge(">= 80 %", (best.of_bandwidth or 0) >= 0.8)
            yield row


def steps(bench: Bench, full: bool, rows: list[Row]) -> list[tuple[str, Callable[[], Iterable[Row]]]]:
    """All measurements as (title, function that gives rows)."""

    def title(case: Case) -> str:
        return f"{case.name}{', bf16' if case.half else ''}, {case.kind}, T = {case.T}, D = {case.D}"

    plan: list[tuple[str, Callable[[], Iterable[Row]]]] = []
    if bench.gpu:
        return [(title(e.case), lambda e=e: bench.compare(e)) for e in suite.gpu(full)]
    plan += [(title(c), lambda c=c, b=b, n=n: bench.overhead(c, b, n)) for c, b, n in suite.OVERHEAD]
    plan += [(title(e.case), lambda e=e: bench.compare(e)) for e in suite.entries(full)]
    plan += [(title(c), lambda c=c: [bench.telemetry(c)]) for c in suite.telemetry(full)]
    plan += [(title(c), lambda c=c, n=n: [bench.memory(c, n)]) for c, n in suite.MEMORY]
    plan += [("decode, bandwidth", lambda: bench.bandwidth(rows))]
    return plan


def only_memory(order: str) -> None:
    """Print the peak of one run; runs in a process of its own."""
    wanted = json.loads(order)
    torch.set_num_threads(wanted["threads"])
    case = Case(**wanted["case"] | {"peers": tuple(wanted["case"]["peers"])})
    small = dataclasses.replace(case, T=64, Tq=0)
    warm_up, _ = contest.enter(wanted["implementation"], small)  # loads libraries, starts threads
    contest.runner(warm_up, small, small.inputs())()
    attention, _ = contest.enter(wanted["implementation"], case)
    job = contest.runner(attention, case, case.inputs())
    gc.collect()
    print(measure.peak_of(job))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every length, every peer (an hour or more)")
    parser.add_argument("--only", default="", help="only cases whose title contains this")
    parser.add_argument("--seconds", type=float, help="time for the rounds of one case (default: 1.5, full: 8)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="cuda or cuda:N: the kernels for GPUs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        only_memory(options.memory)
        return 0
    torch.set_num_threads(options.threads)
    if options.device != "cpu":
        if not torch.cuda.is_available():
            parser.error(f"--device: expected a device that is there, got {options.device}: PyTorch finds no GPU")
        contest.DEVICE, contest.BACKEND = torch.device(options.device), "triton"
    about, rows = machine(), []
    bench = Bench(options.seconds or (8 if options.full else 1.5))
    print("\n".join(f"# {name}: {value}" for name, value in about.items()))
    if not bench.gpu:
        rate, fma = measure.matrix_rate() / 1e9, (bench.fma or 0) / 1e9
        print(f"# torch.mm 2048: {rate:.0f} GF/s; multiply-adds: {fma:.0f} GF/s")
    print(report.heading(), flush=True)
    plan = [(title, step) for title, step in steps(bench, options.full, rows) if options.only in title]
    interrupted = False
    try:
        for n, (title, step) in enumerate(plan, 1):
            if sys.stderr.isatty():
                print(f"\r[{n}/{len(plan)}] {title} ...\033[K", end="", file=sys.stderr, flush=True)
            try:
                for row in step():
                    rows.append(row)
                    if sys.stderr.isatty():
                        print("\r\033[K", end="", file=sys.stderr, flush=True)
                    print(report.line(row), flush=True)
            except Exception as error:  # the other cases still run
                bench.wrong.append(f"{title}: {type(error).__name__}: {error}")
                print(f"FAILED: {bench.wrong[-1]}", flush=True)
    except KeyboardInterrupt:
        interrupted = True
        print("\nstopped: the results so far are kept", file=sys.stderr)
    print("\nwritten:", *report.write(rows, about, options.out))
    verdicts = [row.verdict for row in rows if row.verdict]
    print(f"targets: {verdicts.count('reached')} reached, {verdicts.count('not reached')} not reached")
    for wrong in bench.wrong:
        print(f"FAILED: {wrong}")
    return 130 if interrupted else int(bool(bench.wrong))


if __name__ == "__main__":
    sys.exit(main())
