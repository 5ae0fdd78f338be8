"""Functions and their trees: where adapters lie, what is trained, what merging does, messages."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lora_cases import CASES, SCALE, SOME, close, float_base, lora, normal
from tolerances import LORA_F32

import fewbit
from fewbit import LoraProvider, LoraRule, QuantizationRule


def mlp(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"]


PARAMS = {"up": normal(16, 32), "down": normal(32, 16, seed=1), "bias": jnp.zeros((1, 16))}
X = normal(4, 16, seed=2)


def failure(call, *kinds):
    with pytest.raises(kinds or ValueError) as error:
        call()
    return str(error.value)


# --- trees ----------------------------------------------------------------------------------------


def test_adapters_beside_the_weight_in_dicts_and_lists():
    f = lambda params, x: x @ params["layers"][0]["w"] @ params["layers"][1]["w"]  # noqa: E731
    base = {"layers": [{"w": normal(16, 16)}, {"w": normal(16, 16, seed=1)}]}
    run, params, _ = lora(f, base, X)
    assert sorted(params["layers"][1]) == ["w", "w_lora_a", "w_lora_b"]
    assert run(params, X).shape == (4, 16)
    assert jax.tree.structure(fewbit.lora.without_adapters(params)) == jax.tree.structure(base)


class Pair(NamedTuple):
    first: jax.Array
    second: jax.Array


@pytest.mark.parametrize("make", [list, lambda items: Pair(*items)], ids=["list", "named tuple"])
def test_a_tree_without_room_is_wrapped(make):
    f = lambda params, x: jnp.tanh(x @ params[0]) @ params[1]  # noqa: E731
    base = make([normal(16, 32), normal(32, 16, seed=1)])
    run, params, plan = lora(f, base, X, weight_qtype="int8")
    assert isinstance(params, fewbit.lora.LoraParams)
    names = sorted(params.adapters)
    assert names == sorted(n for a in plan.adapters for n in a.names)
    trained, frozen = fewbit.lora.split(params)
    grads = jax.grad(lambda t: run(fewbit.merge_trainable(t, frozen), X).sum())(trained)
    assert len(jax.tree.leaves(grads)) == 4
    merged, _ = fewbit.merge_lora(params, plan, requantize=False)
    assert type(merged) is type(base)
    close(run(params, X), f(merged, X), 1e-5)
    assert isinstance(fewbit.quantize_params(params_of(base, params), plan), fewbit.lora.LoraParams)


def params_of(base, params):
    return fewbit.lora.LoraParams(base, params.adapters)


def test_only_adapters_are_trained():
    run, params, _ = lora(mlp, PARAMS, X, weight_qtype="int8", lora_b_initializer="zeros")
    mask = fewbit.lora.mask(params)
    assert {name for name, mine in mask.items() if mine} == set(fewbit.lora.adapters(params))
    trained, frozen = fewbit.lora.split(params)
    optimizer = optax.adam(1e-2)
    state = optimizer.init(trained)
    assert len(jax.tree.leaves(state)) == 2 * 4 + 1  # moments of four factors, a count
    y = normal(4, 16, seed=9)

    @jax.jit
    def step(trained, state):
        def loss(trained):
            return ((run(fewbit.merge_trainable(trained, frozen), X) - y) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(trained)
        with jax.numpy_dtype_promotion("standard"):  # optax relies on it
            updates, state = optimizer.update(grads, state)
        return optax.apply_updates(trained, updates), state, value

    losses = []
    for _ in range(20):
        trained, state, value = step(trained, state)
        losses.append(float(value))
    assert losses[-1] < losses[0]


def test_a_mask_for_optax():
    run, params, _ = lora(mlp, PARAMS, X)  # a float base: every leaf could be trained
    optimizer = optax.chain(
        optax.masked(optax.sgd(0.1), fewbit.lora.mask(params)),
        optax.masked(optax.set_to_zero(), jax.tree.map(lambda m: not m, fewbit.lora.mask(params))),
    )
    grads = jax.grad(lambda p: run(p, X).sum())(params)
    updates, _ = optimizer.update(grads, optimizer.init(params))
    moved = {name for name, update in updates.items() if np.abs(update).max() > 0}
    assert moved == set(fewbit.lora.adapters(params))


def test_dropout_with_a_key_among_the_arguments():
    run, params, _ = lora(mlp, PARAMS, X, dropout=0.5)
    quiet, key = run(params, X), jax.random.key(0)
    assert (quiet == run(params, X)).all()
    noisy = run(params, X, rngs={"dropout": key})
    assert not np.allclose(noisy, quiet)
    assert (noisy == run(params, X, rngs={"dropout": key})).all()
    grads = jax.grad(lambda p: run(p, X, rngs={"dropout": key}).sum())(params)
    assert np.abs(grads["up_lora_a"]).max() > 0


def test_the_plan_shows_ranks_and_bytes_and_reads_back():
    _, _, plan = lora(mlp, PARAMS, X, weight_qtype="int8")
    text = plan.table(width=140)
    assert "int8 x - + r3" in text and "2 of rank 3 (r), 1.12 KiB to train" in text
    assert "+ 576 B" in text  # 3 * (16 + 32) float32 at each Site
    assert fewbit.Plan.from_json(plan.to_json()) == plan
    _, _, plan = lora(mlp, PARAMS, X)
    assert "- x - + r3" in plan.table(width=140) and plan.totals.quantized_sites == 0


def test_a_plain_base_and_plain_rules_beside_it():
    rules = [QuantizationRule(module_path="up", weight_qtype="int8"), LoraRule(rank=2, alpha=2.0)]
    provider = LoraProvider(rules)
    plan = fewbit.plan(mlp, provider, PARAMS, X)
    assert [a.leaf for a in plan.adapters] == ["down"]
    params = fewbit.lora.init(plan, fewbit.quantize_params(PARAMS, plan), jax.random.key(0))
    run = fewbit.apply_lora_to_model(mlp, provider)
    ptq = fewbit.quantize_model(mlp, fewbit.PtqProvider(rules[:1]))
    close(run(params, X), ptq(fewbit.lora.without_adapters(params), X), LORA_F32)


def test_static_scales_beside_adapters():
    f = lambda params, x: x @ params["w"]  # noqa: E731
    rule = dict(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    base, batch = {"w": normal(16, 16)}, normal(8, 16, seed=4)
    rules = [QuantizationRule(**rule)]
    stats = fewbit.calibrate(f, rules, base, [batch])
    provider = LoraProvider(rank=2, alpha=2.0, **rule)
    plan = fewbit.plan(f, provider, base, X)
    quantized = fewbit.quantize_params(base, plan, stats)
    params = fewbit.lora.init(plan, quantized, jax.random.key(0))
    assert isinstance(params, fewbit.QuantizedParams) and "w_lora_a" in params.params
    ptq = fewbit.quantize_model(f, fewbit.PtqProvider(rules))
    run = fewbit.apply_lora_to_model(f, provider)
    assert (run(params, X) == ptq(quantized, X)).all()  # B is zero
    trained, frozen = fewbit.lora.split(params)
    grads = jax.grad(lambda t: run(fewbit.merge_trainable(t, frozen), X).sum())(trained)
    assert len(jax.tree.leaves(grads)) == 2


# --- merging --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME)
def test_every_layout_merges(name):
    case = CASES[name]
    f = lambda params, x: case.op(params["w"], x)  # noqa: E731
    x = normal(*case.x, seed=1)
    run, params, plan = lora(f, {"w": normal(*case.w)}, x)
    merged, report = fewbit.merge_lora(params, plan)
    assert list(merged) == ["w"] and report.worst.error < 1e-7
    a, b = (np.asarray(params[n], np.float64) for n in ("w_lora_a", "w_lora_b"))
    close(merged["w"], float_base(params["w"]) + SCALE * case.update(a, b), LORA_F32)
    close(f(merged, x), run(params, x), 2 * LORA_F32)


@pytest.mark.parametrize("qtype,most", [("int8", 0.01), ("int4", 0.15), ("nf4", 0.12)])
def test_requantized_as_it_was_with_the_error_told(qtype, most):
    wide = {"w": normal(64, 64)}
    f = lambda params, x: x @ params["w"]  # noqa: E731
    run, params, plan = lora(f, wide, normal(4, 64), weight_qtype=qtype, tile_size=32)
    merged, report = fewbit.merge_lora(params, plan)
    old, new = params["w"], merged["w"]
    assert new.array.layout == old.array.layout and new.array.qtype == old.array.qtype
    assert new.how.replace(rule=None) == old.how.replace(rule=None)
    a, b = (np.asarray(params[n], np.float64) for n in ("w_lora_a", "w_lora_b"))
    exact = float_base(old) + SCALE * a @ b
    error = np.linalg.norm(float_base(new) - exact) / np.linalg.norm(exact)
    assert abs(report.worst.error - error) < 1e-4 and 0 < error < most
    update = np.linalg.norm(SCALE * a @ b) / np.linalg.norm(float_base(old))
    assert abs(report.worst.update - update) < 1e-4
    ptq = fewbit.quantize_model(f, fewbit.PtqProvider(fewbit.lora.base_rules(plan.rules)))
    got, wanted = ptq(merged, normal(4, 64)), run(params, normal(4, 64))
    assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < 2 * most
    assert "stored as" in str(report) and qtype in str(report)


# --- messages -------------------------------------------------------------------------------------


def test_providers_say_what_they_need():
    rule = LoraRule(rank=2, alpha=4.0)
    text = failure(lambda: LoraProvider([rule], rank=2))
    assert text.startswith("Only one of rules and kwargs should be provided.") and "rank" in text
    assert "LoraProvider(module_path='.*', rank=8, alpha=16.0" in failure(LoraProvider)
    text = failure(lambda: LoraProvider([QuantizationRule(weight_qtype="int8")]))
    assert "got no LoraRule" in text and "use PtqProvider(rules)" in text
    text = failure(lambda: LoraProvider(rank=2, alpha=1.0, act_qtype="int8"))
    assert "act_qtype without weight_qtype" in text
    text = failure(lambda: fewbit.apply_lora_to_model(mlp, fewbit.PtqProvider([])), TypeError)
    assert "takes a LoraProvider as its second argument, got a PtqProvider" in text


def test_tools_that_take_no_adapters_say_so():
    run, params, _ = lora(mlp, PARAMS, X, weight_qtype="int8")
    text = failure(
        lambda: fewbit.debug.compare(mlp, run, X, params=PARAMS, qparams=params), TypeError
    )
    assert "This model has adapters (LoRA)" in text and "Merge them first" in text
    stored = fewbit.quantize_params(
        PARAMS, fewbit.plan(mlp, [QuantizationRule(weight_qtype="int8")], PARAMS, X)
    )
    floats, _, _ = lora(mlp, PARAMS, X)
    adapters = fewbit.lora.adapters(params)
    text = failure(lambda: floats(fewbit.lora.with_adapters(stored, adapters), X))
    assert "Parameter 'up' is stored as int8, but LoraRule(" in text and "keeps" in text


def test_missing_adapters_and_other_ranks():
    run, params, plan = lora(mlp, PARAMS, X)
    text = failure(lambda: run(PARAMS, X))
    assert "The adapter 'up_lora_a' of up:dot_general0 is missing" in text
    assert "(and 3 more are missing)" in text and "fewbit.lora.init(plan, params, key)" in text
    _, other, _ = lora(mlp, PARAMS, X, rank=5)
    text = failure(lambda: run(other, X))
    assert "'up_lora_a' has shape (16, 5), but up:dot_general0 needs (16, 3) (rank 3)" in text
    assert "it was made for rank 5. Write rank=5 in LoraRule(rank=3" in text
    wrong = {**params, "up_lora_a": normal(15, 3)}
    assert "made for another model or another op" in failure(lambda: run(wrong, X))
    some, _, _ = lora(mlp, PARAMS, X, module_path="up")
    text = failure(lambda: some(params, X))
    assert "hold the adapter 'down_lora_a', but no LoraRule makes one for 'down'" in text


def test_a_rule_that_matches_nothing():
    text = failure(
        lambda: fewbit.plan(mlp, LoraProvider(module_path="nose", rank=2, alpha=1.0), PARAMS, X)
    )
    assert "matches no Site of the model" in text and "'up'" in text


def test_weights_that_cannot_take_an_adapter():
    provider = LoraProvider(rank=2, alpha=1.0)

    def plan(f, *shape):
        return failure(lambda: fewbit.plan(f, provider, {"w": normal(*shape)}, X))

    text = plan(lambda params, x: x @ params["w"][:, :8], 16, 16)
    assert (
        "w:dot_general0: parameter 'w' (16, 16) cannot take an adapter: the product sees only"
        in text
    )
    assert "QuantizationRule(module_path='w') before the other rules" in text
    assert "only a part of it (slice)" in plan(lambda params, x: x @ params["w"][1], 2, 16, 16)
    assert "sees it reversed" in plan(lambda params, x: x @ params["w"][::-1], 16, 16)

    @jax.custom_vjp
    def double(w, x):
        return 2 * (x @ w)

    double.defvjp(lambda w, x: (double(w, x), (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))
    text = plan(lambda params, x: double(params["w"], x), 16, 16)
    assert "inside a custom_vjp" in text and "would get no gradient" in text


def test_one_weight_under_two_rules():
    f = lambda params, x: x @ params["w"] + jnp.einsum("bi,io->bo", x, params["w"])  # noqa: E731
    params = {"w": normal(16, 16)}
    one = LoraRule(rank=2, alpha=1.0, op_names=("dot_general",))
    text = failure(lambda: fewbit.plan(f, LoraProvider([one]), params, X))
    assert "gets an adapter at w:dot_general0, but w:einsum0 reads it too" in text
    two = [one, LoraRule(rank=3, alpha=1.0)]
    text = failure(lambda: fewbit.plan(f, LoraProvider(two), params, X))
    assert "two Sites whose rules want different adapters" in text


def test_a_weight_that_is_also_read_as_numbers_is_noted():
    f = lambda params, x: x @ params["w"] + (params["w"] ** 2).sum()  # noqa: E731
    plan = fewbit.plan(f, LoraProvider(rank=2, alpha=1.0), {"w": normal(16, 16)}, X)
    assert any("'w' is also read by" in n and "without its adapter" in n for n in plan.notes)


def test_helpers_say_what_they_take():
    _, params, plan = lora(mlp, PARAMS, X)
    assert "takes a plan with adapters" in failure(
        lambda: fewbit.lora.init(None, PARAMS, jax.random.key(0)), TypeError
    )
    assert "found no adapters in a dict" in failure(lambda: fewbit.lora.mask(PARAMS))
    assert "'up' is no adapter's name" in failure(
        lambda: fewbit.lora.with_adapters(PARAMS, {"up": X})
    )
    assert "which these parameters do not have" in failure(
        lambda: fewbit.lora.with_adapters(PARAMS, {"nose_lora_a": X})
    )
    assert "the parameters have no such leaf" in failure(
        lambda: fewbit.lora.init(plan, {"up": X, "bias": X}, jax.random.key(0))
    )
    assert "needs the plan" in failure(lambda: fewbit.merge_lora(params), TypeError)
