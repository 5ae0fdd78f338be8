"""PEFT reads adapters that fewbit wrote, and fewbit those that PEFT wrote: the same updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peers import adapters
from peers.environment import answers_of, folder_of
from tolerances import PEER_F32

import fewbit
from fewbit import LoraProvider, LoraRule

pytestmark = pytest.mark.long

COMMON = dict(rank=adapters.RANK, alpha=adapters.ALPHA, lora_b_initializer="normal")
OTHER = dict(rank=adapters.OTHER_RANK, alpha=adapters.OTHER_ALPHA, lora_b_initializer="normal")


def decoder(params, x):
    """Products with the weights of every layer; what stands between them is PEFT's business."""

    def layer(x, p):
        h = jnp.tanh(x @ p["q"] @ p["v"])
        return x + jnp.tanh(h @ p["up"]) @ p["down"], None

    return jax.lax.scan(layer, x, params["layers"])[0]


SHORT = {module.rpartition(".")[2].removesuffix("_proj"): module for module in adapters.PROJECTIONS}
NAMES = {f"layers/{short}": f"model.layers.{{}}.{module}" for short, module in SHORT.items()}


def small(params, inputs):
    ids, rows, image = inputs
    conv = jax.lax.conv_general_dilated(
        image, params["conv"], (1, 1), "VALID", dimension_numbers=("NCHW", "HWIO", "NCHW")
    )
    return jnp.take(params["table"], ids, axis=0), rows @ params["up"], conv


TURNS = {"table": (0, 1), "up": (1, 0), "conv": (2, 3, 1, 0)}  # from PyTorch's axes to ours


def decoder_case():
    base = adapters.decoder_weights()
    layers = {
        short: jnp.stack([base[adapters.decoder_name(k, module)].T for k in range(adapters.LAYERS)])
        for short, module in SHORT.items()
    }
    rules = [LoraRule(module_path=".*down", **OTHER), LoraRule(**COMMON)]
    return decoder, rules, {"layers": layers}, jnp.ones((3, adapters.WIDTH))


def small_case():
    params = {
        name: jnp.asarray(weight.transpose(TURNS[name]))
        for name, weight in adapters.small_weights().items()
    }
    rules = [
        LoraRule(module_path="up", **OTHER),
        LoraRule(module_path="table", op_names=("take",), **COMMON),
        LoraRule(module_path="conv", **COMMON),
    ]
    inputs = tuple(map(jnp.asarray, (adapters.ROWS, adapters.rows(), adapters.image())))
    return small, rules, params, inputs


CASES = {"decoder": decoder_case, "small": small_case}


def planned(kind):
    function, rules, params, inputs = CASES[kind]()
    return params, fewbit.plan(function, LoraProvider(rules), params, inputs)


def names_of(kind):
    return NAMES if kind == "decoder" else None


def theirs(kind, params):
    """Parameters as PyTorch has them, by module."""
    if kind == "small":
        return {
            name: np.asarray(params[name]).transpose(np.argsort(turn))
            for name, turn in TURNS.items()
        }
    return {
        adapters.decoder_name(k, module): np.asarray(params["layers"][short][k]).T
        for k in range(adapters.LAYERS)
        for short, module in SHORT.items()
    }


def merged(kind, params, plan):
    return theirs(kind, fewbit.merge_lora(params, plan, requantize=False)[0])


def prepare(folder):
    for kind in CASES:
        params, plan = planned(kind)
        params = fewbit.lora.init(plan, params, jax.random.key(3))
        task = "CAUSAL_LM" if kind == "decoder" else None
        fewbit.save_adapters(
            folder / f"fewbit-{kind}", params, plan, names=names_of(kind), task_type=task
        )
        np.savez(folder / f"fewbit-{kind}-merged.npz", **merged(kind, params, plan))


@pytest.fixture(scope="module")
def peft(tmp_path_factory):
    return answers_of("peft_adapters", tmp_path_factory, prepare)


@pytest.fixture
def folder(peft, tmp_path_factory):
    return folder_of("peft_adapters", tmp_path_factory)


def close(found, expected):
    size = np.max(np.abs(expected))
    assert size > 0.01 and np.max(np.abs(found - expected)) < 4 * PEER_F32 * size


def updates(kind, params, plan):
    base = theirs(kind, params)
    return {name: weight - base[name] for name, weight in merged(kind, params, plan).items()}


@pytest.mark.parametrize("kind", CASES)
def test_peft_reads_what_fewbit_writes(peft, folder, kind):
    params, plan = planned(kind)
    params = fewbit.load_adapters(folder / f"fewbit-{kind}", params, plan, names=names_of(kind))
    mine = updates(kind, params, plan)
    assert peft.names(f"{kind}/read/delta/") == set(mine)  # each module, and no other
    for name, update in mine.items():
        close(peft.arrays[f"{kind}/read/delta/{name}"], update)
    outs = peft.names(f"{kind}/base")
    assert len(outs) == (3 if kind == "small" else 1)
    for out in outs:
        base, adapted, ours = (
            peft.arrays[f"{kind}/{what}{out}"] for what in ("base", "read/out", "ours")
        )
        # With the adapters, and with the weights that fewbit merged: one model.
        close(adapted, ours)
        assert np.max(np.abs(adapted - base)) > 0.01


@pytest.mark.parametrize("kind", CASES)
def test_fewbit_reads_what_peft_writes(peft, folder, kind):
    params, plan = planned(kind)
    params = fewbit.load_adapters(folder / f"peft-{kind}", params, plan, names=names_of(kind))
    mine = updates(kind, params, plan)
    assert peft.names(f"{kind}/written/delta/") == set(mine)
    for name, update in mine.items():
        close(peft.arrays[f"{kind}/written/delta/{name}"], update)
    if kind == "small":
        run, rules, _, inputs = small_case()
        outs = fewbit.apply_lora_to_model(run, LoraProvider(rules))(params, inputs)
        for k, out in enumerate(outs):
            close(np.asarray(out), peft.arrays[f"small/written/out/{k}"])


def test_a_rule_of_another_strength_is_told(peft, folder):
    _, _, params, inputs = small_case()
    provider = LoraProvider(
        [LoraRule(module_path="up", **OTHER | dict(alpha=3.0)), *small_case()[1][1:]]
    )
    plan = fewbit.plan(small, provider, params, inputs)
    with pytest.raises(ValueError, match="was trained with lora_alpha=6 at up, but the rule for"):
        fewbit.load_adapters(folder / "peft-small", params, plan)
