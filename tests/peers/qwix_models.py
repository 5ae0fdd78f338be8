"""What Qwix makes of `models.MODELS`. Runs in the environment of the peers.

cd tests && python -m peers.qwix_models <where to write the .npz>
"""

import sys

import jax
import qwix
from peers import cases, models

if __name__ == "__main__":
    answers = cases.Results()
    for model, recipe in models.pairs():
        quantized, output = models.ptq(qwix, model, recipe)
        for path, leaf in models.leaves(quantized).items():
            answers.put(f"{model}/{recipe}/params/{path}", leaf)
        answers.put(f"{model}/{recipe}/output", output)
        jax.clear_caches()
    answers.save(sys.argv[1])
