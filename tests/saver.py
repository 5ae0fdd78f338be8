"""Saves one of two checkpoints over and over until it is killed, for tests that kill it.

Each line of the input, `<folder> <number>`, starts such a child; its process id is printed, and how
it ended. Starting Python anew for every kill would take most of the time.
"""

import os
import sys

import numpy as np

import fewbit


def tree(number):
    """Of `number` alone: several leaves of half a megabyte."""
    rng = np.random.default_rng(number)
    leaves = {f"w{i}": rng.integers(0, 255, (512, 1024), np.uint8) for i in range(4)}
    return {**leaves, "number": number}


def content_matches(params):
    """Whether every leaf is that of the number the tree says it is."""
    wanted = tree(params["number"])
    return all((np.asarray(params[key]) == wanted[key]).all() for key in wanted)


def save_for_ever(folder, first):
    trees = [tree(first), tree(first + 1)]
    print("ready", flush=True)
    while True:
        for one in trees:
            fewbit.save(folder, one, shard_bytes=1_000_000)


if __name__ == "__main__":
    for line in sys.stdin:
        folder, _, first = line.strip().rpartition(" ")
        child = os.fork()
        if not child:
            try:
                save_for_ever(folder, int(first))
            finally:
                os._exit(1)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(-os.WTERMSIG(status) if os.WIFSIGNALED(status) else status, flush=True)
