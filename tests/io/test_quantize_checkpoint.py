"""fewbit.quantize_checkpoint: file to file, the same bytes as save makes, whatever happens."""

import errno
import hashlib
import json
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import write_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fewbit
from fewbit._util._text import key_name
from fewbit.io._errors import CheckpointError
from fewbit.io.stream import _checkpoint, _leaf
from fewbit.io.stream._checkpoint import check_source

RULES = [fewbit.QuantizationRule(weight_qtype="int4", tile_size=32, scale_dtype="float16")]
MATRIX = np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32)


def contents(folder):
    """Names and hashes of all files: equal ones are equal byte for byte."""
    files = sorted(pathlib.Path(folder).rglob("*"))
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.is_file()}


def model(params, x):
    y = jnp.take(params["embed"], jnp.arange(3), axis=0) + x @ params["up"]["kernel"]
    return y @ params["down"]["kernel"] + params["down"]["bias"][None]


def abstract(dtype="float32", wide=96):
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    return {
        "embed": struct(50, wide),
        "up": {"kernel": struct(64, wide)},
        "down": {"kernel": struct(wide, 40), "bias": struct(40)},
    }


def float_params(seed=0, dtype="float32", **sizes):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: rng.normal(size=s.shape).astype(jnp.dtype(dtype)), abstract(dtype, **sizes)
    )


def plan_of(rules=RULES, dtype="float32", **sizes):
    return fewbit.plan(model, rules, abstract(dtype, **sizes), jax.ShapeDtypeStruct((3, 64), dtype))


# PyTorch's names and layouts for the same model.
NAMES = [
    (r"wte\.weight", "embed"),
    (r"h\.(\w+)\.weight", r"\1/kernel", "T"),
    (r"h\.(\w+)\.bias", r"\1/bias"),
]


def as_torch(params):
    return {
        "wte.weight": params["embed"],
        "h.up.weight": np.ascontiguousarray(params["up"]["kernel"].T),
        "h.down.weight": np.ascontiguousarray(params["down"]["kernel"].T),
        "h.down.bias": params["down"]["bias"],
    }


def saved(tmp_path, params, plan, name="wanted", **options):
    """What the model would save if it fitted into memory."""
    params = jax.tree.map(jnp.asarray, params)
    fewbit.save(tmp_path / name, fewbit.quantize_params(params, plan), plan, **options)
    return contents(tmp_path / name)


KINDS = {
    "int4 groups": {"weight_qtype": "int4", "tile_size": 32, "scale_dtype": "float16"},
    "int8 channels": {"weight_qtype": "int8"},
    "int3 zero points": {
        "weight_qtype": "int3",
        "tile_size": 16,
        "weight_calibration_method": "minmax",
    },
    "nf4": {"weight_qtype": "nf4", "tile_size": 32},
    "int1": {"weight_qtype": "int1"},
    "fp8": {"weight_qtype": "fp8"},
    "mxfp4": {"weight_qtype": "mxfp4"},
    "nvfp4": {"weight_qtype": "nvfp4"},
    "mse": {"weight_qtype": "int4", "tile_size": 32, "weight_calibration_method": "mse"},
    "fixed": {"weight_qtype": "int8", "weight_calibration_method": "fixed,-4,4"},
    "uneven": {"weight_qtype": "int5", "tile_size": 24},
}


QUICK = [
    *[("int4 groups", False), ("int4 groups", True), ("int8 channels", False)],
    *[("int3 zero points", True), ("int1", True), ("uneven", False)],
]


@pytest.mark.parametrize(
    ("kind", "turned"),
    [
        pytest.param(kind, turned, marks=() if (kind, turned) in QUICK else pytest.mark.long)
        for kind in KINDS
        for turned in (False, True)
    ],
)
def test_the_bytes_are_those_of_save(tmp_path, monkeypatch, kind, turned):
    """Slices of a few rows, transposes and all: as if the whole had been in memory."""
    monkeypatch.setattr(_leaf.find_cut, "__defaults__", (2048,))
    monkeypatch.setattr(_leaf, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(_leaf, "SLICE_BYTES", 2048)
    rules = [
        fewbit.QuantizationRule(op_names=("take",), weight_qtype="int8"),
        fewbit.QuantizationRule(**KINDS[kind]),
    ]
    plan, params = plan_of(rules), float_params()
    flat = {"embed": params["embed"], "up.kernel": params["up"]["kernel"]}
    flat |= {"down.kernel": params["down"]["kernel"], "down.bias": params["down"]["bias"]}
    write_file(tmp_path / "a.safetensors", as_torch(params) if turned else flat)
    names = NAMES if turned else None
    info = fewbit.quantize_checkpoint(tmp_path / "a.safetensors", tmp_path / "out", plan, names)
    assert contents(tmp_path / "out") == saved(tmp_path, params, plan)
    assert info.leaves and not (tmp_path / "out.partial").exists()
    loaded = fewbit.unpack(fewbit.load(tmp_path / "out", lazy=False).params)
    wanted = fewbit.unpack(fewbit.quantize_params(params, plan))
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize(
    ("dtype", "planned"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")],
)
def test_types_of_the_source_and_of_the_plan(tmp_path, dtype, planned):
    params = float_params(dtype=dtype)
    plan = plan_of(dtype=planned)
    write_file(tmp_path / "a.safetensors", as_torch(params))
    fewbit.quantize_checkpoint(tmp_path / "a.safetensors", tmp_path / "out", plan, NAMES)
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(planned)), params)
    assert contents(tmp_path / "out") == saved(tmp_path, cast, plan)


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    qtype=st.sampled_from(["int8", "int4", "int3", "int2", "nf4"]),
    tile=st.sampled_from([None, 8, 32]),
    turned=st.booleans(),
    size=st.sampled_from([64, 700, 10**7]),
)
def test_any_shape_and_any_slice(tmp_path_factory, rows, columns, qtype, tile, turned, size):
    tmp_path = tmp_path_factory.mktemp("any")
    f = lambda params, x: x @ params["w"]  # noqa: E731
    rules = [fewbit.QuantizationRule(weight_qtype=qtype, tile_size=tile and min(tile, rows))]
    params = {"w": np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)}
    plan = fewbit.plan(f, rules, params, jnp.ones((1, rows)))
    source = {"w": np.ascontiguousarray(params["w"].T) if turned else params["w"]}
    write_file(tmp_path / "a.safetensors", source)
    names = [("w", "w", "T")] if turned else None
    before = _leaf.find_cut.__defaults__
    _leaf.find_cut.__defaults__ = (size,)
    try:
        fewbit.quantize_checkpoint(tmp_path / "a.safetensors", tmp_path / "out", plan, names)
    finally:
        _leaf.find_cut.__defaults__ = before
    assert contents(tmp_path / "out") == saved(tmp_path, params, plan)


def scan_model(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"]["kernel"])[0]


@pytest.mark.parametrize("qtype", ["int4", "int8"])
def test_layers_are_stacked_for_a_scan(tmp_path, qtype):
    rng = np.random.default_rng(0)
    layers = rng.normal(size=(5, 32, 32)).astype(np.float32)
    params = {"layers": {"kernel": layers}}
    rules = [fewbit.QuantizationRule(weight_qtype=qtype, tile_size=16)]
    plan = fewbit.plan(scan_model, rules, params, jnp.ones((2, 32)))
    tensors = {f"h.{i}.weight": np.ascontiguousarray(layers[i].T) for i in (3, 1, 0, 4, 2)}
    write_file(tmp_path / "a.safetensors", tensors)
    names = [(r"h\.{i}\.weight", "layers/kernel", "T")]
    fewbit.quantize_checkpoint(tmp_path / "a.safetensors", tmp_path / "out", plan, names)
    assert contents(tmp_path / "out") == saved(tmp_path, params, plan)


def test_shards_in_and_shards_out(tmp_path):
    params, plan = float_params(), plan_of()
    tensors = as_torch(params)
    places = {}
    for number, (name, array) in enumerate(tensors.items()):
        file = f"model-{number}.safetensors"
        write_file(tmp_path / file, {name: array})
        places[name] = file
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    fewbit.quantize_checkpoint(tmp_path, tmp_path / "out", plan, NAMES, shard_size=2000)
    found = contents(tmp_path / "out")
    assert len(found) > 3
    assert found == saved(tmp_path, params, plan, shard_bytes=2000)


def test_an_orbax_checkpoint(tmp_path):
    import orbax.checkpoint as orbax

    params, plan = float_params(), plan_of()
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", jax.tree.map(jnp.asarray, params))
    fewbit.quantize_checkpoint(tmp_path / "orbax", tmp_path / "out", plan)
    assert contents(tmp_path / "out") == saved(tmp_path, params, plan)


def test_an_nnx_model(tmp_path):
    from flax import nnx

    net = nnx.Sequential(
        nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(64, 64, rngs=nnx.Rngs(1))
    )
    x = jnp.ones((1, 64))
    plan = fewbit.plan(net, RULES, x)
    state = nnx.to_pure_dict(nnx.state(net))
    tensors = {}
    for number, layer in state["layers"].items():
        tensors[f"{number}.weight"] = np.ascontiguousarray(layer["kernel"].T)
        tensors[f"{number}.bias"] = np.asarray(layer["bias"])
    write_file(tmp_path / "a.safetensors", tensors)
    names = [
        (r"{i}\.weight", "layers/{i}/kernel", "T"),
        (r"{i}\.bias", "layers/{i}/bias"),
    ]
    fewbit.quantize_checkpoint(tmp_path / "a.safetensors", tmp_path / "out", plan, names)
    small = fewbit.quantize_model(net, fewbit.PtqProvider(RULES), x)
    fewbit.save(tmp_path / "wanted", small, plan)
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")


def test_static_scales_come_from_statistics(tmp_path):
    f = lambda params, x: x @ params["w"]  # noqa: E731
    params = {"w": np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)}
    static = fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    plan = fewbit.plan(f, [static], params, jnp.ones((1, 32)))
    stat = {"count": jnp.array(1), "sum_of_absmax": jnp.full((1, 1), 3.0)}
    stats = {"w:dot_general0": {"lhs": stat | {"max_of_absmax": jnp.full((1, 1), 3.0)}}}
    write_file(tmp_path / "a.safetensors", params)
    fewbit.quantize_checkpoint(
        tmp_path / "a.safetensors", tmp_path / "out", plan, quant_stats=stats
    )
    fewbit.save(tmp_path / "wanted", fewbit.quantize_params(params, plan, stats), plan)
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")

    other = {"w": np.ones((32, 9), np.float32)}
    wrong = fewbit.calibrate(f, [static], other, [jnp.ones((1, 32))])
    with pytest.raises(ValueError, match="These are statistics of another model"):
        fewbit.quantize_checkpoint(
            tmp_path / "a.safetensors", tmp_path / "no", plan, quant_stats=wrong
        )
    assert not (tmp_path / "no").exists()


def test_static_scales_without_statistics_are_not_silent(tmp_path):
    f = lambda params, x: x @ params["w"]  # noqa: E731
    params = {"w": jnp.asarray(MATRIX)}
    static = fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    plan = fewbit.plan(f, [static], params, jnp.ones((1, 32)))
    source = tmp_path / "a.safetensors"
    write_file(source, {"w": MATRIX})
    lacks = (
        r"The plan has 1 static activation scale that these parameters lack: w/dot_general0_lhs\. "
        r".*fewbit\.calibrate\(model, plan, params, batches\).*quant_stats=stats\)"
    )
    with pytest.raises(ValueError, match=lacks):
        fewbit.quantize_checkpoint(source, tmp_path / "out", plan)
    with pytest.raises(ValueError, match=lacks):
        check_source(source, plan)
    weights = fewbit.quantize_params(params, plan, allow_missing_params=True)
    with pytest.raises(ValueError, match=lacks):
        fewbit.save(tmp_path / "out", weights, plan)
    assert not (tmp_path / "out").exists()
    with pytest.warns(UserWarning, match=lacks):
        fewbit.quantize_checkpoint(source, tmp_path / "out", plan, strict=False)
    with pytest.warns(UserWarning, match=lacks):
        fewbit.save(tmp_path / "saved", weights, plan, strict=False)
    assert contents(tmp_path / "out") == contents(tmp_path / "saved")


def test_what_the_plan_does_not_know_is_left_out_when_asked(tmp_path):
    f = lambda params, x: x @ params["w"]  # noqa: E731
    static = fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    plan = fewbit.plan(f, [static], {"w": jnp.asarray(MATRIX)}, jnp.ones((1, 32)))
    edges = {"sum_of_absmax": jnp.full((1, 1), 3.0), "max_of_absmax": jnp.full((1, 1), 3.0)}
    stat = {"lhs": {"count": jnp.array(1)} | edges}
    stats = {plan.scales[0].site: stat}
    write_file(tmp_path / "plain.safetensors", {"w": MATRIX})
    write_file(tmp_path / "more.safetensors", {"w": MATRIX, "rope": np.ones(3, np.float32)})
    stream = lambda name, out, stats, **options: fewbit.quantize_checkpoint(  # noqa: E731
        tmp_path / f"{name}.safetensors", tmp_path / out, plan, quant_stats=stats, **options
    )
    stream("plain", "wanted", stats)
    more = stats | {"elsewhere:dot_general7": stat}
    with pytest.raises(ValueError, match="Pass allow_extra_params=True to leave out"):
        stream("plain", "out", more)
    with pytest.raises(CheckpointError, match="all with allow_extra_params=True"):
        stream("more", "out", stats)
    stream("more", "out", more, allow_extra_params=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")


def test_fixed_ranges_need_no_statistics(tmp_path):
    f = lambda params, x: x @ params["w"]  # noqa: E731
    params = {"w": np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)}
    static = fewbit.QuantizationRule(
        weight_qtype="int8",
        act_qtype="int8",
        act_static_scale=True,
        act_calibration_method="fixed,-3,3",
    )
    plan = fewbit.plan(f, [static], params, jnp.ones((1, 32)))
    write_file(tmp_path / "a.safetensors", params)
    fewbit.quantize_checkpoint(tmp_path / "a.safetensors", tmp_path / "out", plan)
    assert contents(tmp_path / "out") == saved(tmp_path, params, plan)


class Layer(NamedTuple):
    w: Any
    b: Any


@pytest.mark.parametrize(
    ("params", "f"),
    [
        ({"layers": [MATRIX, 2 * MATRIX]}, lambda p, x: x @ p["layers"][0] @ p["layers"][1]),
        ((MATRIX, {1: MATRIX}), lambda p, x: x @ p[0] @ p[1][1]),
        ({"a": Layer(MATRIX, np.ones(32, np.float32))}, lambda p, x: x @ p["a"].w + p["a"].b[None]),
        ({"a/b": MATRIX, "c.d": MATRIX, "n": None}, lambda p, x: x @ p["a/b"] @ p["c.d"]),
    ],
    ids=["list", "tuple", "class", "slash"],
)
def test_lists_and_classes_come_from_a_template(tmp_path, params, f):
    shapes = jax.eval_shape(lambda: params)
    plan = fewbit.plan(f, RULES, shapes, jnp.ones((1, 32)))
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    write_file(tmp_path / "a.safetensors", {key_name(keys): leaf for keys, leaf in leaves})
    fewbit.quantize_checkpoint(
        tmp_path / "a.safetensors", tmp_path / "out", plan, into=shapes, progress=False
    )
    assert contents(tmp_path / "out") == saved(tmp_path, params, plan)


def test_a_template_of_another_model(tmp_path):
    plan = fewbit.plan(lambda p, x: x @ p["w"], RULES, {"w": MATRIX}, jnp.ones((1, 32)))
    write_file(tmp_path / "a.safetensors", {"w": MATRIX})
    with pytest.raises(ValueError, match="into has other parameters than the plan: v, w"):
        fewbit.quantize_checkpoint(
            tmp_path / "a.safetensors", tmp_path / "out", plan, into={"v": MATRIX}
        )


def test_disks_without_hard_links(tmp_path, monkeypatch):
    plan = fewbit.plan(lambda p, x: x @ p["w"], RULES, {"w": MATRIX}, jnp.ones((1, 32)))
    write_file(tmp_path / "a.safetensors", {"w": MATRIX})

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    fewbit.quantize_checkpoint(tmp_path / "a.safetensors", tmp_path / "out", plan)
    assert contents(tmp_path / "out") == saved(tmp_path, {"w": MATRIX}, plan)


def test_odd_parameters_pass_through(tmp_path):
    """A scalar, an empty array, integers and a transposed table that stays float."""
    f = lambda params, x: x @ params["w"] * params["scale"]  # noqa: E731
    params = {
        "w": np.ones((32, 8), np.float32),
        "scale": np.float32(2),
        "empty": np.zeros((3, 0), np.float32),
        "ids": np.arange(6, dtype=np.int32).reshape(2, 3),
        "table": np.arange(12, dtype=np.float32).reshape(4, 3),
    }
    plan = fewbit.plan(f, RULES, params, jnp.ones((1, 32)))
    tensors = params | {"table": np.ascontiguousarray(params["table"].T)}
    write_file(tmp_path / "a.safetensors", tensors)
    names = [("table", "table", "T")]
    fewbit.quantize_checkpoint(tmp_path / "a.safetensors", tmp_path / "out", plan, names)
    assert contents(tmp_path / "out") == saved(tmp_path, params, plan)


# --- what can go wrong ----------------------------------------------------------------------------


def source(tmp_path, change=lambda tensors: None, seed=0):
    tensors = as_torch(float_params(seed))
    change(tensors)
    path = tmp_path / "a.safetensors"
    write_file(path, tensors)
    return path


def with_nan(tensors):
    tensors["h.up.weight"] = tensors["h.up.weight"].copy()
    tensors["h.up.weight"][70, 3] = np.nan


FAULTS = {
    "missing": (
        lambda t: t.pop("h.down.bias"),
        NAMES[:2],
        r"has no tensor for 1 of the plan's parameters: down/bias.* names=",
    ),
    "misspelt": (
        lambda t: t.update({"h.downn.bias": t.pop("h.down.bias")}),
        NAMES,
        r"has no tensor for 1 .* down/bias. The nearest to down/bias are downn/bias",
    ),
    "extra": (
        lambda t: t.update({"rope": np.ones(3, np.float32)}),
        NAMES,
        r"has 1 tensors that the plan does not know: rope. .* leave them out: some with names=.*"
        r"all with allow_extra_params=True",
    ),
    "not transposed": (
        lambda t: None,
        [(r"wte\.weight", "embed"), (r"h\.(\w+)\.weight", r"\1/kernel"), NAMES[2]],
        r"tensor 'h.down.weight' has a shape that parameter 'down/kernel' does not: expected "
        r"\(96, 40\), found \(40, 96\). It looks transposed: add 'T' to its entry in names",
    ),
    "another size": (
        lambda t: t.update({"h.up.weight": np.ones((64, 64), np.float32)}),
        NAMES,
        r"'up/kernel' does not: expected \(64, 96\), found \(64, 64\). The plan was made for an",
    ),
    "NaN": (
        with_nan,
        NAMES,
        r"tensor 'h.up.weight' holds a number that is NaN or infinite: nan at index \(70, 3\) "
        r"\(parameter up/kernel\). One such number spoils",
    ),
    "integers": (
        lambda t: t.update({"h.up.weight": t["h.up.weight"].astype(np.int32)}),
        NAMES,
        "tensor 'h.up.weight' is int32, and a weight to be quantized is float",
    ),
    "wrong axes": (
        lambda t: None,
        [(r"wte\.weight", "embed"), (r"h\.(\w+)\.weight", r"\1/kernel", (0, 2, 1)), NAMES[2]],
        "cannot be turned: axes .0, 2, 1. do not fit an array of shape",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_sources(tmp_path, fault):
    change, names, sentence = FAULTS[fault]
    path = source(tmp_path, change)
    with pytest.raises(CheckpointError, match=sentence):
        fewbit.quantize_checkpoint(path, tmp_path / "out", plan_of(), names)
    assert not (tmp_path / "out").exists()


def test_other_things_than_checkpoints(tmp_path):
    plan = plan_of()
    with pytest.raises(CheckpointError, match="nothing does not exist"):
        fewbit.quantize_checkpoint(tmp_path / "nothing", tmp_path / "out", plan)
    (tmp_path / "model.bin").write_bytes(b"pickle")
    for path in (tmp_path / "model.bin", tmp_path):
        with pytest.raises(CheckpointError, match="is no checkpoint that can be read. .* pickles"):
            fewbit.quantize_checkpoint(path, tmp_path / "out", plan)
    path = source(tmp_path)
    with pytest.raises(TypeError, match="takes a Plan as its third argument, got a list of Quant"):
        fewbit.quantize_checkpoint(path, tmp_path / "out", RULES)
    fewbit.quantize_checkpoint(path, tmp_path / "out", plan, NAMES)
    with pytest.raises(CheckpointError, match="is quantized already: it is a checkpoint of fewbit"):
        fewbit.quantize_checkpoint(tmp_path / "out", tmp_path / "again", plan)
    with pytest.raises(CheckpointError, match="is the source itself"):
        fewbit.quantize_checkpoint(path, path, plan, NAMES)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file. A checkpoint is a folder"):
        fewbit.quantize_checkpoint(path, tmp_path / "file", plan, NAMES)
    assert (tmp_path / "file").read_text() == "mine"


def interrupted(tmp_path, monkeypatch, path, plan, after=1, **options):
    """A run that dies after some leaves."""
    real, done = _leaf.stream_leaf, []

    def stop(*args):
        if len(done) == after:
            raise KeyboardInterrupt
        done.append(args)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr("fewbit.io.stream._checkpoint.stream_leaf", stop)
        with pytest.raises(KeyboardInterrupt):
            fewbit.quantize_checkpoint(path, tmp_path / "out", plan, NAMES, **options)


def test_a_run_goes_on_where_it_was(tmp_path, monkeypatch):
    path, plan = source(tmp_path), plan_of()
    fewbit.quantize_checkpoint(path, tmp_path / "whole", plan, NAMES)
    interrupted(tmp_path, monkeypatch, path, plan, after=2)
    assert (tmp_path / "out.partial").is_dir() and not (tmp_path / "out").exists()
    made = []
    real = _leaf.stream_leaf
    monkeypatch.setattr(
        "fewbit.io.stream._checkpoint.stream_leaf",
        lambda piece, *rest: (made.append(piece.plan.path), real(piece, *rest)),
    )
    fewbit.quantize_checkpoint(path, tmp_path / "out", plan, NAMES)
    assert made == ["embed", "up/kernel"]  # in the order of the file, the first two were done
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("after", [3, 4])
@pytest.mark.parametrize("behind", [b"x", b"\0" * 5000])
def test_bytes_behind_a_finished_shard_are_cut_off(tmp_path, monkeypatch, after, behind):
    """Of every shard: a run that ended well used to leave a file that could not be loaded."""
    path, plan = source(tmp_path), plan_of()
    fewbit.quantize_checkpoint(path, tmp_path / "whole", plan, NAMES, shard_size=2000)
    if after == 4:  # all is written, nothing has its place
        refuse = lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("fewbit.io.stream._partial.Destination.publish", refuse)
            fewbit.quantize_checkpoint(path, tmp_path / "out", plan, NAMES, shard_size=2000)
    else:
        interrupted(tmp_path, monkeypatch, path, plan, after=after, shard_size=2000)
    shards = sorted((tmp_path / "out.partial").glob("shard-*"))
    assert len(shards) > 2
    for shard in shards:
        shard.write_bytes(shard.read_bytes() + behind)
    fewbit.quantize_checkpoint(path, tmp_path / "out", plan, NAMES, shard_size=2000)
    assert fewbit.verify(tmp_path / "out").ok
    fewbit.load(tmp_path / "out", lazy=False)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_shard_that_somebody_else_writes_to_is_refused(tmp_path, monkeypatch):
    path, plan = source(tmp_path), plan_of()
    real = _checkpoint._finished

    def disturbed(partial, *rest):
        with open(os.path.join(partial.path, "shard-00001"), "ab") as file:
            file.write(b"more")
        return real(partial, *rest)

    monkeypatch.setattr(_checkpoint, "_finished", disturbed)
    with pytest.raises(CheckpointError, match="shard-00001 was changed while it was written: expe"):
        fewbit.quantize_checkpoint(path, tmp_path / "out", plan, NAMES)
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    fewbit.quantize_checkpoint(path, tmp_path / "out", plan, NAMES)
    assert contents(tmp_path / "out") == saved(tmp_path, float_params(), plan)


def test_the_target_is_not_there_before_it_is_whole(tmp_path, monkeypatch):
    path, plan = source(tmp_path), plan_of()
    real, seen = os.rename, []

    def rename(old, new):
        seen.append((os.path.exists(new), sorted(os.listdir(old))))
        real(old, new)

    interrupted(tmp_path, monkeypatch, path, plan, after=2)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(os, "rename", rename)
    fewbit.quantize_checkpoint(path, tmp_path / "out", plan, NAMES)
    assert seen == [(False, sorted(contents(tmp_path / "out")))]
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "out"]


def test_a_folder_that_appears_in_the_meantime(tmp_path, monkeypatch):
    path, plan = source(tmp_path), plan_of()
    real = os.rename

    def rename(old, new):
        fewbit.save(tmp_path / "out", {"w": jnp.ones(3)})
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    fewbit.quantize_checkpoint(path, tmp_path / "out", plan, NAMES)
    monkeypatch.undo()
    assert contents(tmp_path / "out") == saved(tmp_path, float_params(), plan)
    assert not (tmp_path / "out.partial").exists()


def test_what_is_published_is_not_written_to_again(tmp_path, monkeypatch):
    """Killed after the result had its name, before the partial folder was gone."""
    path, plan = source(tmp_path), plan_of()
    with monkeypatch.context() as patch:
        patch.setattr("fewbit.io.stream._partial.Partial.remove", lambda self: None)
        fewbit.quantize_checkpoint(path, tmp_path / "out", plan, NAMES)
    before = contents(tmp_path / "out")
    journal = tmp_path / "out.partial" / "journal.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:2]))
    interrupted(tmp_path, monkeypatch, path, plan, after=1)
    assert contents(tmp_path / "out") == before and fewbit.verify(tmp_path / "out").ok
    fewbit.quantize_checkpoint(path, tmp_path / "out", plan, NAMES)
    assert contents(tmp_path / "out") == before and not (tmp_path / "out.partial").exists()


def test_a_damaged_shard_of_the_same_name_is_replaced(tmp_path):
    path, plan = source(tmp_path), plan_of()
    fewbit.quantize_checkpoint(path, tmp_path / "out", plan, NAMES)
    before = contents(tmp_path / "out")
    (shard,) = (tmp_path / "out").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-7])
    fewbit.quantize_checkpoint(path, tmp_path / "out", plan, NAMES)
    assert contents(tmp_path / "out") == before and fewbit.verify(tmp_path / "out").ok


@pytest.mark.parametrize("what", ["source", "plan", "names", "seed", "shard_size"])
def test_other_inputs_are_never_mixed_in(tmp_path, monkeypatch, what):
    path, plan, names, options = source(tmp_path), plan_of(), NAMES, {}
    interrupted(tmp_path, monkeypatch, path, plan)
    if what == "source":
        path = source(tmp_path, seed=1)
    elif what == "plan":
        plan = plan_of([fewbit.QuantizationRule(weight_qtype="int8")])
    elif what == "names":
        names = [*NAMES, ("rope", None)]
    else:
        options = {what: 7000}
    with pytest.raises(
        CheckpointError, match=f"unfinished run of other inputs .another {what}.*resume=False"
    ):
        fewbit.quantize_checkpoint(path, tmp_path / "out", plan, names, **options)
    fewbit.quantize_checkpoint(path, tmp_path / "out", plan, names, resume=False, **options)
    fewbit.quantize_checkpoint(path, tmp_path / "fresh", plan, names, **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


@pytest.mark.parametrize("damage", ["flip", "cut", "torn", "junk"])
def test_a_partial_folder_that_was_damaged(tmp_path, monkeypatch, damage):
    """What is not what the journal says is made again."""
    path, plan = source(tmp_path), plan_of()
    fewbit.quantize_checkpoint(path, tmp_path / "whole", plan, NAMES)
    interrupted(tmp_path, monkeypatch, path, plan, after=3)
    shard = tmp_path / "out.partial" / "shard-00001"
    journal = tmp_path / "out.partial" / "journal.jsonl"
    data = bytearray(shard.read_bytes())
    if damage == "flip":
        data[-500] ^= 1
        shard.write_bytes(data)
    elif damage == "cut":
        shard.write_bytes(data[: len(data) // 2])
    elif damage == "torn":
        journal.write_bytes(journal.read_bytes()[:-10])
    else:
        journal.write_bytes(journal.read_bytes() + b"\x00\x00{}\n")
    fewbit.quantize_checkpoint(path, tmp_path / "out", plan, NAMES)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_old_checkpoint_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    path, plan = source(tmp_path), plan_of()
    old = plan_of([fewbit.QuantizationRule(weight_qtype="int8")])
    fewbit.quantize_checkpoint(path, tmp_path / "out", old, NAMES)
    before = contents(tmp_path / "out")
    interrupted(tmp_path, monkeypatch, path, plan)
    assert contents(tmp_path / "out") == before
    fewbit.quantize_checkpoint(path, tmp_path / "out", plan, NAMES)
    assert contents(tmp_path / "out") == saved(tmp_path, float_params(), plan)


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
import test_quantize_checkpoint as here
import pathlib
folder = pathlib.Path(sys.argv[1])
import fewbit
print("ready", flush=True)
if len(sys.argv) > 2:
    exec(sys.argv[2])
fewbit.quantize_checkpoint(folder / "a.safetensors", folder / "out", here.plan_of(wide=here.WIDE),
                           here.NAMES)
print("done", flush=True)
"""
WIDE = 4096


def start(tmp_path, *more):
    root = pathlib.Path(__file__).parents[2]
    script = SCRIPT.format(paths=[str(root / place) for place in ("", "tests/support", "tests/io")])
    return subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
    )


@pytest.mark.long
def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """400 MB of floats, one tensor of 268 MB among them, in far less than that."""
    measure = (
        "from fewbit._util._text import peak_memory; import atexit\n"
        "here.WIDE = 2 ** 20; before = peak_memory()\n"
        "atexit.register(lambda: print(peak_memory() - before))"
    )
    write_file(tmp_path / "a.safetensors", as_torch(float_params(wide=2**20)))
    run = start(tmp_path, measure)
    out, errors = run.communicate()
    assert run.returncode == 0, errors
    assert int(out.split()[-1]) < 200e6


def test_two_writers_at_once(tmp_path):
    write_file(tmp_path / "a.safetensors", as_torch(float_params(wide=WIDE)))
    hold = (
        "from fewbit.io.stream import _checkpoint as q; import time\n"
        "def wait(*args): print('holding', flush=True); time.sleep(60)\n"
        "q.stream_leaf = wait"
    )
    first = start(tmp_path, hold)
    try:
        assert first.stdout.readline() == "ready\n", first.stderr.read()
        assert first.stdout.readline() == "holding\n", first.stderr.read()
        arguments = (tmp_path / "a.safetensors", tmp_path / "out", plan_of(wide=WIDE), NAMES)
        with pytest.raises(
            CheckpointError, match=f"out is being written by process {first.pid}. Wait until"
        ):
            fewbit.quantize_checkpoint(*arguments)
    finally:
        first.kill()
        first.communicate()
    fewbit.quantize_checkpoint(*arguments)  # the lock of a dead process holds nobody up


def test_a_full_disk(tmp_path):
    """A file that may not grow: the error says so, and with room the run goes on."""
    write_file(tmp_path / "a.safetensors", as_torch(float_params(wide=WIDE)))
    limit = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))"
    )
    run = start(tmp_path, limit)
    _, errors = run.communicate()
    assert run.returncode == 1
    assert "out.partial could not be written (File too large). What is done so far" in errors
    assert not (tmp_path / "out").exists()
    arguments = (tmp_path / "a.safetensors", plan_of(wide=WIDE), NAMES)
    fewbit.quantize_checkpoint(arguments[0], tmp_path / "out", *arguments[1:])
    fewbit.quantize_checkpoint(arguments[0], tmp_path / "whole", *arguments[1:])
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_target_that_cannot_be_written(tmp_path):
    path, plan = source(tmp_path), plan_of()
    for target in ("/proc/fewbit", tmp_path / "a.safetensors" / "out"):
        with pytest.raises(CheckpointError, match="could not be written .*(No such|Not a|denied)"):
            fewbit.quantize_checkpoint(path, target, plan, NAMES)


def test_a_source_that_shrinks_is_an_error(tmp_path):
    path = source(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="a.safetensors"):
        fewbit.quantize_checkpoint(path, tmp_path / "out", plan_of(), NAMES)


def test_scales_that_float16_cannot_hold_are_told(tmp_path):
    path = source(tmp_path, lambda t: t.update({"h.up.weight": t["h.up.weight"] * 1e-6}))
    with pytest.warns(UserWarning, match="up/kernel: .* scales do not fit float16"):
        fewbit.quantize_checkpoint(path, tmp_path / "out", plan_of(), NAMES)


def test_progress_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("fewbit._util._text._EVERY", 0)
    monkeypatch.setattr("fewbit._util._text._PATIENCE", 0)
    path = source(tmp_path)
    fewbit.quantize_checkpoint(path, tmp_path / "out", plan_of(), NAMES)
    text = capsys.readouterr().err
    assert "Quantizing" in text and "MB/s, peak" in text
    fewbit.quantize_checkpoint(path, tmp_path / "out", plan_of(), NAMES, progress=False)
    assert capsys.readouterr().err == ""
