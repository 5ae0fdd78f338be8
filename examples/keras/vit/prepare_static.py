"""Quantize a vision transformer with static ranges and save it as one file.

python examples/keras/vit/prepare_static.py -p int8 --random -q vit_int8.keras
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import _options

import fewbit
import fewbit.keras

flags = _options.parser(__doc__, p="fp8_e4m3", m="vit.keras", q="vit_quantized.keras")
flags.add_argument("--image", help="a picture to calibrate on; without it a pattern")
options = flags.parse_args()

model = _options.vit(options)
picture = _options.image(model, options.image)
config = _options.config(options.precision, static=True)
model = fewbit.keras.quantize_model(model, config, [picture])
print(fewbit.report(model).summary)
model.save(options.quantized_path)
size = pathlib.Path(options.quantized_path).stat().st_size
print(f"saved {size / 2**20:.2f} MiB in {options.quantized_path}")
print(f"sees: {_options.top(model.predict(picture, verbose=0)[0])}")
