"""A Keras model quantized as with Intel Neural Compressor: the same scales, codes and outputs.

`emulate=True` is its arithmetic; fewbit's own, in integers, is tested elsewhere.
"""

import json

import numpy as np
import pytest
from peers import keras_models
from peers.environment import answers_of
from tolerances import PEER_KERAS, PEER_KERAS_SCALE

import fewbit.keras

pytestmark = [
    pytest.mark.long,
    # Keras' own, of a NumPy that is newer than it knows.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
EVERY_RECIPE = pytest.mark.parametrize("recipe", keras_models.RECIPES)
# The layers in which the peer rounds the operands of attention's two products.
INSIDE_ATTENTION = ("f_qdq", "k_qdq", "a_qdq", "v_qdq")


@pytest.fixture(scope="module")
def inc(tmp_path_factory):
    return answers_of("inc_models", tmp_path_factory)


@pytest.fixture(scope="module")
def mine():
    """The model by recipe, quantized when first asked for, and its outputs."""
    made = {}

    def quantized(recipe):
        if recipe not in made:
            made[recipe] = keras_models.quantized(fewbit.keras, recipe, emulate=True)
        return made[recipe]

    return quantized


def arrays(inc, prefix):
    return {name: inc.arrays[prefix + name] for name in inc.names(prefix)}


def error_of(value, wanted):
    """The largest error as a fraction of the largest value."""
    return np.abs(np.asarray(value, np.float64) - wanted).max() / np.abs(wanted).max()


@EVERY_RECIPE
def test_the_same_layers_are_quantized(inc, mine, recipe):
    prefix = f"{recipe}/class/"
    theirs = {
        name.removeprefix(prefix): word.lower()  # QStaticConv2d is theirs
        for name, word in inc.words.items()
        if name.startswith(prefix) and word.startswith("Q")
    }
    found = {
        path: type(layer).__name__.lower()
        for path, layer in keras_models.each_layer(mine(recipe)[0]).items()
        if type(layer).__name__.startswith("Q")
    }
    assert found == theirs and len(found) == 8


@EVERY_RECIPE
def test_weights_have_the_same_scales_and_codes(inc, mine, recipe):
    theirs, compared = arrays(inc, f"{recipe}/layers/"), 0
    for path, layer in keras_models.each_layer(mine(recipe)[0]).items():
        if f"{path}/kernel" in theirs:
            scale, kernel = theirs[f"{path}/w_scale"], theirs[f"{path}/kernel"]
            assert layer.w_scale.value.size == scale.size, path
            found = np.asarray(layer.w_scale.value).reshape(scale.shape)
            np.testing.assert_allclose(found, scale, rtol=PEER_KERAS_SCALE, err_msg=path)
            codes = np.asarray(layer.kernel.value).reshape(kernel.shape) / found
            np.testing.assert_allclose(codes, kernel / scale, rtol=1e-5, atol=1e-5, err_msg=path)
            compared += 1
    assert compared == sum(name.endswith("/kernel") for name in theirs) == 7


@pytest.mark.parametrize("recipe", [r for r in keras_models.RECIPES if r.startswith("static")])
def test_calibration_finds_the_same_activation_scales(inc, mine, recipe):
    theirs, compared = arrays(inc, f"{recipe}/layers/"), 0
    for path, layer in keras_models.each_layer(mine(recipe)[0]).items():
        if f"{path}/kernel" in theirs:
            scale = theirs[f"{path}/a_scale"].ravel()
            np.testing.assert_allclose(layer.a_scale.value, scale, rtol=PEER_KERAS_SCALE)
            if "int8" in recipe:
                zero = theirs[f"{path}/a_zero_point"].ravel()
                assert np.array_equal(np.asarray(layer.a_zero_point.value), zero), path
            compared += 1
    assert compared == 7


@pytest.mark.parametrize("recipe", [r for r in keras_models.RECIPES if r.startswith("static")])
def test_attention_s_own_products_have_the_same_scales(inc, mine, recipe):
    theirs = arrays(inc, f"{recipe}/layers/")
    wanted = [
        float(theirs[name].squeeze())
        for name in theirs
        if name.endswith("/a_scale") and any(part in name for part in INSIDE_ATTENTION)
    ]
    found = [
        float(np.asarray(getattr(scale, "value", scale)).squeeze())
        for scale in keras_models.each_layer(mine(recipe)[0])["heads"].a_scale.values()
    ]
    assert len(wanted) == len(INSIDE_ATTENTION)
    np.testing.assert_allclose(sorted(found), sorted(wanted), rtol=PEER_KERAS_SCALE)


@EVERY_RECIPE
@pytest.mark.parametrize("branch", keras_models.SHAPES)
def test_outputs_are_the_same(inc, mine, branch, recipe):
    theirs, output = inc.arrays[f"{recipe}/outputs/{branch}"], mine(recipe)[1][branch]
    assert output.shape == theirs.shape
    assert error_of(output, theirs) <= PEER_KERAS


@pytest.mark.parametrize("name", [*keras_models.CONFIGS, "sum"])
def test_configs_are_read_and_written_alike(inc, name):
    text = inc.words[f"config/{name}"]
    config = fewbit.keras.JaxBaseConfig.from_json_string(text)
    assert config.to_dict() == json.loads(text)
    assert json.loads(keras_models.config_texts(fewbit.keras)[name]) == json.loads(text)
