"""Rules for vLLM on TPUs: the arguments of Qwix 0.1.2's QuantizationRule, or an error."""

import json

import jax.numpy as jnp
import pytest
from helpers import says

import fewbit
from fewbit import LoraRule, QtRule, QuantizationRule

# The fields of that version, and nothing else.
FIELDS = """module_path op_names weight_qtype act_qtype tile_size act_static_scale
weight_calibration_method act_calibration_method act_batch_axes""".split()

RULES = [
    QuantizationRule(module_path=".*/gate", weight_qtype=None),
    QuantizationRule(module_path="layers/.*", op_names=("einsum", "gmm"), weight_qtype=jnp.int4,
                     tile_size=128, weight_calibration_method="minmax"),
    QuantizationRule(module_path="head", weight_qtype="nf4", tile_size=0.25),
    QuantizationRule(weight_qtype="fp8", act_qtype="fp8", act_calibration_method="fixed,-4,4",
                     weight_calibration_method="absmax,0.9"),
]  # fmt: skip


def test_rules_as_plain_values():
    found = fewbit.rules_to_vllm(RULES)
    assert json.loads(json.dumps(found)) == found
    assert all(set(rule) <= set(FIELDS) for rule in found)
    assert found[0] == {"module_path": ".*/gate"}
    assert found[1]["op_names"] == ["einsum", "gmm"] and found[1]["weight_qtype"] == "int4"
    assert found[3]["act_qtype"] == "float8_e4m3fn"


def test_they_read_back_to_the_same_rules():
    assert [QuantizationRule(**fields) for fields in fewbit.rules_to_vllm(RULES)] == RULES


def test_a_rule_for_training_that_says_nothing_of_training():
    assert fewbit.rules_to_vllm([QtRule(weight_qtype="int8")]) == [
        {"module_path": ".*", "weight_qtype": "int8"}
    ]


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (LoraRule(rank=2, alpha=1.0), "it is a LoraRule, and only QuantizationRules are served."),
        (QtRule(weight_qtype="int8", bwd_qtype="int8"), "bwd_qtype would be lost"),
        (QuantizationRule(weight_qtype="int8", scale_dtype="float16"), "Leave scale_dtype out"),
        (
            QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True),
            "static scales are made from statistics, which these rules do not carry",
        ),
        (
            QuantizationRule(weight_qtype="int8", act_static_reduction="mean"),
            "Leave act_static_reduction out",
        ),
        (QuantizationRule(weight_qtype="int4", tile_size={0: 32, 1: 32}), "not a mapping of axes"),
        (QuantizationRule(weight_qtype="int8", op_names=("take",)), "Leave 'take' out of op_names"),
        (QuantizationRule(weight_qtype="mxfp4"), "weight_qtype='mxfp4' is not known there."),
        (
            QuantizationRule(weight_qtype="int8", act_qtype="int16"),
            "act_qtype='int16' is not known",
        ),
        (
            QuantizationRule(weight_qtype="int8", weight_calibration_method="mse"),
            "weight_calibration_method='mse' is not known there. Methods are absmax, minmax, rms,",
        ),
        (
            QuantizationRule(
                weight_qtype="int8", act_qtype="int8", act_calibration_method="percentile,99"
            ),
            "act_calibration_method='percentile,99' is not known there",
        ),
        (
            QuantizationRule(
                weight_qtype="int8", act_qtype="int6", act_calibration_method="minmax"
            ),
            "needs a zero point, which exists there for int8 and int4 only, not for int6",
        ),
    ],
)
def test_what_cannot_be_said(rule, sentence):
    with says(ValueError, "Rule 1, ", repr(rule), "cannot be said in rules for vLLM: ", sentence):
        fewbit.rules_to_vllm([RULES[0], rule])


def test_what_is_no_list_of_rules():
    with says(TypeError, "One rule where a list of rules is expected. Write [Quantiz"):
        fewbit.rules_to_vllm(RULES[0])
    with says(TypeError, "rules_to_vllm takes QuantizationRules, got dict as rule 0."):
        fewbit.rules_to_vllm([{"weight_qtype": "int8"}])
