"""The answers of a Gemma3 before and after quantization, to one prompt.

python examples/keras/gemma/quantization.py -p int8 --random
python examples/keras/gemma/quantization.py -p int4 -m gemma3_instruct_270m
"""

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import _options

import fewbit
import fewbit.keras

options = _options.parser(__doc__, p="fp8_e4m3", m=_options.GEMMA).parse_args()


def answer(model, name):
    start = time.perf_counter()
    text = model.generate({"prompts": [_options.PROMPT]}, max_length=48)[0]
    seconds = time.perf_counter() - start
    size = fewbit.report(model).bytes
    print(f"{name} ({size / 2**20:.1f} MiB, {seconds:.1f} s with compilation): {text!r}")


model = _options.gemma(options)
answer(model, "float")
config = _options.config(options.precision, static=False)
model = fewbit.keras.quantize_model(model, config)
model.compile(sampler=fewbit.keras.GreedySampler())
answer(model, options.precision)
