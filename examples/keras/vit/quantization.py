"""What a vision transformer sees before and after quantization.

python examples/keras/vit/quantization.py -p int8 --random
python examples/keras/vit/quantization.py -p fp8_e4m3 -m vit.keras --image beach.jpg
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import _options
import numpy as np

import fewbit
import fewbit.keras

flags = _options.parser(__doc__, p="fp8_e4m3", m="vit.keras")
flags.add_argument("--image", help="a picture; without it a pattern")
options = flags.parse_args()

model = _options.vit(options)
picture = _options.image(model, options.image)
before = model.predict(picture, verbose=0)
config = _options.config(options.precision, static=True)
model = fewbit.keras.quantize_model(model, config, lambda model: model.predict(picture, verbose=0))
after = model.predict(picture, verbose=0)

print(fewbit.report(model).summary)
print(f"float: {_options.top(before[0])}")
print(f"{options.precision}: {_options.top(after[0])}")
error = np.linalg.norm(after - before) / np.linalg.norm(before)
print(f"relative error: {error:.4f}")
