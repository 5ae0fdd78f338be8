"""Adapters as files: PEFT's names and shapes, read back in a new process, several over one base."""

import json
import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lora_cases import CASES, RANK, SOME, lora, normal

import fewbit
from fewbit.io._safetensors import SafetensorsFile, SafetensorsWriter, dtype_name
from fewbit.lora import _peft


def mlp(params, x):
    return jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]["kernel"]


BASE = {"up": {"kernel": normal(16, 32)}, "down": {"kernel": normal(32, 16, seed=1)}}
X = normal(4, 16, seed=2)
NAMES = {"up/kernel": "model.layers.0.mlp.up_proj", "down/kernel": "model.layers.0.mlp.down_proj"}


def tensors(folder):
    file = SafetensorsFile(folder / "adapter_model.safetensors")
    return {name: file.read(name, copy=True) for name in file.names}


def same(a, b):
    assert a.keys() == b.keys()
    assert all((np.asarray(a[name]) == np.asarray(b[name])).all() for name in a)


def test_named_and_turned_as_peft_does(tmp_path):
    _, params, plan = lora(mlp, BASE, X, weight_qtype="int8")
    fewbit.save_adapters(
        tmp_path, params, plan, names=NAMES, base_model_name_or_path="base", task_type="CAUSAL_LM"
    )
    found = tensors(tmp_path)
    assert {name: array.shape for name, array in found.items()} == {
        "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight": (RANK, 32),
        "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight": (16, RANK),
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": (RANK, 16),
        "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": (32, RANK),
    }
    # As torch would use them: y = x @ A.T @ B.T * (lora_alpha / r).
    a, b = (found[f"base_model.model.model.layers.0.mlp.up_proj.lora_{end}.weight"] for end in "AB")
    up = params["up"]
    assert np.allclose(X @ a.T @ b.T, X @ up["kernel_lora_a"] @ up["kernel_lora_b"], atol=1e-5)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none"}
    assert expected.items() <= config.items()
    assert config["target_modules"] == sorted(NAMES.values())
    assert config["task_type"] == "CAUSAL_LM" and config["base_model_name_or_path"] == "base"
    again = fewbit.load_adapters(tmp_path, fewbit.lora.without_adapters(params), plan, names=NAMES)
    same(fewbit.lora.adapters(again), fewbit.lora.adapters(params))
    by_function = fewbit.load_adapters(tmp_path, params, plan, names=NAMES.__getitem__)
    same(fewbit.lora.adapters(by_function), fewbit.lora.adapters(params))


@pytest.mark.parametrize("name", SOME)
def test_every_layout_comes_back(name, tmp_path):
    case = CASES[name]
    f = lambda params, x: case.op(params["w"], x)  # noqa: E731
    base = {"w": normal(*case.w)}
    _, params, plan = lora(f, base, normal(*case.x, seed=1))
    fewbit.save_adapters(tmp_path, params, plan)
    same(
        fewbit.lora.adapters(fewbit.load_adapters(tmp_path, base, plan)),
        fewbit.lora.adapters(params),
    )
    shapes = {n.rpartition("lora_")[2]: v.shape for n, v in tensors(tmp_path).items()}
    if name == "conv HWIO":
        assert shapes == {"A.weight": (RANK, 4, 3, 3), "B.weight": (5, RANK, 1, 1)}
    if name == "ragged dot":
        experts = [n for n in tensors(tmp_path) if "lora_A" in n]
        assert experts == [f"base_model.model.w.{k}.lora_A.weight" for k in range(3)]


def test_layers_of_a_stack_are_modules_of_their_own(tmp_path):
    def stacked(params, x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, params["layers"]["q"]["kernel"])[0]

    base = {"layers": {"q": {"kernel": normal(2, 8, 8)}}}
    _, params, plan = lora(stacked, base, normal(1, 8))
    fewbit.save_adapters(tmp_path / "own", params, plan)
    assert "base_model.model.layers.1.q.lora_A.weight" in tensors(tmp_path / "own")
    names = {"layers/q/kernel": "model.layers.{}.self_attn.q_proj"}
    fewbit.save_adapters(tmp_path / "hf", params, plan, names=names)
    found = tensors(tmp_path / "hf")
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    assert (found[key] == np.asarray(params["layers"]["q"]["kernel_lora_a"][1]).T).all()
    again = fewbit.load_adapters(tmp_path / "hf", base, plan, names=names)
    same(fewbit.lora.adapters(again), fewbit.lora.adapters(params))
    with pytest.raises(ValueError, match="needs 1 '{}', one for each axis of the stack, got 0"):
        fewbit.save_adapters(tmp_path, params, plan, names={"layers/q/kernel": "q_proj"})


def test_a_table_that_is_only_looked_up_in(tmp_path):
    f = lambda params, ids: params["wte"][ids]  # noqa: E731
    base = {"wte": normal(12, 8)}
    _, params, plan = lora(f, base, jnp.array([1, 2]), op_names=("take",))
    fewbit.save_adapters(tmp_path, params, plan)
    assert {n: v.shape for n, v in tensors(tmp_path).items()} == {
        "base_model.model.wte.lora_embedding_A": (RANK, 12),
        "base_model.model.wte.lora_embedding_B": (8, RANK),
    }
    again = fewbit.load_adapters(tmp_path, base, plan)
    same(fewbit.lora.adapters(again), fewbit.lora.adapters(params))


CHILD = """
import sys, numpy as np, jax, jax.numpy as jnp, fewbit
folder, base, out = sys.argv[1:]
params = fewbit.load(base).params
plan = fewbit.Plan.from_json(open(folder + '/plan.json').read())
def mlp(params, x):
    return jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]["kernel"]
params = fewbit.load_adapters(folder, params, plan)
lora = fewbit.apply_lora_to_model(mlp, fewbit.LoraProvider(plan.rules))
np.save(out, np.asarray(lora(params, jnp.asarray(np.load(folder + '/x.npy')))))
"""


def test_read_back_in_a_new_process(tmp_path):
    run, params, plan = lora(mlp, BASE, X, weight_qtype="int8")
    fewbit.save_adapters(tmp_path, params, plan)
    fewbit.save(tmp_path / "base", fewbit.lora.without_adapters(params))
    (tmp_path / "plan.json").write_text(plan.to_json())
    np.save(tmp_path / "x.npy", np.asarray(X))
    args = [str(tmp_path), str(tmp_path / "base"), str(tmp_path / "out.npy")]
    subprocess.run([sys.executable, "-c", CHILD, *args], check=True, timeout=300)
    assert (np.load(tmp_path / "out.npy") == np.asarray(run(params, X))).all()


def test_several_adapters_over_one_base(tmp_path):
    """Two trained sets, one base in memory: load both, switch, run each."""
    run, first, plan = lora(mlp, BASE, X, weight_qtype="int8", seed=1)
    base = fewbit.lora.without_adapters(first)
    second = fewbit.lora.init(plan, base, jax.random.key(2))
    outs = {}
    for name, params in {"poet": first, "clerk": second}.items():
        fewbit.save_adapters(tmp_path / name, params, plan)
        outs[name] = run(params, X)
    named = {
        name: fewbit.lora.adapters(fewbit.load_adapters(tmp_path / name, base, plan))
        for name in ("poet", "clerk")
    }
    for name, adapters in named.items():
        switched = fewbit.lora.with_adapters(base, adapters)
        assert switched["up"]["kernel"] is base["up"]["kernel"]
        assert (run(switched, X) == outs[name]).all()
    assert not np.allclose(outs["poet"], outs["clerk"])
    # One compiled program serves both: the factors are arguments of it.
    jitted = jax.jit(lambda adapters, x: run(fewbit.lora.with_adapters(base, adapters), x))
    for name, adapters in named.items():
        assert np.allclose(jitted(adapters, X), outs[name], atol=1e-5)
    assert jitted._cache_size() == 1


def test_linen_and_nnx_share_files(tmp_path):
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="up")(x)

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return self.up(x)

    rule = dict(rank=2, alpha=4.0, lora_b_initializer="normal")
    provider = fewbit.LoraProvider(**rule)
    params = fewbit.apply_lora_to_model(Linen(), provider).init(jax.random.key(0), X)["params"]
    fewbit.save_adapters(tmp_path, params, fewbit.plan(Linen(), provider, X))
    model = fewbit.apply_lora_to_model(Nnx(nnx.Rngs(0)), provider, X, rngs=nnx.Rngs(1))
    loaded = fewbit.load_adapters(tmp_path, model)
    assert (loaded.up.kernel_lora_a[...] == params["up"]["kernel_lora_a"]).all()
    fewbit.save_adapters(tmp_path / "again", loaded)
    same(tensors(tmp_path), tensors(tmp_path / "again"))


def test_ranks_that_differ_are_in_the_patterns(tmp_path):
    rules = [
        fewbit.LoraRule(module_path="up/.*", rank=2, alpha=4.0),
        fewbit.LoraRule(module_path="down/.*", rank=5, alpha=1.5),
    ]
    plan = fewbit.plan(mlp, fewbit.LoraProvider(rules), BASE, X)
    params = fewbit.lora.init(plan, BASE, jax.random.key(0))
    fewbit.save_adapters(tmp_path, params, plan)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    ranks = {"up": config["r"], "down": config["r"], **config["rank_pattern"]}
    alphas = {"up": config["lora_alpha"], "down": config["lora_alpha"], **config["alpha_pattern"]}
    assert ranks == {"up": 2, "down": 5} and alphas == {"up": 4, "down": 1.5}
    same(
        fewbit.lora.adapters(fewbit.load_adapters(tmp_path, BASE, plan)),
        fewbit.lora.adapters(params),
    )


# --- what cannot be read --------------------------------------------------------------------------


def failure(call):
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


@pytest.fixture
def saved(tmp_path):
    _, params, plan = lora(mlp, BASE, X)
    fewbit.save_adapters(tmp_path, params, plan)
    return tmp_path, params, plan


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_another_rank_or_strength(saved):
    folder, params, _ = saved
    for changes, sentence in (
        ({"rank": 2}, f"has rank {RANK}, but the rule for 'up/kernel' says 2. Write rank={RANK}"),
        ({"alpha": 3.0}, "was trained with lora_alpha=6 at up, but the rule for 'up/kernel' says"),
        ({"alpha": 3.0}, "0.5 times as strong. Write alpha=6 in LoraRule("),
    ):
        _, _, other = lora(mlp, BASE, X, **changes)
        assert sentence in failure(lambda plan=other: fewbit.load_adapters(folder, BASE, plan))


def test_names_that_do_not_meet(saved):
    folder, params, plan = saved
    names = {"up/kernel": "up_proj"}
    text = failure(lambda: fewbit.load_adapters(folder, BASE, plan, names=names))
    assert "has no adapter for 'up/kernel' (base_model.model.up_proj.lora_A.weight is not" in text
    assert "the nearest is base_model.model.up.lora_A.weight" in text
    text = failure(lambda: fewbit.save_adapters(folder, params, plan, names={"nose": "x"}))
    assert "names has an entry for 'nose'" in text and "up/kernel" in text
    twice = {"up/kernel": "x", "down/kernel": "x"}
    text = failure(lambda: fewbit.save_adapters(folder, params, plan, names=twice))
    assert "both have the name 'x'" in text
    _, _, one = lora(mlp, BASE, X, module_path="up/.*")
    text = failure(lambda: fewbit.load_adapters(folder, BASE, one))
    assert "holds 2 tensors that no weight with an adapter takes" in text
    with pytest.warns(UserWarning, match="2 tensors were left out"):
        some = fewbit.load_adapters(folder, BASE, one, strict=False)
    assert sorted(fewbit.lora.adapters(some)) == ["up/kernel_lora_a", "up/kernel_lora_b"]


def test_configs_that_mean_something_else(saved):
    folder, params, plan = saved
    for changes, sentence in (
        ({"use_rslora": True}, "Set use_rslora to false and lora_alpha to 10.392305"),
        ({"use_dora": True}, "is a DoRA adapter"),
        ({"peft_type": "IA3"}, "is a IA3 adapter"),
        ({"r": "8"}, "has no usable r"),
        ({"lora_alpha": 12}, "does not belong to the adapter_model.safetensors beside it"),
    ):
        before = (folder / "adapter_config.json").read_text()
        edit(folder, **changes)
        assert sentence in failure(lambda: fewbit.load_adapters(folder, BASE, plan)), changes
        (folder / "adapter_config.json").write_text(before)
    (folder / "adapter_config.json").write_text("{")
    assert "is no JSON" in failure(lambda: fewbit.load_adapters(folder, BASE, plan))
    (folder / "adapter_config.json").unlink()
    file = SafetensorsFile(folder / "adapter_model.safetensors")
    infos = [(name, file.info(name).dtype, file.info(name).shape) for name in file.names]
    tensors = {name: file.read(name, copy=True) for name in file.names}
    with SafetensorsWriter(file.path, infos, {"format": "pt"}) as writer:  # as PEFT writes it
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    assert "cannot be opened" in failure(lambda: fewbit.load_adapters(folder, BASE, plan))


def rewritten(folder, change):
    """The tensors changed, as a file of PEFT's, which carries no config of ours."""
    arrays = tensors(folder)
    change(arrays)
    infos = [(name, dtype_name(array.dtype), array.shape) for name, array in arrays.items()]
    with SafetensorsWriter(folder / "adapter_model.safetensors", infos, {"format": "pt"}) as writer:
        for name, array in arrays.items():
            writer.write(name, array)


A = "base_model.model.up.lora_A.weight"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *(("int32", "I32"), ("int8", "I8"), ("uint8", "U8"), ("int64", "I64"), ("bool", "BOOL")),
        *(("complex64", "C64"), ("float8_e4m3fn", "F8_E4M3"), ("float8_e8m0fnu", "F8_E8M0")),
    ],
)
def test_tensors_that_are_no_floats_are_refused(saved, dtype, name):
    folder, _, plan = saved
    rewritten(folder, lambda t: t.update({A: np.ones(t[A].shape, jnp.dtype(dtype))}))
    text = failure(lambda: fewbit.load_adapters(folder, BASE, plan))
    assert f"tensor '{A}' is {name}, and a LoRA factor is one of F16, BF16, F32, F64" in text
    assert "adapter_config.json names no scale" in text
    assert "Convert it with the tool that made it, or save the adapter in bfloat16." in text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_floats_of_other_widths_are_read(saved, dtype):
    folder, params, plan = saved
    rewritten(folder, lambda t: t.update({k: v.astype(jnp.dtype(dtype)) for k, v in t.items()}))
    found = fewbit.lora.adapters(fewbit.load_adapters(folder, BASE, plan))
    for name, array in fewbit.lora.adapters(params).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-2)


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e39])
def test_numbers_that_the_weights_type_cannot_hold(saved, number):
    folder, _, plan = saved

    def spoil(tensors):
        tensors[A] = tensors[A].astype(np.float64)
        tensors[A][1, 2] = number

    rewritten(folder, spoil)
    text = failure(lambda: fewbit.load_adapters(folder, BASE, plan))
    assert (
        f"tensor '{A}' holds 1 numbers that are NaN or infinite as float32, the first at " in text
    )
    assert "(1, 2). They would spoil every result." in text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"alpha_pattern": {r"(a)\1": 4}}, "has a bad alpha_pattern: the pattern"),
        (
            {"alpha_pattern": {"(": 4}},
            "has a bad alpha_pattern: missing ), unterminated subpattern",
        ),
        ({"alpha_pattern": {"x)|(.*": 4}}, "has a bad alpha_pattern: unbalanced parenthesis"),
        ({"rank_pattern": {r"(a)\1": 4}}, "has a bad rank_pattern: the pattern"),
        ({"alpha_pattern": {"up": "4"}}, "has no usable alpha_pattern['up']: expected a number"),
        ({"alpha_pattern": ["up"]}, "has no usable alpha_pattern: expected an object"),
        ({"r": 10**400}, "has no usable r: expected a positive number, found 1000"),
        ({"lora_alpha": 1e400}, "has no usable lora_alpha: expected a positive number, found inf"),
        ({"r": True}, "has no usable r: expected a positive number, found True"),
    ],
)
def test_patterns_and_numbers_of_a_config(saved, changes, sentence):
    folder, _, plan = saved
    rewritten(folder, lambda t: None)
    edit(folder, **changes)
    assert sentence in failure(lambda: fewbit.load_adapters(folder, BASE, plan))


def test_patterns_of_a_config_do_not_run_away(tmp_path):
    """`re` takes years to find out that these do not match."""
    _, params, plan = lora(mlp, BASE, X)
    names = {"up/kernel": "u" * 80, "down/kernel": "down"}
    fewbit.save_adapters(tmp_path, params, plan, names=names)
    rewritten(tmp_path, lambda t: None)
    edit(tmp_path, alpha_pattern={"(u|u)*!": 4, r"(\w+\s?)*!": 3, "(u+)+": 6.0, ".*": 6})
    same(
        fewbit.lora.adapters(fewbit.load_adapters(tmp_path, BASE, plan, names=names)),
        fewbit.lora.adapters(params),
    )


def test_a_config_of_another_save_is_told_with_the_numbers_that_are_right(saved):
    folder, _, plan = saved
    edit(folder, lora_alpha=12)
    text = failure(lambda: fewbit.load_adapters(folder, BASE, plan))
    assert "the tensors were saved with lora_alpha=6. Write that into it, or save" in text


@pytest.mark.parametrize("new", [False, True])
def test_a_save_that_is_cut_between_its_files_leaves_the_old_or_the_new_adapter(
    saved, monkeypatch, new
):
    folder, params, plan = saved
    _, other, other_plan = lora(mlp, BASE, X, alpha=2.0)
    # After the tensors have their name, or before.
    place = (_peft, "move_into_place") if new else (os, "fsync")

    def cut(*args):
        raise OSError("the disk is gone")

    monkeypatch.setattr(*place, cut)
    with pytest.raises((OSError, ValueError), match="the disk is gone"):
        fewbit.save_adapters(folder, other, other_plan)
    monkeypatch.undo()
    assert not (folder / "adapter_config.json").exists()  # which PEFT says, loudly
    right, wrong = (other_plan, plan) if new else (plan, other_plan)
    values = other if new else params
    found = fewbit.load_adapters(folder, BASE, right)
    for name, value in fewbit.lora.adapters(found).items():
        np.testing.assert_array_equal(value, fewbit.lora.adapters(values)[name])
    assert "was trained with lora_alpha" in failure(
        lambda: fewbit.load_adapters(folder, BASE, wrong)
    )
    fewbit.save_adapters(folder, other, other_plan)
    assert sorted(p.name for p in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_save_that_fails_leaves_the_old_files(saved, monkeypatch):
    folder, params, plan = saved
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def broken(*args):
        raise OSError("the disk is full")

    monkeypatch.setattr(_peft, "to_peft", broken)
    with pytest.raises(OSError, match="the disk is full"):
        fewbit.save_adapters(folder, params, plan)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
