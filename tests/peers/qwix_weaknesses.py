"""How Qwix answers `weaknesses.QUESTIONS`. Runs in the environment of the peers.

cd tests && python -m peers.qwix_weaknesses <where to write the .npz>
"""

import sys

import jax
import qwix
from peers import cases, weaknesses

if __name__ == "__main__":
    answers = cases.Results()
    for question in weaknesses.QUESTIONS:
        answers.say(question, weaknesses.answer(question, qwix))
        jax.clear_caches()
    answers.save(sys.argv[1])
