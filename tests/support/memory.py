"""Peak memory of a process."""

import sys

import pytest

# For a program of its own: the most memory that it has had, in MiB. (`ru_maxrss` would begin with its parent's.)
PEAK = """
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
"""


reads_peak = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads VmHWM")
