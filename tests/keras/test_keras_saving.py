"""Quantized Keras models in files: Keras' own calls, every kind of model, exact, checked."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import warnings
import zipfile

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what Keras' own imports have to say
    import h5py
    import keras

import keras_saving_cases as cases

import fewbit.keras
from fewbit.keras.layers._variables import set_variable
from fewbit.keras.saving import _format
from fewbit.keras.saving._store import from_file, to_file
from fewbit.kernels._library import BACKEND_VARIABLE
from fewbit.numerics import FORMATS
from fewbit.numerics._bits import packed_length
from fewbit.qarray import quantize

SUPPORT = pathlib.Path(__file__).parents[1] / "support"
CASES_FILE = SUPPORT / "keras_saving_cases.py"
# NumPy 2 asks Keras' variables for something that they do not do yet.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(autouse=True)
def keras_may_promote():
    """Keras' own layers mix dtypes and ranks as JAX allows by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def in_a_new_process(*words, **env):
    done = subprocess.run(
        [sys.executable, str(CASES_FILE), *map(str, words)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SUPPORT.parents[1]), str(SUPPORT)]),
            **env,
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every case, saved by this process."""
    folder = tmp_path_factory.mktemp("keras")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for name, case in cases.CASES.items():
            cases.save(case(), folder, name)
    return folder


# --- every kind of model --------------------------------------------------------------------------


def test_every_model_is_the_same_in_a_new_process(folder):
    assert sorted(p.stem for p in folder.glob("*.keras")) == sorted(cases.CASES)
    assert in_a_new_process("load", folder) == {}


@pytest.mark.long
def test_the_files_are_read_where_other_kernels_run(folder):
    """Without kernels the same codes lie otherwise, and float sums run in another order."""
    faults = in_a_new_process("load", folder, **{BACKEND_VARIABLE: "xla"})
    for name, fault in faults.items():
        assert fault["same_classes"] and fault["error"] < 0.02, (name, fault)


def test_decisions_are_those_of_the_layers_whatever_they_are_named(tmp_path):
    """Keras numbers names anew: which layers are quantized, and how, is told by their places."""
    net = cases.Net(2)
    net(np.zeros((1, 32), np.float32))
    chosen = [net.blocks[1].up, net.head]
    cases.quantize(net, cases.W4, only=lambda layer: layer in chosen)
    saved = [layer.name for layer in chosen]
    net.save(tmp_path / "net.keras")
    again = keras.saving.load_model(tmp_path / "net.keras")
    layers = [*again.blocks, *(b.up for b in again.blocks), again.blocks[1].parts["down"][0]]
    kinds = [type(layer).__name__ for layer in [*layers, again.head]]
    assert kinds == ["Block", "QuantizedBlock", "Dense", "QDynamicDense", "Dense", "QDynamicDense"]
    assert [again.blocks[1].up.name, again.head.name] != saved
    for old, new in zip(chosen, [again.blocks[1].up, again.head], strict=True):
        assert new._fewbit.rule == old._fewbit.rule and new._fewbit.path == old._fewbit.path
        assert new._fewbit.kind == old._fewbit.kind


def test_models_keep_their_class(folder):
    loaded = {
        name: keras.saving.load_model(folder / f"{name}.keras")
        for name in ("sequential", "functional", "subclassed", "own_class")
    }
    assert isinstance(loaded["sequential"], keras.Sequential)
    inputs = keras.Input((1,))
    assert isinstance(loaded["functional"], type(keras.Model(inputs, inputs)))
    assert isinstance(loaded["subclassed"], cases.Net)
    assert isinstance(loaded["own_class"].layers[0], cases.Scaled)
    assert type(loaded["own_class"].layers[0]).__name__ == "QDynamicScaled"
    assert loaded["own_class"].layers[0].factor == 3.0


def test_a_loaded_model_is_saved_and_loaded_again(folder, tmp_path):
    for name in ("functional", "subclassed", "embedding"):
        model = keras.saving.load_model(folder / f"{name}.keras")
        model.save(tmp_path / "again.keras")
        again = keras.saving.load_model(tmp_path / "again.keras")
        inputs = np.load(folder / f"{name}.npz")["inputs"]
        for a, b in zip(
            cases.outputs_of(model, inputs), cases.outputs_of(again, inputs), strict=True
        ):
            assert np.array_equal(a, b)


def test_loading_makes_no_floats_for_quantized_variables(folder):
    model = keras.saving.load_model(folder / "sequential.keras")
    kernel = model.layers[0].kernel
    assert kernel._value is None and kernel.shape == (64, 96)
    assert sum(v.value.nbytes for v in model.variables) < 0.4 * 4 * (64 * 96 + 96 * 64)


def test_the_preset_of_a_gemma(tmp_path):
    """By every class that may be asked, with fewbit.keras imported before KerasHub."""
    kinds = in_a_new_process("gemma-save", tmp_path)
    assert kinds == ["QuantizedGemma3CausalLM", "QuantizedGemma3Backbone"]
    found = in_a_new_process("gemma-load", tmp_path)
    assert all(found["same"].values()) and not found["hub_imported"], found
    assert "not a subclass of calling class `LlamaBackbone`" in found["errors"][0]
    assert "Unable to find a subclass of LlamaCausalLM" in found["errors"][1]


@pytest.mark.long
def test_the_preset_of_a_classifier(tmp_path):
    """A task with a quantized layer beside its backbone; asked for other classes, that is float."""
    kinds = in_a_new_process("vit-save", tmp_path)
    assert kinds == ["QuantizedViTImageClassifier", "QuantizedViTBackbone"]
    assert {p.name for p in tmp_path.iterdir()} == {"vit", "vit.npz", "vit.keras"}
    found = in_a_new_process("vit-load", tmp_path)
    assert all(found["same"].values()), found
    assert any(
        "output_dense was saved as int8 with the shape (64, 5)" in w for w in found["warnings"]
    )


# --- weights alone --------------------------------------------------------------------------------


def test_save_weights_and_load_weights(tmp_path):
    first, second = cases.sequential(**cases.W4), cases.sequential(**cases.W4)
    x = cases.inputs_of(first, "sequential")
    first.layers[0].bias.assign(np.arange(96, dtype=np.float32))
    first.save_weights(tmp_path / "w.weights.h5")
    assert not np.array_equal(first(x), second(x))
    second.load_weights(tmp_path / "w.weights.h5")
    assert np.array_equal(first(x), second(x))


def test_static_scales_stay_what_they_are():
    """A variable stays one, a constant stays one, and both keep their type and bits."""
    first, second = (cases.sequential().layers[0] for _ in range(2))
    values = {"dot_general0_lhs_scale": np.float32([[0.3]]), "c": np.asarray([7], "bfloat16")}
    scales = {name: jax.numpy.asarray(value) for name, value in values.items()}
    first._fewbit.scales["dot_general0_lhs_scale"] = set_variable(
        first, "dot_general0_lhs_scale", scales["dot_general0_lhs_scale"], None
    )
    first._fewbit.scales["c"] = scales["c"]
    store = {}
    first.save_own_variables(store)
    for _ in range(2):  # a second time over the first
        second.load_own_variables(store)
        loaded = second._fewbit.scales
        assert isinstance(loaded["dot_general0_lhs_scale"], keras.Variable)
        assert isinstance(loaded["c"], jax.Array) and loaded["c"].dtype == "bfloat16"
        assert np.array_equal(loaded["dot_general0_lhs_scale"].value, [[np.float32(0.3)]])
        assert len(second.non_trainable_variables) == len(first.non_trainable_variables)


def test_weights_of_a_model_quantized_otherwise_are_refused(tmp_path):
    cases.sequential(**cases.W4).save_weights(tmp_path / "w.weights.h5")
    other = cases.sequential()
    with pytest.raises(ValueError, match=r"kernel is stored as .*int8.*but the file holds .*int4"):
        other.load_weights(tmp_path / "w.weights.h5")


def test_float_weights_are_refused_by_a_quantized_layer():
    model = cases.sequential()
    with pytest.raises(ValueError, match="the file holds float variables for it"):
        model.layers[0].load_own_variables({"0": np.zeros((64, 96)), "1": np.zeros(96)})
    with pytest.raises(ValueError, match="holds nothing for this quantized layer"):
        model.layers[0].load_own_variables({})


def test_a_model_without_its_weights_says_so():
    model = cases.sequential()
    twin = keras.Sequential.from_config(model.get_config())
    with pytest.raises(ValueError, match=r"saved values \(kernel\) were not loaded"):
        twin.layers[0](np.zeros((1, 64), np.float32))


# --- width ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("qtype", ["int8", "int7", "int4", "int3", "int2", "nf4", "float8_e5m2"])
def test_codes_take_their_true_width_in_the_file(qtype, tmp_path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512)])
    cases.quantize(model, {"weight_qtype": qtype})
    model.save(tmp_path / "m.keras")
    bits = {"int8": 8, "int7": 7, "int4": 4, "int3": 3, "int2": 2, "nf4": 4, "float8_e5m2": 8}
    floor = 512 * 512 * bits[qtype] // 8
    assert floor < (tmp_path / "m.keras").stat().st_size < floor + 4 * 2 * 512 + 25_000


@pytest.mark.parametrize("qtype", sorted(FORMATS))
def test_arrays_of_every_format_come_back(qtype):
    row = FORMATS[qtype]
    rng = np.random.default_rng(1)
    tiled = {} if row.tile is None else {0: row.tile}
    x = jax.numpy.asarray(rng.normal(size=(64, 21)), "float32")
    method = "minmax" if row.bound is None else "absmax"
    q = quantize(x, qtype, channelwise_axes=(1,), tiled_axes=tiled, calibration_method=method)
    stored, about = to_file(q.qvalue, qtype)
    if row.bits < 8:
        assert stored.shape == (64, packed_length(21, row.bits)) and stored.dtype == np.uint8
    back = from_file(stored, json.loads(json.dumps(about)), "here", "qvalue", qtype)
    assert back.dtype == q.qvalue.dtype
    assert np.array_equal(back.astype(np.float32), np.asarray(q.qvalue).astype(np.float32))
    for part in (q.scale, q.zero_point, q.tensor_scale):
        if part is not None:
            stored, about = to_file(part)
            back = from_file(stored, about, "here", "scale")
            assert back.dtype == part.dtype
            assert back.tobytes() == np.asarray(part).tobytes()


# --- files that are not what was written ----------------------------------------------------------


def groups(file):
    """The groups of quantized layers in a weights file."""
    found = []
    file.visititems(lambda name, item: found.append(name) if name.endswith("vars/fewbit") else None)
    return [name.removesuffix("/fewbit") for name in found]


@pytest.fixture
def weights(tmp_path):
    model = cases.sequential(**cases.W4)
    model.save_weights(tmp_path / "w.weights.h5")
    return model, tmp_path / "w.weights.h5"


@pytest.mark.parametrize("key", ["0", "kernel.qvalue", "kernel.scale", "fewbit"])
def test_a_changed_variable_is_named(weights, key):
    model, path = weights
    with h5py.File(path, "a") as file:
        data = file[groups(file)[0]][key]
        raw = np.ascontiguousarray(data[()])
        raw.reshape(-1).view(np.uint8)[3] ^= 1
        data[...] = raw
    with pytest.raises(ValueError) as caught:
        model.load_weights(path)
    what = {"0": "variable '0'", "kernel.qvalue": "qvalue", "kernel.scale": "scale"}
    text = str(caught.value)
    assert "was changed or cut after it was saved (" in text
    assert what.get(key, "its description") in text and "dense" in text


@pytest.mark.parametrize("key", ["0", "kernel.qvalue", "kernel.scale", "fewbit"])
def test_a_missing_or_shorter_variable_is_named(weights, key):
    model, path = weights
    with h5py.File(path, "a") as file:
        group = file[groups(file)[1]]
        short = group[key][:-1]
        del group[key]
        group[key] = short
    with pytest.raises(ValueError, match="was changed or cut after it was saved"):
        model.load_weights(path)
    with h5py.File(path, "a") as file:
        del file[groups(file)[1]][key]
    with pytest.raises(ValueError, match="changed or cut|holds float variables"):
        model.load_weights(path)


def test_a_truncated_file_is_an_error(folder, tmp_path):
    whole = (folder / "sequential.keras").read_bytes()
    for share in (0.3, 0.9, 0.999):
        path = tmp_path / "cut.keras"
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises((zipfile.BadZipFile, ValueError), match="zip"):
            keras.saving.load_model(path)
    model = cases.sequential()
    model.save_weights(tmp_path / "w.weights.h5")
    weights = (tmp_path / "w.weights.h5").read_bytes()
    for share in (0.3, 0.9):
        (tmp_path / "w.weights.h5").write_bytes(weights[: int(len(weights) * share)])
        with pytest.raises(OSError, match="truncated"):
            model.load_weights(tmp_path / "w.weights.h5")


def rewritten(path, to, change):
    """The archive with its config changed by `change(config)`, checksums of the zip made anew."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "config.json":
                config = json.loads(data)
                change(config["config"]["layers"][1]["config"]["fewbit"])
                data = json.dumps(config).encode()
            new.writestr(name, data)
    return to


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["own"].update(kind="static"),
        lambda r: r["own"]["rule"].update(weight_qtype="int4"),
        lambda r: r["own"]["stored"]["kernel"].update(shape=[1, 1]),
        lambda r: r.pop("class"),
        lambda r: r.update(checksum="0" * 32),
        lambda r: r.update(format=0),
        lambda r: r.pop("versions"),
    ],
)
def test_a_changed_decision_is_named(folder, tmp_path, change):
    path = rewritten(folder / "sequential.keras", tmp_path / "x.keras", change)
    with pytest.raises(ValueError, match=r"dense.*: its fewbit record was changed or cut"):
        keras.saving.load_model(path)


def test_a_newer_file_is_named(folder, tmp_path):
    path = rewritten(
        folder / "sequential.keras", tmp_path / "x.keras", lambda r: r.update(format=2)
    )
    with pytest.raises(ValueError, match=r"newer fewbit \(format 2\).*pip install --upgrade"):
        keras.saving.load_model(path)


@pytest.mark.parametrize("name", ["fewbit", "keras", "keras_hub"])
def test_other_versions_are_a_warning(name, folder, tmp_path):
    def change(record):
        record["versions"][name] = "0.0.1"
        fields = {key: value for key, value in record.items() if key != "checksum"}
        record["checksum"] = _format._digest(fields)

    path = rewritten(folder / "sequential.keras", tmp_path / "x.keras", change)
    with pytest.warns(UserWarning, match=rf"saved with {name} 0\.0\.1 and is loaded with {name}"):
        model = keras.saving.load_model(path)
    saved = np.load(folder / "sequential.npz")
    assert np.array_equal(model(saved["inputs"]), saved["arr_0"])


def test_a_class_that_nobody_knows_is_named(folder):
    with pytest.raises(ValueError, match=r"custom_objects=\{'Unregistered': Unregistered\}"):
        keras.saving.load_model(folder / "custom_objects.keras")


def test_a_model_whose_code_changed_is_named(folder, monkeypatch):
    class Net(cases.Net):
        def __init__(self, depth, **kwargs):
            super().__init__(depth, **kwargs)
            self.head = keras.layers.EinsumDense("ab,bc->ac", 8)

    monkeypatch.setitem(keras.saving.get_custom_objects(), "cases>Net", Net)
    with pytest.raises(ValueError, match="quantized Dense at 'head'.*has a EinsumDense"):
        keras.saving.load_model(folder / "subclassed.keras")


def test_nothing_is_executed_on_load(folder, tmp_path):
    """No pickle, no code: Keras' safe mode is on, and a class outside Keras is never imported."""
    for path in folder.glob("*.keras"):
        with zipfile.ZipFile(path) as archive:
            assert b"__lambda__" not in archive.read("config.json")

    def change(record):
        record["class"] = {"name": "Popen", "module": "subprocess", "registered": "Popen"}
        fields = {key: value for key, value in record.items() if key != "checksum"}
        record["checksum"] = _format._digest(fields)

    path = rewritten(folder / "sequential.keras", tmp_path / "x.keras", change)
    with pytest.raises(ValueError, match="a class that Keras does not know here"):
        keras.saving.load_model(path)


def test_safe_mode_holds_inside_quantized_models(tmp_path):
    inputs = keras.Input((32,))
    x = keras.layers.Lambda(lambda x: x + 1.0, output_shape=(32,))(cases.Block(32)(inputs))
    model = cases.quantize(keras.Model(inputs, keras.layers.Dense(8)(x)))
    model.save(tmp_path / "m.keras")
    with pytest.raises(ValueError, match="lambda"):
        keras.saving.load_model(tmp_path / "m.keras")


# --- the old file stays ---------------------------------------------------------------------------

KILLED = """
import os, sys
import keras_saving_cases as cases
import keras, fewbit.keras
from fewbit.keras.saving import _layer
model = keras.saving.load_model(sys.argv[1])
def stop(*args):
    print("writing", flush=True)
    import time
    time.sleep(60)
_layer.save_variables = stop
save = {"keras": keras.saving.save_model, "fewbit": fewbit.keras.save_model}[sys.argv[2]]
save(model, sys.argv[1])
"""


@pytest.mark.parametrize("by", ["fewbit", pytest.param("keras", marks=pytest.mark.long)])
def test_a_kill_in_the_middle_of_saving(by, folder, tmp_path):
    """fewbit.keras.save_model keeps the old file; Keras' own call has already cut it."""
    path = tmp_path / "m.keras"
    path.write_bytes((folder / "sequential.keras").read_bytes())
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT.parents[1]), str(SUPPORT)])}
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(path), by],
        stdout=subprocess.PIPE,
        env=env,
    )
    try:
        assert child.stdout.readline() == b"writing\n"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    if by == "fewbit":
        assert path.read_bytes() == (folder / "sequential.keras").read_bytes()
    else:
        with pytest.raises((zipfile.BadZipFile, ValueError), match="zip"):
            keras.saving.load_model(path)


def test_save_model_replaces_a_file_and_leaves_nothing_beside(folder, tmp_path):
    path = tmp_path / "m.keras"
    path.write_bytes(b"old")
    model = keras.saving.load_model(folder / "sequential.keras")
    fewbit.keras.save_model(model, path)
    assert [file.name for file in tmp_path.iterdir()] == ["m.keras"]
    saved = np.load(folder / "sequential.npz")
    assert np.array_equal(keras.saving.load_model(path)(saved["inputs"]), saved["arr_0"])
    with pytest.raises(ValueError, match="does not end in '.keras'"):
        fewbit.keras.save_model(model, tmp_path / "m.h5")
    with pytest.raises(TypeError, match="Sequential has no save_to_preset"):
        fewbit.keras.save_to_preset(model, tmp_path / "preset")
