"""Load the classifier that prepare_static.py wrote and look at a picture.

python examples/keras/vit/use_static.py -q vit_int8.keras
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import _options
import keras
import keras_hub  # noqa: F401  the classes that the file names

import fewbit.keras  # noqa: F401  all that loading needs

flags = _options.parser(__doc__, q="vit_quantized.keras")
flags.add_argument("--image", help="a picture; without it a pattern")
options = flags.parse_args()

model = keras.saving.load_model(options.quantized_path)
picture = _options.image(model, options.image)
print(f"loaded {type(model).__name__}")
print(f"sees: {_options.top(model.predict(picture, verbose=0)[0])}")
