"""What `import fewbit` costs on top of `import jax`: the smallest of several fresh processes.

The bar is 0.3 s. A test would be at the mercy of whatever else the machine does, so this is a
measurement (`make bench`) and the tests check the cause instead: which modules get imported.
"""

import subprocess
import sys

ROUNDS = 7
BAR_SECONDS = 0.3
CODE = """
import time
import jax
start = time.perf_counter()
import fewbit
print(time.perf_counter() - start)
"""


def seconds():
    """One fresh process: the time of `import fewbit` after `import jax`."""
    done = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True)
    return float(done.stdout)


def main():
    times = sorted(seconds() for _ in range(ROUNDS))
    print(
        f"import fewbit after import jax: {times[0]:.3f} s "
        f"(smallest of {ROUNDS}, median {times[ROUNDS // 2]:.3f} s; bar {BAR_SECONDS} s)"
    )


if __name__ == "__main__":
    main()
