"""A model quantized by the same lines of code as with Qwix: same tree, same codes, same outputs."""

import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from peers import models
from peers.environment import answers_of

import fewbit

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def qwix(tmp_path_factory):
    return answers_of("qwix_models", tmp_path_factory)


@pytest.mark.parametrize(("model", "recipe"), list(models.pairs()))
def test_same_parameters_and_outputs(qwix, model, recipe):
    quantized, output = models.ptq(fewbit, model, recipe)
    mine, prefix = models.leaves(fewbit.unpack(quantized)), f"{model}/{recipe}/params/"
    assert set(mine) == qwix.names(prefix)
    assert any(path.endswith("array/qvalue") for path in mine)
    for path, leaf in mine.items():
        theirs = qwix.arrays[prefix + path]
        assert (leaf.shape, jnp.dtype(leaf.dtype).name) == (
            theirs.shape,
            qwix.dtypes[prefix + path],
        ), path
        assert np.array_equal(np.asarray(leaf).astype(np.float32), theirs), path
    theirs = qwix.arrays[f"{model}/{recipe}/output"]
    assert output.shape == theirs.shape
    error = np.abs(np.asarray(output) - theirs).max() / np.abs(theirs).max()
    dynamic = "act_qtype" in models.RECIPES[recipe]
    assert error <= (tolerances.PEER_MODEL_DYNAMIC if dynamic else tolerances.PEER_F32), error
