"""Quantized parameters through flax.serialization, into another process and back."""

import os
import pathlib
import subprocess
import sys
import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState
from helpers import W8, normal

import fewbit
from fewbit import PtqProvider, QuantizationRule
from fewbit.models import _flax_files
from fewbit.qarray import pack

ROOT = pathlib.Path(__file__).parents[2]
X = normal(0, 4, 32)
FORMATS = ["int8", "int4", "int3", "uint4", "nf4", "float8_e4m3fn", "mxfp4", "nvfp4", "int1"]

_flax_files.register()


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="down")(nn.relu(nn.Dense(64, name="up")(x)))


def rules_of(qtype, **fields):
    tile = {"mxfp4": 32, "nvfp4": 16}.get(qtype, 16)
    if qtype == "uint4":
        fields["weight_calibration_method"] = "minmax"
    return [QuantizationRule(weight_qtype=qtype, tile_size=tile, **fields)]


def linen(rules, module=None):
    """A quantized model and its variables."""
    model = fewbit.quantize_model(module or Mlp(), PtqProvider(rules))
    return model, model.init(jax.random.key(0), X)


def template_of(rules, module=None):
    model = fewbit.quantize_model(module or Mlp(), PtqProvider(rules))
    return jax.eval_shape(model.init, jax.random.key(0), X)


def assert_same(found, wanted):
    """The same tree, statics included, with equal bits."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("qtype", FORMATS)
def test_bytes_and_back(qtype):
    model, variables = linen(rules_of(qtype))
    data = serialization.to_bytes(variables)
    restored = serialization.from_bytes(template_of(rules_of(qtype)), data)
    assert_same(restored, variables)
    np.testing.assert_array_equal(model.apply(restored, X), model.apply(variables, X))
    assert_same(serialization.from_bytes(variables, data), variables)


@pytest.mark.parametrize("qtype", ["int3", "int4", "int1"])
def test_packed_and_plain_files_fit_either_template(qtype):
    _, plain = linen(rules_of(qtype))
    is_aux = lambda x: isinstance(x, fewbit.WithAux)  # noqa: E731
    packed = jax.tree.map(
        lambda x: x.replace(array=pack(x.array)) if is_aux(x) else x, plain, is_leaf=is_aux
    )
    assert packed["params"]["up"]["kernel"].array.layout == "bits"
    for saved in (plain, packed, fewbit.pack(plain)):
        for template in (plain, packed, fewbit.pack(plain)):
            abstract = jax.eval_shape(lambda t: t, template)
            assert_same(serialization.from_bytes(abstract, serialization.to_bytes(saved)), template)
    assert len(serialization.to_bytes(packed)) < len(serialization.to_bytes(plain))


def test_zero_points_and_uneven_tiles():
    how = dict(tiled_axes={0: 12}, calibration_method="minmax")
    params = {"w": fewbit.quantize(normal(1, 32, 8), "int8", **how)}
    assert params["w"].zero_point is not None and params["w"].tiles
    assert_same(serialization.from_bytes(params, serialization.to_bytes(params)), params)
    other = {"w": fewbit.quantize(normal(1, 32, 8), "int8", **how | {"tiled_axes": {0: 11}})}
    with pytest.raises(ValueError, match=r"w/scale: the file holds uneven tiles \{-2: 12\}"):
        serialization.from_bytes(other, serialization.to_bytes(params))


def test_another_process_restores_the_same_bits(tmp_path):
    _, variables = linen(rules_of("int4"))
    file, out = tmp_path / "params.msgpack", tmp_path / "again.msgpack"
    file.write_bytes(serialization.to_bytes(variables))
    code = f"""
        import sys
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "support")!r}]
        import jax, pathlib
        import flax.linen as nn
        from flax import serialization
        import fewbit
        class Mlp(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(8, name="down")(nn.relu(nn.Dense(64, name="up")(x)))
        rules = [fewbit.QuantizationRule(weight_qtype="int4", tile_size=16)]
        model = fewbit.quantize_model(Mlp(), fewbit.PtqProvider(rules))
        x = jax.ShapeDtypeStruct((4, 32), "float32")
        template = jax.eval_shape(model.init, jax.random.key(0), x)
        restored = serialization.from_bytes(template, pathlib.Path({str(file)!r}).read_bytes())
        assert restored["params"]["up"]["kernel"].how == template["params"]["up"]["kernel"].how
        jax.block_until_ready(jax.jit(model.apply)(restored, jax.numpy.ones((4, 32))))
        pathlib.Path({str(out)!r}).write_bytes(serialization.to_bytes(restored))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == file.read_bytes()
    assert_same(serialization.from_bytes(variables, out.read_bytes()), variables)


def test_state_dicts_and_train_states():
    model, variables = linen(W8)
    state = serialization.to_state_dict(variables)
    assert set(state["params"]["up"]["kernel"]["array"]) == {"qtype", "layout", "qvalue", "scale"}
    assert_same(serialization.from_state_dict(template_of(W8), state), variables)

    train = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.identity())
    again = serialization.from_bytes(train, serialization.to_bytes(train))
    assert_same(again.params, variables["params"])


def test_nnx_parameters():
    def quantized(seed):
        linear = nnx.Linear(32, 16, rngs=nnx.Rngs(seed))
        return fewbit.quantize_model(linear, PtqProvider(rules_of("int4")), X)

    saved, other = quantized(0), quantized(1)
    params = nnx.to_pure_dict(nnx.state(saved))
    template = nnx.to_pure_dict(nnx.state(other))
    restored = serialization.from_bytes(template, serialization.to_bytes(params))
    assert_same(restored, params)
    nnx.update(other, restored)
    np.testing.assert_array_equal(other(X), saved(X))


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model"))
        return nn.Dense(16, kernel_init=init, name="up")(x)


def test_partitioned_parameters():
    _, variables = linen(W8, Boxed())
    data = serialization.to_bytes(variables)
    restored = serialization.from_bytes(template_of(W8, Boxed()), data)
    assert_same(restored, variables)
    kernel = restored["params"]["up"]["kernel"].array
    assert kernel.qvalue.names == ("data", "model")
    with pytest.raises(ValueError, match="params/up/kernel/array/qtype: the file holds int8 codes"):
        serialization.from_bytes(template_of(rules_of("int4"), Boxed()), data)


@pytest.mark.parametrize(
    ("saved", "template", "sentence"),
    [
        (W8, rules_of("int4"), "array/qtype: the file holds int8 codes, the template int4 codes."),
        (
            W8,
            rules_of("int8"),
            "array/scale: the file holds a float32[1,8] array, the template a float32[4,8] array.",
        ),
        (
            W8,
            [QuantizationRule(weight_qtype="int8", scale_dtype="float16")],
            "array/scale: the file holds a float32[1,8] array, the template a float16[1,8] array.",
        ),
        (
            W8,
            [QuantizationRule(weight_qtype="int8", weight_calibration_method="minmax")],
            "array/zero_point: the file holds no zero_point, the template a zero_point.",
        ),
    ],
)
def test_a_template_of_another_kind_names_the_path(saved, template, sentence):
    data = serialization.to_bytes(linen(saved)[1])
    with pytest.raises(ValueError) as info:
        serialization.from_bytes(template_of(template), data)
    assert str(info.value).startswith("params/down/kernel/")
    assert sentence in str(info.value) and "with the rules that" in str(info.value)


def test_another_shape_names_the_path():
    class Wider(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="down")(nn.relu(nn.Dense(128, name="up")(x)))

    data = serialization.to_bytes(linen(W8)[1])
    with pytest.raises(
        ValueError, match=r"params/down/kernel/array/qvalue: .*int8\[64,8\].*int8\[128,8\]"
    ):
        serialization.from_bytes(template_of(W8, Wider()), data)
    packed = fewbit.pack(linen(rules_of("int4"), Wider())[1])
    data = serialization.to_bytes(linen(rules_of("int4"))[1])
    with pytest.raises(ValueError, match="params/down/kernel/array/qvalue: .* array, the template"):
        serialization.from_bytes(packed, data)


def test_a_float_file_for_a_quantized_template():
    floats = Mlp().init(jax.random.key(0), X)
    with pytest.raises(ValueError) as info:
        serialization.from_bytes(template_of(W8), serialization.to_bytes(floats))
    text = str(info.value)
    assert text.startswith("params/down/kernel: the template is quantized (a QArray that stands")
    assert "the file holds a float32[64,8] array. Restore the file into float parameters" in text
    bare = {"w": fewbit.quantize(X, "int8")}
    with pytest.raises(ValueError, match="^w: the template is quantized"):
        serialization.from_bytes(bare, serialization.to_bytes({"w": X}))


def test_registering_again_changes_nothing():
    _flax_files.register()
    _flax_files.register()
    assert serialization.is_serializable(fewbit.QArray)
    scale = fewbit.WithAux(jnp.ones(1), fewbit.HowToQuantize(qtype="int8"))
    again = serialization.from_bytes(scale, serialization.to_bytes(scale))
    np.testing.assert_array_equal(again.array, scale.array)
    with pytest.raises(ValueError, match=r"array: the file holds a float32\[1\] array"):
        serialization.from_bytes(scale.replace(array=jnp.ones(2)), serialization.to_bytes(scale))


def test_a_first_model_registers_for_every_front_end():
    """In a process of its own, because registering is for good."""
    code = """
        import flax, jax.numpy as jnp
        import fewbit
        from flax import serialization
        assert not serialization.is_serializable(fewbit.WithAux)
        f = lambda params, x: x @ params["w"]
        rules = [fewbit.QuantizationRule(weight_qtype="int8")]
        params = {"w": jnp.eye(4)}
        q = fewbit.quantize_params(params, fewbit.plan(f, rules, params, jnp.ones((1, 4))))
        assert serialization.from_bytes(q, serialization.to_bytes(q))["w"].how == q["w"].how
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_panels_are_written_plain_and_packed_again_when_read():
    def f(params, x):
        return x @ params["w"]

    params, x = {"w": jax.random.normal(jax.random.key(0), (128, 64))}, jnp.ones((2, 128))
    plan = fewbit.plan(f, rules_of("int4"), params, x)
    packed = fewbit.quantize_params(params, plan)
    assert packed["w"].array.layout == "panels"
    file = serialization.to_bytes(packed)
    assert serialization.msgpack_restore(file)["w"]["array"]["layout"] == "plain"
    again = serialization.from_bytes(packed, file)
    assert jax.tree.structure(again) == jax.tree.structure(packed)
    for new, old in zip(jax.tree.leaves(again), jax.tree.leaves(packed), strict=True):
        np.testing.assert_array_equal(new, old)
    assert serialization.from_bytes(fewbit.unpack(packed), file)["w"].array.layout == "plain"
