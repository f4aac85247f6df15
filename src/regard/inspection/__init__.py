"""See inside a model: `inspect` runs it over inputs, `watch` records your own loop; both give an `Inspection`.
`Monitor` records a training run.

The files, in the order in which a call of `regard inspect MODEL` passes through them:

    command.py      reads the options and the text, loads the model with `regard.hf.load`
    run.py          `inspect` and `watch`: the loop over the inputs, and when the run file is written
    progress.py     which layer of which sequence is being recorded, on the terminal
    recorder.py     `Recorder`: computes each attention call of the model (an `hf.Interception` passes it on) and
                    measures it
    patterns.py     weights on the query's own, previous and copied tokens; which keys a query may read
    views.py        details of one sequence: a window and a map of the plan, top keys, paths along the temperature
    token_texts.py  the text of tokens; a character of several tokens is one text
    layers.py       `Layer`: the sums by head and position bin
    provenance.py   the model, the versions and the machine
    result.py       `Inspection`: tables and JSON
    run_file.py     the run file, written and read
    rules.py        `Rule` and `Finding`, shared by inspections and training runs
    head_rules.py   the named rules about a head, and their `Thresholds`
    findings.py     applies the rules to a record; the verdict in one line
    report.py       the HTML page, from page.html, page.css, plots.js, heads.js, sequence.js, panel.js and page.js

A training run passes through:

    monitor.py      `Monitor`: which steps are sampled, the loss, checkpoints
    callback.py     `MonitorCallback`: a monitor that transformers' Trainer calls
    listeners.py    what listens to the model: a `Recorder`, or hooks on modules that call `regard.attention`
    processes.py    sums over the processes of a distributed run
    metrics.py      quantiles over heads
    events.py       the named rules about a training run
    journal.py      the run file, written and read
    trackers.py     TensorBoard and Weights & Biases
    report.py       the HTML page, from training.html, page.css, plots.js and training.js

numbers.py formats numbers for JSON and messages. The package is above `regard.hf`, which it uses through its public
names.
"""

from .head_rules import Thresholds
from .monitor import Monitor
from .result import Inspection
from .rules import Finding
from .run import inspect, watch

__all__ = ["Finding", "Inspection", "Monitor", "Thresholds", "inspect", "watch"]
