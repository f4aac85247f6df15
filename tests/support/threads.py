"""Run a function with different numbers of threads."""

import torch


def with_threads(run):
    """The results of `run` with one, two and three threads."""
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run())
        return results
    finally:
        torch.set_num_threads(before)
