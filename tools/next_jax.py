"""Prints what to install for JAX's newest pre-release, or nothing where none in the registry is
newer than the newest release; says on stderr which. For `make test-next`.
"""

import subprocess
import sys

from packaging.version import Version

_MSG_NONE = "no pre-release newer than {name} {newest} in the registry"


def listed(name):
    """The versions of a package for this Python, pre-releases too, as pip tells them."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "--pre", name],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"pip cannot list the versions of {name}:\n{done.stderr}")
    return read(done.stdout)


def read(text):
    """The versions in what `pip index versions` prints.

    >>> read("jax (0.9.1)\\nAvailable versions: 0.10.0rc1, 0.9.1, 0.9.0\\n  INSTALLED: 0.9.1")
    [<Version('0.10.0rc1')>, <Version('0.9.1')>, <Version('0.9.0')>]
    """
    start = "Available versions:"
    line = next(line for line in text.splitlines() if line.startswith(start))
    return [Version(version) for version in line.removeprefix(start).replace(" ", "").split(",")]


def pre_release(versions):
    """(the newest pre-release, or None if none is newer than the newest release; that release).

    >>> pre_release([Version("0.9.1"), Version("0.10.0rc1"), Version("0.10.0rc2")])
    (<Version('0.10.0rc2')>, <Version('0.9.1')>)
    >>> pre_release([Version("0.10.0rc2"), Version("0.10.0")])
    (None, <Version('0.10.0')>)
    """
    newest = max(version for version in versions if not version.is_prerelease)
    later = max(versions)
    return (later if later > newest else None), newest


def main():
    """Prints one requirement for jax and one for jaxlib, or nothing."""
    found, newest = pre_release(listed("jax"))
    if found is None:
        print(_MSG_NONE.format(name="JAX", newest=newest), file=sys.stderr)
        return
    # It may be meant to run with the released jaxlib.
    compiled, released = pre_release(listed("jaxlib"))
    print(f"jax {found} is newer than {newest}", file=sys.stderr)
    print(f"jax=={found}", f"jaxlib=={compiled or released}", sep="\n")


if __name__ == "__main__":
    main()
