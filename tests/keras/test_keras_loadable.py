"""Whatever saves loads: files proved before the old one goes, refused with the layer's name."""

import json
import os
import pathlib
import random
import shutil
import stat
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
from test_keras_saving import in_a_new_process, keras_may_promote  # noqa: F401

import fewbit
import fewbit.keras
from fewbit.keras.saving import _whole
from fewbit.keras.saving._restore import _MSG_LATE

# NumPy 2 asks Keras' variables for something that they do not do yet.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
INT8 = fewbit.keras.DynamicQuantConfig("int8")


def names(folder):
    return sorted(os.listdir(folder))


def dense(units=8):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(units)])
    return fewbit.keras.quantize_model(model, INT8, progress=False)


@keras.saving.register_keras_serializable("loadable")
class Given(keras.layers.Layer):
    """A layer that somebody gives another one to use, of which its config does not tell."""

    given = None

    def call(self, inputs):
        return inputs if self.given is None else self.given(inputs)


def unloadable():
    layer, inputs = Given(name="borrower"), keras.Input((16,))
    layer.given = keras.layers.Dense(16)
    return cases.quantize(keras.Model(inputs, layer(inputs), name="net"))


# --- layers without a build() ---------------------------------------------------------------------


def test_a_layer_with_attention_and_no_build_loads(tmp_path):
    """The TransformerBlock of every tutorial; Keras' own warning of it does not come either."""
    model = cases.transformer()
    model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    x = cases.inputs_of(model, "transformer")
    assert np.array_equal(again(x), model(x))
    query = again.layers[1].blocks[1].att._query_dense
    assert type(query).__name__ == "QDynamicEinsumDense" and query.kernel._value is None


@pytest.mark.parametrize(
    "options", [{"quantize_attention": True}, {"emulate": True}, {"const_scale": True}]
)
def test_static_ranges_inside_such_attention_wait_for_their_file(options, tmp_path):
    """The model around it calls the layer before its ranges are read."""
    inputs, x = keras.Input((6, 32)), np.linspace(-1, 1, 192).reshape(1, 6, 32)
    model = keras.Model(inputs, cases.TransformerBlock(32, 2)(inputs))
    config = fewbit.keras.StaticQuantConfig("int8", **{"quantize_attention": True} | options)
    fewbit.keras.quantize_model(model, config, lambda m: m(x), progress=False)
    model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    assert np.array_equal(again(x), model(x))
    assert again.layers[1].att._fewbit.scales.keys() == model.layers[1].att._fewbit.scales.keys()
    assert np.array_equal(fewbit.keras.clone_model(again)(x), model(x))


def test_static_ranges_that_are_not_loaded_are_named():
    x, inputs = np.ones((1, 6, 32), np.float32), keras.Input((6, 32))
    model = keras.Model(inputs, keras.layers.MultiHeadAttention(2, 8, name="att")(inputs, inputs))
    config = fewbit.keras.StaticQuantConfig("int8", quantize_attention=True)
    fewbit.keras.quantize_model(model, config, lambda m: m(x), progress=False)
    twin = keras.models.clone_model(model).get_layer("att")
    with pytest.raises(ValueError, match=r"saved values \(einsum0_lhs_scale, .*were not loaded"):
        twin(x, x)


def test_each_layer_gets_its_own_decision_where_a_sequential_is_built_late(tmp_path):
    """A Sequential without an Input has one layer more once it is built."""
    inputs = keras.Input((6, 32))
    block = cases.TransformerBlock(32, 2)
    model = keras.Model(inputs, block(inputs))
    rules = [
        fewbit.QuantizationRule(module_path=".*" + layer.name, weight_qtype=qtype)
        for layer, qtype in zip(block.ffn.layers, ("int8", "int4"), strict=True)
    ]
    fewbit.keras.quantize_model(model, rules, progress=False)
    model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    found = [layer._fewbit.rule.weight_qtype for layer in again.layers[1].ffn.layers]
    assert [np.dtype(qtype).name for qtype in found] == ["int8", "int4"]


def test_a_clone_of_such_a_model_is_the_same():
    model = cases.transformer_sequential()
    x = cases.inputs_of(model, "transformer_sequential")
    assert np.array_equal(fewbit.keras.clone_model(model)(x), model(x))


def test_weights_for_a_layer_that_is_not_there_yet():
    """Nothing calls it before its weights are loaded: the error says what to do."""
    block = cases.TransformerBlock(32, 2)
    block(np.zeros((1, 6, 32), np.float32))
    cases.quantize(block)
    twin = type(block).from_config(block.get_config())
    twin.built = True
    with pytest.raises(ValueError, match=r"MultiHeadAttention '.*' is not built\. Give the class"):
        twin.load_own_variables({})
    assert "or call the model once and load its weights then" in _MSG_LATE


# --- the proof ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["method", "function", "unzipped"])
def test_what_would_not_load_is_refused_and_the_old_file_stays(call, tmp_path):
    model, path = unloadable(), tmp_path / "m.keras"
    path.write_bytes(b"old")
    save = {
        "method": lambda: model.save(path),
        "function": lambda: fewbit.keras.save_model(model, path),
        "unzipped": lambda: model.save(tmp_path / "folder", zipped=False),
    }
    with pytest.raises(ValueError) as caught:
        save[call]()
    text = str(caught.value)
    assert "Functional 'net' was not saved" in text and "borrower" in text, text
    assert "'layers/1/given', Dense '" in text
    assert " in Given 'borrower' in Functional 'net' would be missing in the loaded model" in text
    assert "model.save_weights(" in text
    assert names(tmp_path) == ["m.keras"] and path.read_bytes() == b"old"


def test_a_quantized_layer_in_a_new_model_is_refused_where_its_config_does_not_know_it(tmp_path):
    @keras.saving.register_keras_serializable("loadable")
    class Around(keras.Model):
        def __init__(self, inner=None, **kwargs):
            super().__init__(**kwargs)
            self.inner = inner or keras.layers.Dense(8)

        def call(self, inputs):
            return self.inner(inputs)

        def get_config(self):
            return {"name": self.name}

    model = Around(dense().layers[0])
    model(np.zeros((1, 16), np.float32))
    with pytest.raises(ValueError, match=r"'inner', Dense '.*' in Around '.*' would be a Dense"):
        fewbit.keras.save_model(model, tmp_path / "m.keras")
    assert names(tmp_path) == []


def test_a_class_that_is_given_when_loading_need_not_be_registered(tmp_path):
    model = cases.custom_objects()
    model.save(tmp_path / "m.keras")
    given = {"Unregistered": cases.Unregistered}
    again = fewbit.keras.load_model(tmp_path / "m.keras", custom_objects=given)
    assert type(again.layers[0]).__name__ == "QDynamicUnregistered"


def curved(x):
    return x * keras.ops.tanh(x)


def test_so_are_functions_and_what_nobody_can_find_is_a_warning(tmp_path, monkeypatch):
    layers = [keras.Input((16,)), keras.layers.Dense(8, activation=curved)]
    model = fewbit.keras.quantize_model(keras.Sequential(layers), INT8, progress=False)
    model.save(tmp_path / "m.keras")
    monkeypatch.setattr(_whole, "_objects_in", lambda model: {})
    del model._fewbit_proved
    with pytest.warns(UserWarning, match=r"was saved, but not proved to load: .*'curved'.* need"):
        model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras", custom_objects={"curved": curved})
    assert np.array_equal(again(np.ones((1, 16))), model(np.ones((1, 16))))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError("none")])
def test_want_of_room_for_the_proof_is_a_warning(error, tmp_path, monkeypatch):
    def fail(*args):
        raise error

    monkeypatch.setattr(_whole._Proof, "check", fail)
    with pytest.warns(UserWarning, match=r"was saved, but not proved to load: .*(No space|none)"):
        dense().save(tmp_path / "m.keras")
    assert zipfile.is_zipfile(tmp_path / "m.keras")


def test_it_is_proved_once_and_again_after_a_change(tmp_path, monkeypatch):
    proved, check = [], _whole._Proof.check
    monkeypatch.setattr(_whole._Proof, "check", lambda *args: proved.append(1) or check(*args))
    model = dense()
    for _ in range(3):
        model.save(tmp_path / "m.keras")
    assert len(proved) == 1
    model.layers[0].enable_lora(2)
    model.save(tmp_path / "m.keras")
    assert len(proved) == 2


def test_the_proof_keeps_nothing_and_draws_nothing(tmp_path):
    model = dense()
    random.seed(3)
    before = [random.random() for _ in range(3)]
    random.seed(3)
    kept = [id(variable) for variable in model.variables]
    model.save(tmp_path / "m.keras")
    assert [random.random() for _ in range(3)] == before
    assert [id(variable) for variable in model.variables] == kept
    assert names(tmp_path) == ["m.keras"]


def test_a_float_model_is_written_whole_too(tmp_path):
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8)])
    fewbit.keras.save_model(model, tmp_path / "m.keras")
    assert not hasattr(model, "_fewbit_proved")
    assert np.array_equal(
        fewbit.keras.load_model(tmp_path / "m.keras")(np.ones((1, 16))), model(np.ones((1, 16)))
    )


# --- Keras' calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m.h5", "m.hdf5"])
def test_the_legacy_format_is_refused_before_anything_is_written(name, tmp_path):
    (tmp_path / name).write_bytes(b"old")
    with pytest.raises(
        ValueError, match=r"legacy HDF5 .* nothing was written.*'m\.keras'.*'m\.wei"
    ):
        dense().save(tmp_path / name)
    assert (tmp_path / name).read_bytes() == b"old" and names(tmp_path) == [name]


def test_save_asks_as_keras_does(tmp_path, monkeypatch):
    model, asked = dense(), []
    answers = iter(["what?", "n", "y", "n"])
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or next(answers))
    (tmp_path / "m.keras").write_bytes(b"old")
    (tmp_path / "m.weights.h5").write_bytes(b"old")
    model.save(tmp_path / "m.keras", overwrite=False)
    assert (tmp_path / "m.keras").read_bytes() == b"old"
    assert "m.keras already exists - overwrite? [y/n]" in asked[0] and len(asked) == 2
    model.save(tmp_path / "m.keras", overwrite=False)
    assert zipfile.is_zipfile(tmp_path / "m.keras")
    model.save_weights(tmp_path / "m.weights.h5", overwrite=False)
    assert (tmp_path / "m.weights.h5").read_bytes() == b"old"


def test_a_class_that_saves_in_its_own_way_still_does(tmp_path):
    @keras.saving.register_keras_serializable("loadable")
    class Careful(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = keras.layers.Dense(8)

        def call(self, inputs):
            return self.inner(inputs)

        def save(self, filepath, *args, **kwargs):
            self.asked = str(filepath)
            return super().save(filepath, *args, **kwargs)

    model = Careful()
    model(np.zeros((1, 16), np.float32))
    cases.quantize(model).save(tmp_path / "m.keras")
    assert model.asked.endswith("m.keras") and ".fewbit.tmp" in model.asked
    assert names(tmp_path) == ["m.keras"]


def test_what_goes_elsewhere_is_left_to_keras(monkeypatch):
    model, seen = dense(), []
    monkeypatch.setattr(keras.Model, "save", lambda self, *args, **kwargs: seen.append(args[0]))
    model.save("gs://bucket/m.keras")
    model.save("hf://somebody/m", zipped=False)
    assert seen == ["gs://bucket/m.keras", "hf://somebody/m"]


def test_an_unzipped_model(tmp_path):
    model = dense()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "notes.txt").write_text("mine")
    for _ in range(2):
        model.save(tmp_path / "m", zipped=False)
    assert names(tmp_path) == ["m"] and (tmp_path / "m" / "notes.txt").read_text() == "mine"
    again = fewbit.keras.load_model(tmp_path / "m")
    assert np.array_equal(again(np.ones((1, 16))), model(np.ones((1, 16))))


def test_a_checkpoint_callback_saves_the_same_way(tmp_path):
    model = dense()
    model.layers[0].enable_lora(2)
    model.compile("adam", "mse")
    x, y = np.ones((4, 16), np.float32), np.ones((4, 8), np.float32)
    kept = keras.callbacks.ModelCheckpoint(str(tmp_path / "m-{epoch}.keras"))
    model.fit(x, y, epochs=2, verbose=0, callbacks=[kept])
    assert names(tmp_path) == ["m-1.keras", "m-2.keras"]
    again = fewbit.keras.load_model(tmp_path / "m-2.keras")
    assert np.array_equal(again(x), model(x))


# --- folders --------------------------------------------------------------------------------------


class Preset:
    """What the folder functions need of a model."""

    name = "preset"

    def __init__(self, text):
        self.text = text

    def save_to_preset(self, folder):
        os.makedirs(folder)
        for name in ("config.json", "model.weights.h5"):
            pathlib.Path(folder, name).write_text(self.text)
        if self.text == "broken":
            raise OSError("No space left on device")


@pytest.fixture
def unproved(monkeypatch):
    monkeypatch.setattr(_whole, "prove_preset", lambda model, folder: None)


def test_a_preset_keeps_what_tells_of_no_model(unproved, tmp_path):
    folder = tmp_path / "preset"
    fewbit.keras.save_to_preset(Preset("old"), folder)
    (folder / "assets").mkdir()
    for name in ("assets/vocabulary.txt", "tokenizer.json", "README.md"):
        (folder / name).write_text("mine")
    for name in ("task.json", "model_00000.weights.h5", "model.weights.json"):
        (folder / name).write_text("of another model")
    (folder / "link").symlink_to("README.md")
    folder.chmod(0o750)
    fewbit.keras.save_to_preset(Preset("new"), folder)
    kept = ["README.md", "assets", "config.json", "link", "model.weights.h5", "tokenizer.json"]
    assert names(folder) == kept and names(tmp_path) == ["preset"]
    assert (folder / "config.json").read_text() == "new" and (folder / "link").is_symlink()
    assert (folder / "assets" / "vocabulary.txt").read_text() == "mine"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750


def test_a_preset_that_fails_leaves_the_old_one_and_nothing_else(unproved, tmp_path):
    folder = tmp_path / "preset"
    fewbit.keras.save_to_preset(Preset("old"), folder)
    with pytest.raises(OSError, match="No space left"):
        fewbit.keras.save_to_preset(Preset("broken"), folder)
    assert names(tmp_path) == ["preset"] and (folder / "config.json").read_text() == "old"


def test_places_that_cannot_be_a_preset_are_named(unproved, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="is a file, and a preset is a folder"):
        fewbit.keras.save_to_preset(Preset("new"), tmp_path / "file")
    monkeypatch.chdir(tmp_path)
    for here in (".", tmp_path, ".."):
        with pytest.raises(
            ValueError, match=r"the folder that this process is in.*a folder of its"
        ):
            fewbit.keras.save_to_preset(Preset("new"), here)
    assert names(tmp_path) == ["file"]
    (tmp_path / "home" / "work").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"more than a preset \(work\).*its own: '.*home/model'"):
        fewbit.keras.save_to_preset(Preset("new"), tmp_path / "home")


def test_a_killed_exchange_is_repaired_by_the_next_load(tmp_path):
    """On a disk that cannot exchange folders."""
    aside = tmp_path / ".m.0123abcd.fewbit.tmp"
    aside.mkdir()
    model = dense()
    model.save(aside / "old", zipped=False)
    (aside / "name").write_text("m")
    again = fewbit.keras.load_model(tmp_path / "m")
    assert names(tmp_path) == ["m"]
    assert np.array_equal(again(np.ones((1, 16))), model(np.ones((1, 16))))


# --- what quantized it ----------------------------------------------------------------------------

CONFIGS = {
    "dynamic": fewbit.keras.DynamicQuantConfig("int4", group_size=16),
    "sum": INT8 + fewbit.keras.DynamicQuantConfig("fp8", white_list=["dense.*"]),
    "classes": fewbit.keras.DynamicQuantConfig("int8", white_list=[keras.layers.Dense]),
    "rules": [fewbit.QuantizationRule(weight_qtype="int8")],
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_config_stays_with_the_model(kind, tmp_path):
    """`_quant_config` of the model, of a loaded one and of a clone."""
    config = CONFIGS[kind]
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8)])
    model = fewbit.keras.quantize_model(model, config, progress=False)
    assert model._quant_config == config
    model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    for other in (again, fewbit.keras.clone_model(again)):
        found = other._quant_config
        assert list(found) == config if kind == "rules" else found == config
        assert type(found).__name__ in (type(config).__name__, "TrackedList")
    if kind == "dynamic":
        params = type(config).params_list
        assert params and all(getattr(found, p) == getattr(config, p) for p in params)


def test_a_config_that_cannot_be_read_does_not_keep_the_model_from_loading(tmp_path, monkeypatch):
    model = dense()
    monkeypatch.setattr(
        type(model._quant_config), "to_dict", lambda self: {"quantization_type": "later"}
    )
    model.save(tmp_path / "m.keras")
    with pytest.warns(UserWarning, match="loaded as it was saved, but the config .* 'later'|later"):
        again = keras.saving.load_model(tmp_path / "m.keras")
    assert not hasattr(again, "_quant_config")


# --- seeing it ------------------------------------------------------------------------------------


def test_summary_of_fp8_weights_that_are_not_packed():
    lines = []
    cases.unpacked_fp8().summary(print_fn=lines.append)
    text = "\n".join(lines)
    assert "QDynamicConv2D" in text and "QDynamicDense" in text
    assert "Total params" in text and "Non-trainable params" in text


@pytest.mark.long
def test_the_preset_of_an_fp8_classifier(tmp_path):
    kinds = in_a_new_process("vit-fp8-save", tmp_path)
    assert kinds == ["QuantizedViTImageClassifier", "QuantizedViTBackbone"]
    assert names(tmp_path) == ["vit", "vit.keras", "vit.npz"]
    found = in_a_new_process("vit-load", tmp_path)
    assert all(found["same"].values()), found


@pytest.mark.long
def test_a_segmenter_whose_layers_are_built_from_nothing(tmp_path):
    assert in_a_new_process("sam", tmp_path) == {"keras": True, "preset": True, "classes": True}


# --- files that are not what they claim -----------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "m.keras"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        dense().save(path)
    return path


def rewritten(path, to, how=zipfile.ZIP_STORED, **members):
    """The archive with some members replaced."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w", how) as new:
        for name in {*old.namelist(), *members}:
            new.writestr(name, members.get(name) or old.read(name))
    return to


def says(path, match, error=ValueError):
    with pytest.raises(error, match=match) as caught:
        fewbit.keras.load_model(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_none(saved, tmp_path):
    os.mkfifo(tmp_path / "pipe.keras")
    says(tmp_path / "pipe.keras", "is a pipe, not a file")
    (tmp_path / "null.keras").symlink_to("/dev/null")
    says(tmp_path / "null.keras", "is a device, not a file")
    says(tmp_path / "none.keras", "does not exist")
    (tmp_path / "cut.keras").write_bytes(saved.read_bytes()[:-30])
    says(tmp_path / "cut.keras", "is no archive of Keras, or it was cut")
    (tmp_path / "empty").mkdir()
    says(tmp_path / "empty", "lacks config.json")


def test_what_keras_says_of_a_damaged_file_comes_with_its_name(saved, tmp_path):
    says(rewritten(saved, tmp_path / "a.keras", **{"config.json": b"[" * 100_000}), "not be loaded")
    says(rewritten(saved, tmp_path / "b.keras", **{"config.json": b"{}"}), "could not be loaded")
    bad = rewritten(saved, tmp_path / "c.keras", **{"model.weights.h5": b"no hdf5 at all"})
    says(bad, "is no weights file of Keras, or it was cut", OSError)


def zeros(size):
    return bytes(size)


def test_an_archive_that_would_fill_the_memory_is_refused(saved, tmp_path):
    big = 100 * 2**20
    path = rewritten(saved, tmp_path / "a.keras", zipfile.ZIP_DEFLATED, **{"x": zeros(big)})
    assert path.stat().st_size < 2**20
    says(path, r"x would become 104,857,600 bytes out of .*zip -0")
    parts = {f"assets/{n}": zeros(2**24) for n in range(8)}
    says(rewritten(saved, tmp_path / "b.keras", zipfile.ZIP_DEFLATED, **parts), "would become")
    config = {"config.json": b" " * (65 * 2**20)}
    says(rewritten(saved, tmp_path / "c.keras", **config), "more than any model's configuration")
    many = {f"assets/{n}": b"x" for n in range(10_001)}
    says(rewritten(saved, tmp_path / "d.keras", **many), "10,00. members, more than any saved")


def test_an_archive_that_was_packed_again_loads(saved, tmp_path):
    path = rewritten(saved, tmp_path / "a.keras", zipfile.ZIP_DEFLATED)
    assert isinstance(fewbit.keras.load_model(path), keras.Sequential)


def with_a_huge_array(path, key):
    """A weights file where an array claims sixty gigabytes, and holds none."""
    with h5py.File(path, "a") as file:
        found = []
        file.visititems(lambda n, i: found.append(n) if n.endswith("vars/fewbit") else None)
        group = file[found[0].removesuffix("/fewbit")]
        if key in group:
            del group[key]
        group.create_dataset(key, (2**18, 2**18), "uint8", chunks=(2**10, 2**10))
    return path


def test_an_array_that_claims_more_than_is_there_is_refused(saved, tmp_path):
    model, path = dense(), tmp_path / "w.weights.h5"
    model.save_weights(path)
    with_a_huge_array(path, "kernel.qvalue")
    with pytest.raises(
        ValueError, match=r"kernel\.qvalue would become 68,719,476,736 bytes out of"
    ):
        model.load_weights(path)
    says(
        rewritten(saved, tmp_path / "m.keras", **{"model.weights.h5": path.read_bytes()}),
        r"kernel\.qvalue would become",
    )


@pytest.mark.parametrize("key", ["kernel.qvalue", "0", "fewbit"])
def test_no_array_is_read_that_has_not_the_shape_it_must_have(saved, key, tmp_path):
    """By Keras' own loading too, which would read it whole."""
    model, path = dense(), tmp_path / "w.weights.h5"
    model.save_weights(path)
    with_a_huge_array(path, key)
    archive = rewritten(saved, tmp_path / "m.keras", **{"model.weights.h5": path.read_bytes()})
    with pytest.raises(ValueError, match=r"was changed or cut after it was saved"):
        keras.saving.load_model(archive)


def test_weights_in_place_of_which_there_is_something_else(tmp_path):
    model = dense()
    os.mkfifo(tmp_path / "w.weights.h5")
    with pytest.raises(ValueError, match=r"w\.weights\.h5 is a pipe"):
        model.load_weights(tmp_path / "w.weights.h5")
    model.save_weights(tmp_path / "cut.weights.h5")
    whole = (tmp_path / "cut.weights.h5").read_bytes()
    (tmp_path / "cut.weights.h5").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OSError, match=r"cut\.weights\.h5 is no weights file .* it was cut"):
        model.load_weights(tmp_path / "cut.weights.h5")


def test_a_preset_is_checked_by_hand(saved, tmp_path):
    folder = tmp_path / "preset"
    dense().save(folder, zipped=False)
    fewbit.keras.check_saved(folder)
    shutil.copytree(folder, tmp_path / "b")
    with_a_huge_array(tmp_path / "b" / "model.weights.h5", "kernel.qvalue")
    with pytest.raises(ValueError, match="would become"):
        fewbit.keras.check_saved(tmp_path / "b")
    os.mkfifo(folder / "task.json")
    with pytest.raises(ValueError, match=r"task\.json is a pipe"):
        fewbit.keras.check_saved(folder)
    (folder / "task.json").unlink()
    os.truncate(folder / "config.json", 2**40)  # of zeros, which take no room on the disk
    with pytest.raises(ValueError, match=r"config\.json has 1,099,511,627,776 bytes"):
        fewbit.keras.check_saved(folder)
    assert json.loads((tmp_path / "b" / "config.json").read_text())
