"""Load the preset that prepare_static.py wrote and let it answer.

python examples/keras/gemma/use_static.py -q gemma_int8
"""

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import _options
import keras_hub

import fewbit.keras  # noqa: F401  all that loading needs

options = _options.parser(__doc__, q="gemma3_instruct_270m_quantized").parse_args()

start = time.perf_counter()
model = keras_hub.models.Gemma3CausalLM.from_preset(options.quantized_path)
print(f"loaded {type(model).__name__} in {time.perf_counter() - start:.1f} s")
model.compile(sampler="greedy")
print(f"answer: {model.generate({'prompts': [_options.PROMPT]}, max_length=48)[0]!r}")
