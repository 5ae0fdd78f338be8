"""Quantize a Gemma3 with static ranges, calibrated by generating text, and save it as a preset.

python examples/keras/gemma/prepare_static.py -p int8 --random -q gemma_int8
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import _options

import fewbit
import fewbit.keras

flags = _options.parser(__doc__, p="fp8_e4m3", m=_options.GEMMA, q="gemma3_instruct_270m_quantized")
options = flags.parse_args()

PROMPTS = [_options.PROMPT, "Write a poem about the sea.", "2 + 2 ="]


def calibrate(model):
    model.generate({"prompts": PROMPTS}, max_length=48)


model = _options.gemma(options)
config = _options.config(options.precision, static=True)
model = fewbit.keras.quantize_model(model, config, calibrate)
print(fewbit.report(model).summary)
model.save_to_preset(options.quantized_path)
files = [file for file in pathlib.Path(options.quantized_path).rglob("*") if file.is_file()]
size = sum(file.stat().st_size for file in files)
print(f"saved {size / 2**20:.1f} MiB in {options.quantized_path}")
print(f"answer: {model.generate({'prompts': [_options.PROMPT]}, max_length=48)[0]!r}")
