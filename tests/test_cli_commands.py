"""`fewbit plan | quantize | inspect | verify | report` on a checkpoint, as a person calls them."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import fewbit
from fewbit.cli import main

MODEL = """
import jax, jax.numpy as jnp
import numpy as np

def f(params, x):
    hidden = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"][None])
    return hidden @ params["down"]["kernel"]

def params():
    r = np.random.default_rng(0)
    return {"up": {"kernel": r.normal(size=(64, 128)).astype("f"), "bias": np.ones(128, "f")},
            "down": {"kernel": r.normal(size=(128, 64)).astype("f")}}

def abstract():
    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), params())
    return f, shapes, jax.ShapeDtypeStruct((4, 64), "float32")

def concrete():
    x = np.random.default_rng(1).normal(size=(4, 64)).astype("f")
    return f, jax.tree.map(jnp.asarray, params()), jnp.asarray(x)

def forgot():
    return f
"""
NAMES = r"""
- ['(.*)\.weight', '\1/kernel', T]
- ['(.*)\.bias', '\1/bias']
"""
RULE = "weight_qtype=int4,tile_size=32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in a file, its weights as another library saves them, and a quantized checkpoint."""
    from safetensors.numpy import save_file

    here = tmp_path_factory.mktemp("cli")
    (here / "toy.py").write_text(MODEL)
    (here / "names.yaml").write_text(NAMES)
    made: dict = {}
    exec(MODEL, made)
    tree = made["params"]()
    tensors = {f"{k}.weight": np.ascontiguousarray(v["kernel"].T) for k, v in tree.items()}
    save_file(tensors | {"up.bias": tree["up"]["bias"]}, here / "m.safetensors")
    done = run(here, "quantize", "toy:abstract", "m.safetensors", "small", "--rule", RULE,
               "--names", "names.yaml")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 of them quantized" in done.stdout
    return here


def run(folder: pathlib.Path, *args: str) -> subprocess.CompletedProcess:
    root = pathlib.Path(fewbit.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "fewbit", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def test_plan_prints_a_table_or_json(folder):
    table = run(folder, "plan", "toy.py:abstract", "--rule", RULE)
    assert table.returncode == 0 and "2 of 2 quantized" in table.stdout, table.stderr
    (folder / "rules.yaml").write_text("- {weight_qtype: int4, tile_size: 32}")
    as_json = run(folder, "plan", "toy:abstract", "--rules", "rules.yaml", "--json")
    plan = fewbit.Plan.from_json(as_json.stdout)
    assert [str(row.weight_qtype) for row in plan.sites] == ["int4", "int4"]


def test_quantize_equals_the_library(folder):
    made: dict = {}
    exec(MODEL, made)
    f, params, x = made["concrete"]()
    plan = fewbit.plan(f, [fewbit.QuantizationRule(weight_qtype="int4", tile_size=32)], params, x)
    wanted = fewbit.quantize_params(params, plan)
    loaded = fewbit.load(folder / "small")
    assert loaded.plan == plan
    for name in ("up", "down"):
        ours, theirs = (fewbit.dequantize(t[name]["kernel"]) for t in (wanted, loaded.params))
        np.testing.assert_array_equal(ours, theirs)


def test_a_dry_run_checks_the_source_and_writes_nothing(folder):
    arguments = ("quantize", "toy:abstract", "m.safetensors", "dry", "--rule", RULE, "--dry-run")
    done = run(folder, *arguments, "--names", "names.yaml")
    assert done.returncode == 0 and "nothing was written" in done.stdout, done.stderr
    unnamed = run(folder, *arguments)
    assert unnamed.returncode == 1 and "up/kernel" in unnamed.stderr
    assert not (folder / "dry").exists()


def test_inspect_and_verify(folder):
    done = run(folder, "inspect", "small", "--json")
    leaves = {leaf["path"]: leaf for leaf in json.loads(done.stdout)["leaves"]}
    assert leaves["up/kernel"]["qtype"] == "int4" and leaves["up/bias"]["qtype"] is None
    assert run(folder, "verify", "small").returncode == 0


def test_verify_names_the_tensor_that_differs(folder, tmp_path):
    import shutil

    shutil.copytree(folder / "small", tmp_path / "bad")
    (shard,) = (tmp_path / "bad").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    done = run(folder, "verify", str(tmp_path / "bad"))
    last = max(fewbit.inspect(folder / "small").leaves, key=lambda leaf: leaf.path)
    assert done.returncode == 1 and last.path in done.stdout + done.stderr
    assert "expected" in done.stdout + done.stderr


def test_report_with_and_without_a_model(folder):
    done = run(folder, "report", "small", "-o", "plan.html")
    assert done.returncode == 0, done.stderr
    assert "up/kernel" in (folder / "plan.html").read_text()
    done = run(folder, "report", "small", "-o", "full.html", "--model", "toy:concrete")
    assert done.returncode == 0 and "dB" in done.stdout, done.stderr
    assert (folder / "full.html").stat().st_size > (folder / "plan.html").stat().st_size


def test_report_of_an_nnx_model(tmp_path):
    """A checkpoint with static scales, held against the float model that it came from."""
    (tmp_path / "digit.py").write_text(
        "import jax.numpy as jnp\n"
        "from flax import nnx\n"
        "def make():\n"
        "    return nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.ones((2, 64))\n"
    )
    made: dict = {}
    exec((tmp_path / "digit.py").read_text(), made)
    from flax import nnx

    model, x = made["make"]()
    rule = fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    plan = fewbit.plan(model, [rule], x)
    params = nnx.to_pure_dict(nnx.state(model))
    stats = fewbit.calibrate(model, [rule], [x, 2 * x])
    fewbit.save(tmp_path / "small", fewbit.quantize_params(params, plan, stats), plan)
    done = run(tmp_path, "report", "small", "--model", "digit:make")
    assert done.returncode == 0 and "int8 x int8 static" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("plan", "toy:abstrct", "--rule", RULE), 2, "Did you mean 'abstract'?"),
        (("plan", "toy.py", "--rule", RULE), 2, "module:function"),
        (("plan", "tooy.py:abstract", "--rule", RULE), 2, "Did you mean 'toy.py'?"),
        (("plan", "nothing_here:f", "--rule", RULE), 2, "cannot be imported"),
        (("plan", "toy:forgot", "--rule", RULE), 2, "(model, *inputs)"),
        (("plan", "toy:abstract"), 2, "no rules"),
        (("plan", "toy:abstract", "--rule", "int8"), 2, "has no '='"),
        (("plan", "toy:abstract", "--rule", "weight_qtype=int5x"), 2, "Did you mean 'int5'"),
        (("plan", "toy:abstract", "--rules", "names.txt"), 2, "no file 'names.txt'"),
        (("plan", "toy:abstract", "--rule", "module_path=left,weight_qtype=int8"), 1, "left"),
        (("verify", "nothing"), 1, "does not exist"),
        (("inspect", "toy.py"), 1, "toy.py"),
        (("report", "small", "--model", "toy:abstract"), 2, "abstract values"),
    ],
)
def test_misuse_and_bad_data_say_what_is_wrong(folder, monkeypatch, capsys, arguments, code, said):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(arguments) == code
    assert said in capsys.readouterr().err
