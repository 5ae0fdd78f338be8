"""Learned scales in Linen, NNX and function models: made, trained, kept, served; and messages."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fewbit

RULE = fewbit.QtRule(weight_qtype="int2", weight_calibration_method="learned", tile_size=8)
PROVIDER = fewbit.QtProvider([RULE])


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


X = normal(0, 4, 16)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(16, name="inner")(nn.relu(x)), None


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        x, _ = scanned(name="layers")(x, None)
        return nn.Dense(3, name="head")(x)


def shapes(tree):
    return jax.tree.map(jnp.shape, tree)


# --- Linen ---------------------------------------------------------------------------------------


def test_linen_init_makes_scales_beside_the_weights_and_trains_them():
    model = fewbit.quantize_model(Net(), PROVIDER)
    variables = model.init(jax.random.key(0), X)
    params = variables["params"]
    assert shapes(params["head"]) == {"kernel": (16, 3), "kernel_qscale": (2, 3), "bias": (3,)}
    assert params["layers"]["inner"]["kernel_qscale"].shape == (2, 2, 16)
    assert shapes(jax.eval_shape(model.init, jax.random.key(0), X)) == shapes(variables)

    floats = Net().init(jax.random.key(0), X)
    added = fewbit.add_learned_scales(model, floats, X)
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, added, variables)))
    bare = fewbit.add_learned_scales(model, floats["params"], X)
    assert jnp.array_equal(bare["head"]["kernel_qscale"], params["head"]["kernel_qscale"])

    @jax.jit
    def step(variables):
        grads = jax.grad(lambda v: jnp.mean(jnp.square(model.apply(v, X))))(variables)
        return jax.tree.map(lambda p, g: p - 0.05 * g, variables, grads), grads

    trained, grads = step(variables)
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(grads))
    served = fewbit.to_ptq(model, trained["params"], None, X)
    out = served.model.apply({"params": served.params}, X)
    assert jnp.array_equal(out, model.apply(trained, X))
    assert set(served.params["head"]) == {"kernel", "bias"}


def test_linen_boxes_go_round_the_scales_too():
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.normal(), ("data", "model"))
            return nn.Dense(4, kernel_init=init)(x)

    model = fewbit.quantize_model(Boxed(), fewbit.QtProvider([RULE.replace(tile_size=None)]))
    variables = model.init(jax.random.key(0), X)
    box = variables["params"]["Dense_0"]["kernel_qscale"]
    assert box.names == (None, "model") and box.value.shape == (1, 4)
    assert model.apply(variables, X).shape == (4, 4)


def test_a_template_of_the_served_model_takes_what_was_trained():
    model = fewbit.quantize_model(Net(), PROVIDER)
    params = model.init(jax.random.key(0), X)["params"]
    served = fewbit.quantize_model(Net(), fewbit.PtqProvider([RULE]))
    template = jax.eval_shape(served.init, jax.random.key(0), X)["params"]
    assert set(template["head"]) == {"kernel", "bias"}
    stored = fewbit.quantize_params(params, template)
    assert jnp.array_equal(served.apply({"params": stored}, X), model.apply({"params": params}, X))


def test_what_was_learned_is_saved_and_loaded(tmp_path):
    f = fewbit.quantize_model(lambda p, x: x @ p["w"], PROVIDER)
    params = fewbit.add_learned_scales(f, {"w": normal(1, 16, 4)}, X)
    served = fewbit.to_ptq(f, params, None, X)
    fewbit.save(tmp_path / "model", served.params, plan=served.plan)
    loaded = fewbit.load(tmp_path / "model")
    again = getattr(loaded, "params", loaded)
    np.testing.assert_array_equal(
        fewbit.dequantize(again["w"].array), fewbit.dequantize(served.params["w"].array)
    )
    assert again["w"].how.calibration_method == "learned"


# --- NNX -----------------------------------------------------------------------------------------


def nnx_net(seed=0):
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(nnx.Linear(16, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 3, rngs=rngs))


def test_nnx_scales_are_params_beside_the_weights():
    model = fewbit.quantize_model(nnx_net(), PROVIDER, X)
    scale = model.layers[0].kernel_qscale
    assert isinstance(scale, nnx.Param) and scale.get_value().shape == (2, 16)
    optimizer = nnx.Optimizer(model, optax.sgd(3e-2, momentum=0.5), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss = lambda model: jnp.mean(jnp.square(model(X) - 1))  # noqa: E731
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    before = scale.get_value()
    losses = [float(step(model, optimizer)) for _ in range(10)]
    assert losses[-1] < losses[0] and not jnp.array_equal(before, scale.get_value())
    served = fewbit.to_ptq(model, None, None, X)
    assert not hasattr(served.layers[0], "kernel_qscale")
    assert jnp.array_equal(served(X), model(X))
    found = served.layers[0].kernel.array.scale[...]
    assert jnp.array_equal(found, jnp.abs(scale.get_value()))


def test_nnx_weights_that_are_loaded_later_start_their_scales_anew():
    model, other = fewbit.quantize_model(nnx_net(), PROVIDER, X), nnx_net(seed=1)
    for mine, theirs in zip(model.layers[::2], other.layers[::2], strict=True):
        mine.kernel.set_value(3 * theirs.kernel.get_value())
    stale = model.layers[0].kernel_qscale.get_value()
    assert fewbit.add_learned_scales(model, None, X) is model
    fresh = model.layers[0].kernel_qscale.get_value()
    wanted = fewbit.quantize(
        model.layers[0].kernel.get_value(),
        "int2",
        channelwise_axes=(1,),
        tiled_axes={0: 8},
        calibration_method="mse",
    ).scale
    assert not jnp.array_equal(stale, fresh)
    np.testing.assert_allclose(fresh, wanted, rtol=1e-6)


# --- it is worth it ------------------------------------------------------------------------------


def test_two_bits_learned_beat_two_bits_rounded():
    keys = jax.random.split(jax.random.key(0), 5)
    teacher = {"up": normal(1, 16, 32) / 3, "down": normal(2, 32, 4) / 4}

    def net(p, x):
        return jnp.tanh(x @ p["up"]) @ p["down"]

    x, held = jax.random.normal(keys[0], (256, 16)), jax.random.normal(keys[1], (256, 16))
    error = lambda out, x: float(jnp.mean(jnp.square(out - net(teacher, x))))  # noqa: E731
    rounded = {}
    for method in ("absmax", "mse"):
        rules = [
            fewbit.QuantizationRule(
                weight_qtype="int2", tile_size=16, weight_calibration_method=method
            )
        ]
        plan = fewbit.plan(net, rules, teacher, x)
        model = fewbit.quantize_model(net, fewbit.PtqProvider(rules))
        rounded[method] = error(model(fewbit.quantize_params(teacher, plan), held), held)

    f = fewbit.quantize_model(net, fewbit.QtProvider([RULE.replace(tile_size=16)]))
    params = fewbit.add_learned_scales(f, teacher, x)
    optimizer = optax.adam(5e-3)

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry
            loss = lambda p: jnp.mean(jnp.square(f(p, x) - net(teacher, x)))  # noqa: E731
            grads = jax.grad(loss)(params)
            with jax.numpy_dtype_promotion("standard"):  # which Adam's own count needs
                updates, state = optimizer.update(grads, state)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), length=300)[0][0]

    params = train(params)
    served = fewbit.to_ptq(f, params, None, x)
    learned = error(served.model(served.params, held), held)
    assert learned < 0.6 * min(rounded.values()), (learned, rounded)


# --- what is seen and said -----------------------------------------------------------------------


def test_the_plan_shows_that_scales_are_learned():
    plan = fewbit.plan(Net(), PROVIDER, X)
    assert {row.granularity for row in plan.sites} == {"tile 8, learned"}
    assert "tile 8, learned" in plan.table(width=120)
    assert fewbit.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("rule", "fields", "sentence"),
    [
        (fewbit.QuantizationRule, {}, "Write QtRule(weight_calibration_method='learned', ...)"),
        (fewbit.LoraRule, dict(rank=2, alpha=2.0), "a parameter beside a weight"),
        (fewbit.QtRule, dict(weight_qtype="nf4"), "its codes are no multiples of the scale"),
        (fewbit.QtRule, dict(weight_qtype="int1"), "its codes are no multiples of the scale"),
        (fewbit.QtRule, dict(weight_qtype="mxfp4"), "too coarse to follow a gradient"),
        (fewbit.QtRule, dict(weight_qtype="uint4"), "not symmetric around zero"),
        (
            fewbit.QtRule,
            dict(weight_calibration_method="learned,minmax"),
            "which 'minmax' does not give",
        ),
        (fewbit.QtRule, dict(weight_calibration_method="learned,fixed,2"), "write 'learned,mse'"),
        (fewbit.QtRule, dict(weight_calibration_method="learned,msee"), "Did you mean 'mse'"),
        (
            fewbit.QtRule,
            dict(act_qtype="int8", act_calibration_method="learned"),
            "act_calibration_method='learned', but a learned scale is a parameter beside a weight",
        ),
        (
            fewbit.QtRule,
            dict(bwd_qtype="int8", bwd_calibration_method="learned"),
            "here write 'mse'",
        ),
        (
            fewbit.QtRule,
            dict(additional_qt_config={"rhs_calibration_method": "learned"}),
            "additional_qt_config['rhs_calibration_method']='learned', but",
        ),
    ],
)
def test_rules_that_cannot_learn_are_refused_when_they_are_made(rule, fields, sentence):
    given = {"weight_qtype": "int4", "weight_calibration_method": "learned", **fields}
    with pytest.raises(ValueError, match=re.escape(sentence)):
        rule(**given)


def test_an_array_alone_has_no_learned_scale():
    with pytest.raises(ValueError, match="cannot be told from an array alone"):
        fewbit.quantize(X, "int4", calibration_method="learned")
    with pytest.raises(ValueError, match="a learned scale is a parameter beside a weight"):
        fewbit.training.DotGeneral(RULE)(X, X.T, (((1,), (0,)), ((), ())))


def test_a_missing_scale_is_told_with_the_line_that_adds_it():
    model = fewbit.quantize_model(Net(), PROVIDER)
    floats = Net().init(jax.random.key(0), X)
    with pytest.raises(
        ValueError,
        match=r"there is no '.*kernel_qscale' beside it \(and 1 more are missing\).*"
        r"fewbit.add_learned_scales\(model, params, \*inputs\)",
    ):
        model.apply(floats, X)
    plan = fewbit.plan(Net(), fewbit.PtqProvider([RULE]), X)
    with pytest.raises(ValueError, match=r"have no '.*kernel_qscale'.*train with QtProvider"):
        fewbit.quantize_params(floats["params"], plan)


def test_a_scale_of_another_shape_or_without_a_rule_is_told():
    f = fewbit.quantize_model(lambda p, x: x @ p["w"], PROVIDER)
    params = {"w": normal(1, 16, 4), "w_qscale": jnp.ones((1, 4))}
    sentence = "'w_qscale' has shape (1, 4), but 'w' (16, 4) needs (2, 4)"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        f(params, X)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fewbit.to_ptq(f, params, None, X)
    rules = [fewbit.QtRule(module_path="w", weight_qtype="int8"), RULE.replace(module_path="v")]
    g = fewbit.quantize_model(lambda p, x: x @ p["w"] @ p["v"], fewbit.QtProvider(rules))
    params = {"w": normal(1, 16, 8), "v": normal(2, 8, 8), "v_qscale": jnp.ones((1, 8))}
    assert g(params, X).shape == (4, 8)
    with pytest.raises(ValueError, match="hold the learned scale 'w_qscale', but no rule learns"):
        g({**params, "w_qscale": jnp.ones((1, 8))}, X)


def test_models_that_learn_nothing_are_told():
    with pytest.raises(TypeError, match="add_learned_scales takes a model that quantize_model"):
        fewbit.add_learned_scales(lambda p, x: x, {}, X)
    plain = fewbit.QtProvider([fewbit.QtRule(weight_qtype="int8")])
    f = fewbit.quantize_model(lambda p, x: x @ p["w"], plain)
    with pytest.raises(ValueError, match="No rule of this model learns scales. Write weight_cal"):
        fewbit.add_learned_scales(f, {"w": X.T}, X)
    f = fewbit.quantize_model(lambda p, x: x @ p["w"], PROVIDER)
    with pytest.raises(ValueError, match="needs to know on what function is called"):
        fewbit.add_learned_scales(f, {"w": X.T})


def test_a_nan_in_a_learned_scale_is_found_before_it_is_stored():
    f = fewbit.quantize_model(lambda p, x: x @ p["w"], PROVIDER)
    params = {"w": normal(1, 16, 4), "w_qscale": jnp.ones((2, 4)).at[1, 2].set(jnp.nan)}
    with pytest.raises(ValueError, match="w_qscale holds 1 value that is NaN or infinite"):
        fewbit.to_ptq(f, params, None, X)


# --- what is left over from another training ------------------------------------------------------

LEFT = (
    "The parameters hold the learned scale '{name}', but no rule learns the scales of '{leaf}', so "
    "it would not be used. Write weight_calibration_method='learned' in the rule for it, take it "
    "out, or make the provider with strict=False."
)
PLAIN_RULE = fewbit.QtRule(weight_qtype="int4")


def linear(params, x):
    return x @ params["up"]["w"]


def left_over():
    """Parameters of a function that were trained with learned scales."""
    model = fewbit.quantize_model(linear, PROVIDER)
    return fewbit.add_learned_scales(model, {"up": {"w": normal(1, 16, 8)}}, X)


def test_scales_that_nobody_reads_are_told_by_a_function():
    params = left_over()
    sentence = re.escape(LEFT.format(name="up/w_qscale", leaf="up/w"))
    model = fewbit.quantize_model(linear, fewbit.QtProvider([PLAIN_RULE]))
    jitted = fewbit.quantize_model(jax.jit(linear), fewbit.QtProvider([PLAIN_RULE]))
    for call in (
        lambda: model(params, X),
        lambda: jitted(params, X),
        lambda: jax.grad(lambda p: model(p, X).sum())(params),
        lambda: fewbit.plan(linear, fewbit.QtProvider([PLAIN_RULE]), params, X),
        lambda: fewbit.plan(linear, [fewbit.QuantizationRule(weight_qtype="int4")], params, X),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
    loose = fewbit.quantize_model(linear, fewbit.QtProvider([PLAIN_RULE], strict=False))
    np.testing.assert_array_equal(loose(params, X), model({"up": {"w": params["up"]["w"]}}, X))


def test_a_parameter_of_that_name_that_the_model_reads_is_its_own():
    def own(params, x):
        return x @ params["w"] * params["w_qscale"]

    model = fewbit.quantize_model(own, fewbit.QtProvider([PLAIN_RULE]))
    params = {"w": normal(1, 16, 8), "w_qscale": jnp.full((1, 8), 2.0)}
    half = model({**params, "w_qscale": jnp.ones((1, 8))}, X)
    np.testing.assert_allclose(model(params, X), 2 * half, rtol=1e-6)


def test_scales_that_nobody_reads_are_told_by_linen_and_nnx():
    variables = fewbit.quantize_model(Net(), PROVIDER).init(jax.random.key(0), X)
    model = fewbit.quantize_model(Net(), fewbit.QtProvider([PLAIN_RULE]))
    sentence = re.escape(LEFT.format(name="head/kernel_qscale", leaf="head/kernel"))
    with pytest.raises(ValueError, match=sentence):
        model.apply(variables, X)
    make = lambda: nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))  # noqa: E731
    trained = fewbit.quantize_model(make(), PROVIDER, X)
    other = fewbit.quantize_model(make(), fewbit.QtProvider([PLAIN_RULE]), X)
    nnx.update(other, nnx.state(trained))
    with pytest.raises(ValueError, match="kernel_qscale', but no rule learns the scales of"):
        other(X)


def test_a_stream_neither_drops_nor_ignores_learned_scales(tmp_path):
    from checkpoints import write_file

    params = left_over()
    source, target = tmp_path / "a.safetensors", tmp_path / "out"
    write_file(source, {f"up.{name}": np.asarray(v) for name, v in params["up"].items()})
    bare = {"up": {"w": params["up"]["w"]}}
    plain = fewbit.plan(linear, [fewbit.QuantizationRule(weight_qtype="int4")], bare, X)
    with pytest.raises(ValueError) as error:
        fewbit.quantize_checkpoint(source, target, plain, progress=False)
    assert "holds 1 learned scales that the plan does not use: up/w_qscale" in str(error.value)
    assert "names=[..., (r'.*_qscale', None)]" in str(error.value)
    fewbit.quantize_checkpoint(
        source, target, plain, names=[(r"up\.w", "up/w"), (r".*_qscale", None)], progress=False
    )
    learned = fewbit.plan(linear, fewbit.PtqProvider([RULE]), bare, X)
    for file in (source, tmp_path / "b.safetensors"):
        if not file.exists():
            write_file(file, {"up.w": np.asarray(params["up"]["w"])})
        with pytest.raises(ValueError) as error:
            fewbit.quantize_checkpoint(
                file, tmp_path / "other", learned, allow_extra_params=True, progress=False
            )
        assert "stores 1 parameters with learned scales (up/w)" in str(error.value)
        assert "fewbit.quantize_params(params, plan)" in str(error.value)
