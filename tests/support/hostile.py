"""Puts hostile things in the place of files and reads them; run as a child, under limits.

Prints a line of JSON for each attempt: where, what, the error's class and its words. An attempt
that waits ends the child by its alarm, one that never ends by its limit of processor time.
"""

import io
import json
import os
import pathlib
import resource
import shutil
import signal
import socket
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np

import fewbit
from fewbit.cli._commands import keras_backend, load_names, load_rules
from fewbit.io._safetensors import SafetensorsFile, SafetensorsWriter

MEMORY = 2 * 2**30  # beyond what the libraries have mapped
SECONDS = 20  # of processor time for an attempt

F32 = np.ones((8, 8), np.float32)


def model(params, x):
    return x @ params["w"]


RULES = [fewbit.QuantizationRule(weight_qtype="int8")]
STATIC = fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
SHAPES, X = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}, jax.ShapeDtypeStruct((1, 8), "float32")


def tensors(path, array=F32):
    with SafetensorsWriter(path, [("w", "F32", array.shape)]) as writer:
        writer.write("w", array)
    return path


# --- places: what makes the files around it, and who reads them ----------------------------------


def checkpoint(folder):
    fewbit.save(folder / "m", {"w": jnp.ones(4)})
    return folder / "m"


def shard(folder):
    (found,) = checkpoint(folder).glob("*.safetensors")
    return found


def index(folder):
    tensors(folder / "model-1.safetensors")
    return folder / "model.safetensors.index.json"


def config(folder):
    tensors(folder / "model.safetensors")
    return folder / "config.json"


def statistics(folder):
    data = [np.ones((1, 8), np.float32)]
    found = fewbit.calibrate(model, [STATIC], {"w": F32}, data, progress=False)
    found.save(folder / "stats.npz")
    return folder / "stats.npz"


LORA = fewbit.plan(model, fewbit.LoraProvider(rank=2, alpha=4.0), {"w": F32}, np.ones((1, 8)))


def adapters(folder):
    params = fewbit.lora.init(LORA, {"w": jnp.asarray(F32)}, jax.random.key(0))
    fewbit.save_adapters(folder / "peft", params, LORA)
    return folder / "peft"


def orbax(folder):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax", {"w": jnp.asarray(F32)})
    return folder / "orbax" / "_METADATA"


def partial(folder):
    """What a run that was stopped leaves."""
    from fewbit.io.stream import _checkpoint

    def stop(*args):
        raise KeyboardInterrupt

    tensors(folder / "a.safetensors")
    real, _checkpoint._finished = _checkpoint._finished, stop
    try:
        stream(folder / "a.safetensors")
    except KeyboardInterrupt:
        _checkpoint._finished = real
    return folder / "out.partial"


def stream(source, folder=None):
    plan = fewbit.plan(model, RULES, SHAPES, X)
    target = (folder or source.parent) / "out"
    return fewbit.quantize_checkpoint(source, target, plan, progress=False)


PLACES = {
    "tensors": (lambda f: f / "a.safetensors", SafetensorsFile),
    "foreign tensors": (lambda f: f / "a.safetensors", fewbit.read_checkpoint),
    "source": (lambda f: f / "a.safetensors", stream),
    "source index": (index, stream),
    "index": (index, lambda path: fewbit.read_checkpoint(path.parent)),
    "config": (config, lambda path: fewbit.read_checkpoint(path.parent)),
    "named config": (
        lambda f: f / "mine.json",
        lambda path: fewbit.read_checkpoint({"w": F32}, config=path),
    ),
    "manifest": (
        lambda f: checkpoint(f) / "fewbit.json",
        lambda path: fewbit.load(path.parent).params,
    ),
    "manifest inspected": (
        lambda f: checkpoint(f) / "fewbit.json",
        lambda path: fewbit.inspect(path.parent),
    ),
    "shard": (shard, lambda path: fewbit.load(path.parent).params),
    "statistics": (statistics, fewbit.Statistics.load),
    "rules.yaml": (lambda f: f / "rules.yaml", fewbit.rules_from_yaml),
    "rules.json": (lambda f: f / "rules.json", fewbit.rules_from_json),
    "rules of the command line": (lambda f: f / "r.yaml", lambda p: load_rules(str(p), ())),
    "names of the command line": (lambda f: f / "n.yaml", lambda p: load_names(str(p))),
    "adapter config": (
        lambda f: adapters(f) / "adapter_config.json",
        lambda path: fewbit.load_adapters(path.parent, {"w": jnp.asarray(F32)}, LORA),
    ),
    "adapter tensors": (
        lambda f: adapters(f) / "adapter_model.safetensors",
        lambda path: fewbit.load_adapters(path.parent, {"w": jnp.asarray(F32)}, LORA),
    ),
    "orbax": (orbax, lambda path: stream(path.parent, path.parent.parent)),
    "journal": (
        lambda f: partial(f) / "journal.jsonl",
        lambda path: stream(path.parent.parent / "a.safetensors"),
    ),
    "partial shard": (
        lambda f: partial(f) / "shard-00001",
        lambda path: stream(path.parent.parent / "a.safetensors"),
    ),
    "keras.json": (
        lambda f: f / "keras.json",
        lambda path: keras_backend({"KERAS_HOME": str(path.parent)}),
    ),
}

# --- what is put there ----------------------------------------------------------------------------


def put_socket(path):
    os.chdir(path.parent)  # the name of a socket is short
    socket.socket(socket.AF_UNIX).bind(path.name)


def put_large(path):
    path.touch()
    os.truncate(path, 2**40)


def put(data):
    return lambda path: path.write_bytes(data)


THINGS = {
    "pipe": lambda path: os.mkfifo(path),
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "noise": lambda path: path.symlink_to("/dev/urandom"),
    "socket": put_socket,
    "folder": lambda path: path.mkdir(),
    "large": put_large,
    "nothing": put(b""),
    "deep lists": put(b"[" * 200_000 + b"]" * 200_000),
    "deep objects": put(b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "deep header": put((5000 * 6 + 1).to_bytes(8, "little") + b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "digits": put(b'{"a":' + b"9" * 3_000_000 + b"}"),
    "brackets": put(b'{"a":[' + b"[]," * 4_000_000 + b"[]]}"),
    "bracket header": put(
        (12_000_010).to_bytes(8, "little") + b'{"a":[' + b"[]," * 4_000_000 + b"[]]}"
    ),
}


def laughs(levels=12, width=10):
    """Aliases of aliases: a few lines that stand for more than any memory holds."""
    lines = ["a0: &a0 [x, x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join([*lines, f"rules: *a{levels - 1}", ""]).encode()


def merges(levels=12, width=10):
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, levels):
        many = ", ".join([f"*a{level - 1}"] * width)
        lines.append(f"a{level}: &a{level} {{<<: [{many}], k{level}: 1}}")
    return "\n".join([*lines, f"rules: *a{levels - 1}", ""]).encode()


YAML = {
    "laughs": put(laughs()),
    "merges": put(merges()),
    "itself": put(b"rules: &a [*a]\n"),
    "deep yaml": put(b"[" * 5000),
    "deep block": put(b"- " * 5000),
    "long yaml": put(b"- a\n" * 200_000),
    "sexagesimal": put(b"- 1" + b":1" * 200_000),
    "endless pattern": put(b"- {module_path: '(a+)\\1', weight_qtype: int8}\n"),
}


def zipped(change):
    """The statistics with their members changed; what is stored may be compressed then."""

    def write(path):
        with zipfile.ZipFile(path.parents[1] / "templates" / "statistics" / path.name) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        compression = change(members)
        with zipfile.ZipFile(path, "w", compression or zipfile.ZIP_STORED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)

    return write


def repeated(members):
    """One array of a megabyte, a hundred thousand times."""
    array = io.BytesIO()
    np.save(array, np.zeros(2**17))
    members["arrays/0.npy"] = array.getvalue()
    manifest = json.loads(members["manifest.json"])
    import hashlib

    place = {"array": "arrays/0.npy", "sha256": hashlib.sha256(array.getvalue()).hexdigest()}
    row = {"name": "x", "site": "x", "side": "lhs", "count": place, "states": {}}
    manifest["operands"] = [{**row, "name": f"x{i}"} for i in range(100_000)]
    members["manifest.json"] = json.dumps(manifest).encode()


def lying(members):
    """An array whose header promises a terabyte."""
    import hashlib

    array = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": (2**37,)}
    np.lib.format.write_array_header_1_0(array, header)
    manifest = json.loads(members["manifest.json"])
    place = manifest["operands"][0]["count"]
    members[place["array"]] = array.getvalue()
    place["sha256"] = hashlib.sha256(array.getvalue()).hexdigest()
    members["manifest.json"] = json.dumps(manifest).encode()


def bomb(members):
    members["manifest.json"] = b" " * 2**30
    return zipfile.ZIP_DEFLATED


ZIPS = {"zip bomb": zipped(bomb), "one array often": zipped(repeated), "a lie": zipped(lying)}


QUICK = ("pipe", "zeros", "large", "deep objects", "bracket header")


def cases(quick):
    for place in PLACES:
        things = {thing: THINGS[thing] for thing in (QUICK if quick else THINGS)}
        if place == "rules.yaml" or (place.endswith("line") and not quick):
            things |= YAML
        if place == "statistics":
            things |= ZIPS
        for thing in things:
            yield place, thing


def attempt(template, folder, place, thing):
    """The template's files with one of them replaced, read under limits."""
    make, read = PLACES[place]
    if not template.exists():
        template.mkdir(parents=True)
        (template / "place").write_text(str(make(template).relative_to(template)))
    shutil.copytree(template, folder)
    path = folder / (folder / "place").read_text()
    if path.exists():
        path.unlink()
    {**THINGS, **YAML, **ZIPS}[thing](path)
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1 + SECONDS, resource.RLIM_INFINITY))
    signal.alarm(300)  # not a measure of speed: what waits for a pipe waits for ever
    try:
        return ["nothing", str(read(path))[:300]]
    except Exception as error:
        return [type(error).__name__, str(error)[:2000]]
    finally:
        signal.alarm(0)


def serve(folder, quick):
    mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    statistics(folder)  # what JAX maps for its first program
    orbax(folder)
    resource.setrlimit(resource.RLIMIT_AS, (2 * mapped + MEMORY, resource.RLIM_INFINITY))
    for number, (place, thing) in enumerate(cases(quick)):
        inside, template = folder / str(number), folder / "templates" / place
        print(json.dumps([place, thing, "begins", ""]), flush=True)
        print(json.dumps([place, thing, *attempt(template, inside, place, thing)]), flush=True)
        os.chdir(folder)
        shutil.rmtree(inside)


if __name__ == "__main__":
    serve(pathlib.Path(sys.argv[1]), sys.argv[2:] == ["quick"])
