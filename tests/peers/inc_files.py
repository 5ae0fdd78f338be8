"""What Neural Compressor writes of `saved_models`. Runs where the peers are installed.

cd tests && python -m peers.inc_files <where to write the .npz> <folder for the files>
cd tests && python -m peers.inc_files --golden golden/neural_compressor

The second one writes those that are kept. Archives are packed again, compressed; a preset is one.
"""

import os
import pathlib
import sys
import tempfile
import zipfile

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from neural_compressor import jax as inc
from peers import cases, saved_models


def write(name, folder):
    """The file or preset of one case, and what the quantized model gave."""
    kind, configs, how, preset = saved_models.FILES[name]
    x = saved_models.INPUTS[kind]()
    config, *more = [getattr(inc, cls)(**fields) for cls, fields in configs]
    for each in more:
        config = config + each
    static = any(cls == "StaticQuantConfig" for cls, _ in configs)
    model = saved_models.drawn(kind, **how)
    model = inc.quantize_model(model, config, (lambda model: model(x)) if static else None)
    if preset:
        model.save_to_preset(str(folder / name))
    keras.models.save_model(model, folder / f"{name}.keras")
    return np.asarray(model(x), np.float32)


def keep(name, folder):
    with tempfile.TemporaryDirectory() as temporary:
        place = pathlib.Path(temporary)
        np.save(folder / f"{name}.npy", write(name, place).astype(np.float32))
        preset = saved_models.FILES[name][3]
        if preset:
            written = {file.name: file.read_bytes() for file in (place / name).iterdir()}
        else:
            with zipfile.ZipFile(place / f"{name}.keras") as archive:
                written = {member: archive.read(member) for member in archive.namelist()}
    target = folder / f"{name}.{'zip' if preset else 'keras'}"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for member, content in sorted(written.items()):
            archive.writestr(zipfile.ZipInfo(member), content, zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    if sys.argv[1] == "--golden":
        for name in saved_models.GOLDEN:
            keep(name, pathlib.Path(sys.argv[2]))
    else:
        answers = cases.Results()
        for name in saved_models.FILES:
            answers.put(name, write(name, pathlib.Path(sys.argv[2])))
        answers.save(sys.argv[1])
