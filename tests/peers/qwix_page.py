"""What Qwix makes of the blocks of docs/from-qwix.md. Runs in the environment of the peers.

cd tests && python -m peers.qwix_page <where to write the .npz>
"""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # before jax looks

import jax
from peers import cases, page

if __name__ == "__main__":
    answers = cases.Results()
    for heading, wide in page.every_run():
        run = f"{heading}{' wide' if wide else ''}"
        ran = page.run(heading, "qwix", wide)
        for path, leaf in page.arrays(ran.bound).items():
            answers.put(f"{run}/{path}", leaf)
        answers.say(run, ran.printed)
        jax.clear_caches()
    try:
        page.run("A quantized checkpoint into an abstract NNX model", "qwix", change=page.BARE)
    except ValueError as error:
        answers.say("bare", str(error))
    answers.save(sys.argv[1])
