"""Peak memory of a process."""

import sys

import pytest

# Code for a program in a new process: the peak of its memory in MiB. (`ru_maxrss` would include that of its parent.)
PEAK = """
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
"""


reads_peak = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads VmHWM")
