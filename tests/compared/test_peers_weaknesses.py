"""Where Qwix 0.1.8 is wrong or refuses, fewbit is right. Both answers are pinned.

If a peer's pinned answer changes, a newer release has mended it: update the pin, keep our half.
"""

import re

import pytest
import tolerances
from peers import weaknesses
from peers.environment import answers_of

import fewbit

pytestmark = pytest.mark.long

EXACT = 1e-6  # the product of what is stored: only the order of sums is free
INT8 = tolerances.NNX_INT8

# question: (what the peer answers: the start of an exception, or a test of its value,
#            the largest error that fewbit may have)
WANTED = {
    "int1": (lambda found: found == 1.0, 0.65),  # all zeros; a sign and a mean can do 0.64
    "float16_weights_of_a_usual_size": (lambda found: found == 1.0, 0.01),
    "int4_times_int4": ("JaxRuntimeError: INVALID_ARGUMENT", EXACT),
    "mxfp8_times_mxfp8_under_jit": (lambda found: found < EXACT, EXACT),
    "label_summed_in_one_operand": (r"AssertionError: shape \(5, 4\) instead of \(5,\)", EXACT),
    "nf4_ragged_dot": (lambda found: found > 10, EXACT),
    "nf4_convolution": ("TypeError: lax.conv_general_dilated requires", EXACT),
    "plain_product_after_a_quantized_model": (lambda found: found > 1e-3, 0.0),
    "quantized_model_after_a_plain_product": ({"error": 0.0, "quantized": 0}, INT8),
    "weight_on_the_left": ({"error": 0.0, "quantized": 0}, INT8),
    "tied_embedding": ("ValueError: at least one array or dtype is required", INT8),
    "scanned_layers": ("ValueError: scan got `length` argument of 3 which disagrees", INT8),
    "convolution_with_a_quantized_weight_alone": ("ValueError: conv_general_dilated req", INT8),
    "convolution_with_two_spellings_of_a_type": ("ValueError: conv_general_dilated req", INT8),
    "ragged_dot_in_a_model": ({"error": 0.0, "quantized": 0}, INT8),
    "gradient_of_the_input": (lambda found: found > 1, 0.01),
    "square_weight_and_square_input": ("AssertionError: lhs and rhs cannot be both w", INT8),
    "nnx_matmul": ("TraceContextError", INT8),
    "nnx_cast_of_the_weight": ("ValueError: Unsupported type: .*QArray", INT8),
    "nnx_method_without_the_name_self": ("ValueError: Current module is not known", INT8),
    "nnx_shard_map": ("TraceContextError", INT8),
}
# Questions whose answer is no error.
OTHERS = {"uint8_of_signed_numbers", "float32_asked_of_bfloat16"}


@pytest.fixture(scope="module")
def qwix(tmp_path_factory):
    return answers_of("qwix_weaknesses", tmp_path_factory).words


def test_every_question_is_judged():
    assert set(weaknesses.QUESTIONS) == set(WANTED) | OTHERS


@pytest.mark.parametrize("question", WANTED)
def test_fewbit_is_right(qwix, question):
    peer, bound = WANTED[question]
    if isinstance(peer, str):
        assert re.match(peer, str(qwix[question])), qwix[question]
    else:
        as_pinned = peer(qwix[question]) if callable(peer) else peer == qwix[question]
        assert as_pinned, qwix[question]

    mine = weaknesses.answer(question, fewbit)
    assert not isinstance(mine, str), mine
    if isinstance(mine, dict):
        assert mine.get("quantized", 1) == 1
        mine, shape = mine["error"], mine.get("scale")
        assert shape in (None, [3, 1, 48])
        assert mine > 0  # nothing was left in float
    assert mine <= bound


def test_uint8_without_a_zero_point_is_refused(qwix):
    assert 0.4 < qwix["uint8_of_signed_numbers"] < 0.6  # every negative number became zero
    mine = weaknesses.answer("uint8_of_signed_numbers", fewbit)
    assert mine.startswith("ValueError: uint8 doesn't support symmetric quantization")


def test_preferred_element_type_is_kept(qwix):
    assert qwix["float32_asked_of_bfloat16"] == "bfloat16"
    assert weaknesses.answer("float32_asked_of_bfloat16", fewbit) == "float32"
