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

def fails():
    raise RuntimeError("no weights here")

def listed():
    return (lambda params, x: x @ params[0]), [np.ones((64, 64), "f")], np.ones((1, 64), "f")
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


ROOT = pathlib.Path(fewbit.__file__).parents[1]


def run(folder: pathlib.Path, *args: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", **environment}
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
        (
            ("plan", "toy:abstract", "--rule", "module_path=left,weight_qtype=int8"),
            1,
            "--no-strict",
        ),
        (("plan", "toy:abstract", "--rules", "binary.yaml"), 2, "binary.yaml is no text in UTF-8"),
        (("plan", "toy:fails", "--rule", RULE), 1, "toy.py, line 26): RuntimeError: no weights"),
        (("plan", "broken.py:f", "--rule", RULE), 1, "SyntaxError"),
        (("plan", "needy.py:f", "--rule", RULE), 1, "No module named 'not_installed'"),
        (("verify", "nothing"), 1, "does not exist"),
        (("inspect", "toy.py"), 1, "toy.py"),
        (("report", "small", "--model", "toy:abstract"), 2, "abstract values"),
    ],
)
def test_misuse_and_bad_data_say_what_is_wrong(folder, monkeypatch, capsys, arguments, code, said):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "broken.py").write_text("def f(:")
    (folder / "needy.py").write_text("import not_installed")
    assert main(arguments) == code
    assert said in capsys.readouterr().err


STATIC = "weight_qtype=int8,act_qtype=int8,act_static_scale=true"


def test_static_ranges_want_statistics_of_this_model_in_a_dry_run_too(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    call = ["quantize", "toy:concrete", "m.safetensors", "static", "--names", "names.yaml"]
    call += ["--rule", STATIC, "--quiet"]
    assert main(call) == 2
    assert "static ranges (act_static_scale) of 2 operands: up/kernel" in capsys.readouterr().err
    made: dict = {}
    exec(MODEL, made)
    f, params, x = made["concrete"]()
    rule = fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    fewbit.calibrate(lambda p, x: x @ p["w"], [rule], {"w": x.T}, [x]).save("other.stats")
    assert main([*call, "--dry-run", "--stats", "other.stats"]) == 1
    assert "statistics of another model" in capsys.readouterr().err
    stats = fewbit.calibrate(f, [rule], params, [x])
    stats.save("own.stats")
    assert main([*call, "--dry-run", "--stats", "own.stats"]) == 0
    assert not (folder / "static").exists()
    assert main([*call, "--stats", "own.stats"]) == 0
    found = fewbit.load("static").params
    wanted = fewbit.quantize_params(params, fewbit.plan(f, [rule], params, x), stats)
    run_it = fewbit.quantize_model(f, fewbit.PtqProvider([rule]))
    np.testing.assert_array_equal(run_it(found, x), run_it(wanted, x))


def test_an_unfinished_run_of_another_source_can_be_dropped(folder, tmp_path, monkeypatch, capsys):
    from safetensors.numpy import load_file, save_file

    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    tensors = load_file("m.safetensors")
    bad = {name: array.copy() for name, array in tensors.items()}
    bad["up.weight"][0, 0] = np.nan
    save_file(bad, tmp_path / "a.safetensors")
    call = ["quantize", "toy:abstract", str(tmp_path / "a.safetensors"), str(tmp_path / "out")]
    call += ["--names", "names.yaml", "--rule", RULE, "--quiet"]
    assert main(call) == 1
    save_file(tensors, tmp_path / "a.safetensors")
    assert main(call) == 1
    assert "give --restart to drop it" in capsys.readouterr().err
    assert main([*call, "--restart"]) == 0 and fewbit.verify(tmp_path / "out").ok


def test_lists_of_a_function_stay_lists(folder, tmp_path, monkeypatch):
    from safetensors.numpy import save_file

    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    save_file({"0": np.ones((64, 64), "f")}, tmp_path / "a.safetensors")
    source, target = str(tmp_path / "a.safetensors"), str(tmp_path / "out")
    assert main(["quantize", "toy:listed", source, target, "--rule", RULE, "--quiet"]) == 0
    assert isinstance(fewbit.load(target).params, list)


LINEN = """
import flax.linen as nn, jax, jax.numpy as jnp
x = jnp.ones((2, 32))
def bare(): return nn.Dense(32), x
def whole(): return nn.Dense(32), nn.Dense(32).init(jax.random.key(0), x), x
"""


def test_one_function_serves_plan_and_report_of_a_linen_module(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "dense.py").write_text(LINEN)
    made: dict = {}
    exec(LINEN, made)
    model, variables, x = made["whole"]()
    plan = fewbit.plan(model, [fewbit.QuantizationRule(weight_qtype="int8")], x)
    fewbit.save("small", fewbit.quantize_params(variables["params"], plan), plan)
    for name in ("bare", "whole"):
        assert main(["plan", f"dense.py:{name}", "--rule", "weight_qtype=int8", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(plan.to_json())
    assert main(["report", "small", "--model", "dense.py:whole"]) == 0
    assert main(["report", "small", "--model", "dense.py:bare"]) == 2
    assert "returns (model, params, *inputs)" in capsys.readouterr().err
    (tmp_path / "toy.py").write_text(MODEL)
    assert main(["report", "small", "--model", "toy.py:concrete"]) == 2
    assert "returned a function, and the checkpoint's plan is of a Linen" in capsys.readouterr().err


def test_what_reads_the_output_may_be_narrow_or_leave(folder):
    done = run(folder, "inspect", "small", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "int4" in done.stdout, done.stderr
    command = [sys.executable, "-m", "fewbit", "plan", "toy:abstract", "--rule", RULE, "--json"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}) as left:  # fmt: skip
        left.stdout.close()
        assert left.stderr.read() == b""
