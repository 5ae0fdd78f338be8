"""LoRA and QLoRA of Linen models: init, trained parameters, scan, remat, boxes, dropout."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from lora_cases import close, float_base, normal
from tolerances import LORA_F32

import fewbit
from fewbit import LoraProvider, LoraRule, QuantizationRule

NF4 = dict(rank=4, alpha=8.0, weight_qtype="nf4", tile_size=16, lora_b_initializer="normal")
X = normal(2, 5, 16)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(32, name="up")(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(16, name="down")(x)


def merged(params, paths, scale=2.0):
    """The float parameters that adapters stand for, written out."""
    tree = jax.tree.map(lambda v: v, fewbit.lora.without_adapters(params), is_leaf=is_leaf)
    for module, einsum in paths.items():
        a, b = params[module]["kernel_lora_a"], params[module]["kernel_lora_b"]
        base = jnp.asarray(float_base(params[module]["kernel"], np.float32))
        tree[module] = {**tree[module], "kernel": base + scale * jnp.einsum(einsum, a, b)}
    return tree


def is_leaf(value):
    return isinstance(value, fewbit.WithAux)


DENSE = {"up": "kr,rn->kn", "down": "kr,rn->kn"}


def test_init_makes_the_adapters():
    lora = fewbit.apply_lora_to_model(Mlp(), LoraProvider(**NF4))
    variables = lora.init(jax.random.key(0), X)
    params = variables["params"]
    assert sorted(params["up"]) == ["bias", "kernel", "kernel_lora_a", "kernel_lora_b"]
    assert params["up"]["kernel"].array.qtype == fewbit.numerics.canonical_qtype("nf4")
    template = jax.eval_shape(lora.init, jax.random.key(0), X)["params"]
    assert jax.tree.structure(params) == jax.tree.structure(template)
    close(lora.apply(variables, X), Mlp().apply({"params": merged(params, DENSE)}, X), LORA_F32)
    twice = lora.init(jax.random.key(0), X)["params"]["up"]["kernel_lora_a"]
    assert (twice == params["up"]["kernel_lora_a"]).all()
    assert not np.allclose(params["up"]["kernel_lora_a"][:4], params["down"]["kernel_lora_a"][:4])


def test_over_trained_parameters_the_model_starts_as_its_base():
    """Both ways to quantize: by a plan, and by a template; then fresh adapters."""
    params = Mlp().init(jax.random.key(0), X)["params"]
    provider = LoraProvider(rank=4, alpha=8.0, weight_qtype="int8")
    lora = fewbit.apply_lora_to_model(Mlp(), provider)
    plan = fewbit.plan(Mlp(), provider, X)
    template = jax.eval_shape(lora.init, jax.random.key(0), X)["params"]
    base = fewbit.quantize_model(Mlp(), fewbit.PtqProvider(fewbit.lora.base_rules(provider.rules)))
    for how in (plan, template):
        quantized = fewbit.quantize_params(params, how)
        with_adapters = fewbit.lora.init(plan, quantized, jax.random.key(3))
        got = lora.apply({"params": with_adapters}, X)
        assert (got == base.apply({"params": quantized}, X)).all()
    # adapters that are there already pass through
    again = fewbit.quantize_params(
        {**params, "up": {**params["up"], **_adapters(with_adapters)}}, plan
    )
    assert (again["up"]["kernel_lora_a"] == with_adapters["up"]["kernel_lora_a"]).all()


def _adapters(params):
    return {k: v for k, v in params["up"].items() if "_lora_" in k}


def test_a_rule_of_its_own_for_each_path():
    rules = [
        QuantizationRule(module_path="down", weight_qtype="int8"),
        LoraRule(module_path="up", rank=2, alpha=4.0),
    ]
    lora = fewbit.apply_lora_to_model(Mlp(), LoraProvider(rules))
    params = lora.init(jax.random.key(0), X)["params"]
    assert "kernel_lora_a" in params["up"] and "kernel_lora_a" not in params["down"]
    assert not is_leaf(params["up"]["kernel"]) and is_leaf(params["down"]["kernel"])


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(x)
        return x + nn.Dense(16, name="out")(nn.gelu(h)), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(32, 16, name="embed")
        x = embed(ids)
        blocks = nn.scan(nn.remat(Block), {"params": 0}, split_rngs={"params": True}, length=3)(
            name="blocks"
        )
        x, _ = blocks(x, None)
        return embed.attend(x)


def test_scan_remat_attention_and_a_tied_embedding():
    ids = jnp.array([[1, 5, 31, 2]])
    provider = LoraProvider(rank=2, alpha=4.0, weight_qtype="int8", lora_b_initializer="normal")
    lora = fewbit.apply_lora_to_model(Scanned(), provider)
    params = lora.init(jax.random.key(0), ids)["params"]
    shapes = {n: v.shape for n, v in fewbit.lora.adapters(params).items()}
    assert shapes["embed/embedding_lora_a"] == (16, 2)
    assert shapes["blocks/attention/query/kernel_lora_a"] == (3, 16, 2)
    assert shapes["blocks/attention/query/kernel_lora_b"] == (3, 2, 16)
    assert shapes["blocks/attention/out/kernel_lora_a"] == (3, 16, 2)
    assert shapes["blocks/out/kernel_lora_b"] == (3, 2, 16)
    plan = fewbit.plan(Scanned(), provider, ids)
    assert {n for a in plan.adapters for n in a.names} == set(shapes)
    floats, report = fewbit.merge_lora(params, plan, requantize=False)
    assert report.worst.error < 1e-6
    close(lora.apply({"params": params}, ids), Scanned().apply({"params": floats}, ids), 1e-5)
    trained, frozen = fewbit.lora.split(params)

    def loss(trained):
        whole = fewbit.merge_trainable(trained, frozen)
        return (lora.apply({"params": whole}, ids) ** 2).mean()

    flat = jax.tree.leaves(jax.jit(jax.grad(loss))(trained))
    assert len(flat) == len(shapes) and all(jnp.abs(g).max() > 0 for g in flat)


def test_boxes_follow_the_weight():
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            return nn.Dense(32, kernel_init=init, name="up")(x)

    lora = fewbit.apply_lora_to_model(Boxed(), LoraProvider(**NF4))
    variables = lora.init(jax.random.key(0), X)
    up = variables["params"]["up"]
    assert isinstance(up["kernel_lora_a"], meta.Partitioned)
    assert up["kernel_lora_a"].names == ("embed", None)
    assert up["kernel_lora_b"].names == (None, "mlp")
    out = lora.apply(variables, X)
    plain = jax.tree.map(
        lambda v: v.value if isinstance(v, meta.Partitioned) else v,
        variables,
        is_leaf=lambda v: isinstance(v, meta.Partitioned),
    )
    close(out, lora.apply(plain, X), LORA_F32)
    plan = fewbit.plan(Boxed(), LoraProvider(**NF4), X)
    back, _ = fewbit.merge_lora(variables["params"], plan)
    assert back["up"]["kernel"].array.qvalue.names == ("embed", "mlp")


def test_dropout_needs_a_key_and_acts_on_the_adapter_alone():
    provider = LoraProvider(rank=4, alpha=8.0, dropout=0.5, lora_b_initializer="normal")
    lora = fewbit.apply_lora_to_model(Mlp(), provider)
    variables = lora.init(jax.random.key(0), X)
    quiet = lora.apply(variables, X)
    assert (quiet == lora.apply(variables, X)).all()
    one, same, other = (
        lora.apply(variables, X, rngs={"dropout": jax.random.key(k)}) for k in (1, 1, 2)
    )
    assert (one == same).all() and not np.allclose(one, other) and not np.allclose(one, quiet)

    # the mean over many keys is the deterministic product of a linear model
    class Linear(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="up")(x)

    lora = fewbit.apply_lora_to_model(Linear(), provider)
    variables = lora.init(jax.random.key(0), X)
    keys = jax.random.split(jax.random.key(5), 400)
    many = jax.vmap(lambda k: lora.apply(variables, X, rngs={"dropout": k}))(keys)
    quiet = lora.apply(variables, X)
    spread = np.asarray(many.std(0)) / np.sqrt(len(keys))
    assert np.abs(np.asarray(many.mean(0) - quiet)).max() < 5 * spread.max()
    base = Linear().apply({"params": fewbit.lora.without_adapters(variables["params"])}, X)
    assert np.asarray(many.std(0)).max() > 0.05 and not np.allclose(base, quiet)


def test_two_methods():
    class Two(nn.Module):
        def setup(self):
            self.up, self.down = nn.Dense(16), nn.Dense(16)

        def __call__(self, x):
            return self.down(self.up(x))

        def encode(self, x):
            return self.up(x)

    provider = LoraProvider(rank=2, alpha=4.0, lora_b_initializer="normal")
    methods = ("__call__", "encode")
    lora = fewbit.apply_lora_to_model(Two(), provider, methods=methods)
    params = lora.init(jax.random.key(0), X)["params"]
    floats = merged(params, DENSE)
    for method in methods:
        wanted = Two().apply({"params": floats}, X, method=method)
        close(lora.apply({"params": params}, X, method=method), wanted, LORA_F32)
