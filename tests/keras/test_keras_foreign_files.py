"""Files that Neural Compressor 3.10 wrote load as models that fewbit quantized.

They are kept in tests/golden/neural_compressor, with the outputs of their models; tests/peers has
what wrote them. More of them are made anew in tests/compared/test_peers_keras_files.py.
"""

import json
import pathlib
import zipfile

import h5py
import keras
import numpy as np
import pytest
from peers import saved_models
from tolerances import PEER_KERAS

import fewbit.keras

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "neural_compressor"
pytestmark = [
    # Keras' own, of a NumPy that is newer than it knows, and about what it saved of `compile`.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*compile\\(\\)` was not called:UserWarning"),
]
CASES = [name for name in saved_models.GOLDEN if not saved_models.FILES[name][3]]
PRESETS = [name for name in saved_models.GOLDEN if saved_models.FILES[name][3]]


def load(name):
    return keras.models.load_model(GOLDEN / f"{name}.keras")


def output(model, name):
    return np.asarray(model(saved_models.INPUTS[saved_models.FILES[name][0]]()), np.float32)


def error_of(value, name):
    """The largest error as a fraction of the largest value."""
    wanted = np.load(GOLDEN / f"{name}.npy").astype(np.float64)
    return np.abs(value - wanted).max() / np.abs(wanted).max()


def quantized(model):
    """{path: class} of what is quantized."""
    layers = model._flatten_layers(include_self=False)
    return {each.path: type(each).__name__ for each in layers if hasattr(each, "_fewbit")}


def changed(name, target, edit=None, weights=None):
    """A golden file with another config or other weights."""
    with zipfile.ZipFile(GOLDEN / f"{name}.keras") as old, zipfile.ZipFile(target, "w") as new:
        for member in old.namelist():
            content = old.read(member)
            if member == "config.json" and edit is not None:
                config = json.loads(content)
                edit(config)
                content = json.dumps(config).encode()
            if member == "model.weights.h5" and weights is not None:
                place = target.with_suffix(".h5")
                place.write_bytes(content)
                with h5py.File(place, "r+") as file:
                    weights(file)
                content = place.read_bytes()
            new.writestr(member, content)
    return target


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_the_model_that_was_saved(name):
    assert error_of(output(load(name), name), name) <= PEER_KERAS


@pytest.mark.parametrize("name", ["net_static_int8", "graph_sum"])
def test_what_is_saved_again_is_the_same_to_the_bit(name, tmp_path):
    model = load(name)
    model.save(tmp_path / "again.keras")
    again = keras.models.load_model(tmp_path / "again.keras")
    assert np.array_equal(output(again, name), output(model, name))
    assert list(quantized(again).values()) == list(quantized(model).values())


def test_graphs_and_sequences_that_the_library_itself_does_not_load():
    graph, sequence = load("graph_static_int8"), load("sequence_static_int8")
    assert quantized(graph) == {
        "patch": "QStaticConv2D", "middle": "QStaticDense", "head": "QStaticDense",
    }  # fmt: skip
    assert type(graph.get_layer("kept")) is keras.layers.Dense  # which its config excludes
    assert isinstance(sequence, keras.Sequential)


def test_layers_of_a_sum_have_the_types_of_their_own_configs():
    plan = fewbit.keras.plan(load("graph_sum"))
    types = {site.site.path: (site.weight_qtype, site.act_qtype) for site in plan.sites}
    e4m3, e5m2 = ("float8_e4m3fn",) * 2, ("float8_e5m2",) * 2
    assert types == {"patch": e4m3, "kept": e4m3, "middle": e5m2, "head": e5m2}


def test_products_of_weights_run_on_codes_where_ranges_are_stored():
    model = load("net_static_int8")
    rows = {row.site.path: row.runs_on for row in fewbit.keras.plan(model).sites}
    ways = {path.rpartition("/")[2]: way for path, way in rows.items()}
    assert not any("emulated" in way for name, way in ways.items() if name == "query")
    layer = model.blocks[0].up
    with zipfile.ZipFile(GOLDEN / "net_static_int8.keras") as archive:
        with archive.open("model.weights.h5") as member, h5py.File(member) as file:
            codes = file["blocks/block/up/vars/_kernel_quant"][()]
            scale = file["blocks/block/up/vars/w_scale"][()]
            ranges = file["blocks/block/up/vars/a_scale"][()]
    stored = layer._fewbit.stored["kernel"].value().array
    assert np.array_equal(stored.qvalue, codes)
    assert np.array_equal(layer.w_scale.value, scale)
    assert np.array_equal(layer.a_scale.value, ranges)


def test_zero_points_that_are_no_codes_are_kept():
    layer = load("sequence_static_int8").get_layer("up")
    assert int(layer.a_zero_point.value[0]) < -128


def test_the_config_that_it_was_quantized_by_is_told():
    config = load("net_dynamic_fp8")._quant_config
    assert isinstance(config, fewbit.keras.DynamicQuantConfig)
    assert config.weight_scale_granularity == "per_channel" and config.const_weight


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_as_the_task_and_by_what_it_is(name, tmp_path):
    import keras_hub

    with zipfile.ZipFile(GOLDEN / f"{name}.zip") as archive:
        archive.extractall(tmp_path)
    hub = keras_hub.models
    kinds = {
        "gemma": (hub.Gemma3CausalLM, hub.CausalLM),
        "vit": (hub.ViTImageClassifier, hub.ImageClassifier),
    }[saved_models.FILES[name][0]]
    for kind in kinds:
        model = kind.from_preset(str(tmp_path))
        assert isinstance(model, kinds[0]) and quantized(model)
        assert error_of(output(model, name), name) <= PEER_KERAS
    model.save_to_preset(str(tmp_path / "again"))
    again = kinds[0].from_preset(str(tmp_path / "again"))
    assert np.array_equal(output(again, name), output(model, name))
    unread = kinds[0].from_preset(str(tmp_path), load_weights=False)
    with pytest.raises(ValueError, match="its saved values were not loaded"):
        output(unread, name)
    bfloat16 = kinds[0].from_preset(str(tmp_path), dtype="bfloat16")
    assert bfloat16.backbone.compute_dtype == "bfloat16"
    assert error_of(output(bfloat16, name), name) < 0.3


# --- What is refused, by name ---------------------------------------------------------------------


def test_a_layer_of_a_newer_version_is_refused_by_its_name(tmp_path):
    def edit(config):
        layer = config["config"]["_wrapped_model"]["config"]["layers"][2]
        assert layer["class_name"] == "QStaticDense"
        layer["class_name"] = layer["registered_name"] = "QStaticFancyDense"

    file = changed("sequence_static_int8", tmp_path / "newer.keras", edit)
    with pytest.raises(ValueError, match="'down' is a QStaticFancyDense of Neural Compressor"):
        keras.models.load_model(file)


def test_codes_of_another_shape_are_refused_by_the_layer_s_name(tmp_path):
    def edit(file):
        place = file["layers/q_static_dense/vars"]
        codes = place["_kernel_quant"][()]
        del place["_kernel_quant"]
        place["_kernel_quant"] = codes[:-1]

    file = changed("sequence_static_int8", tmp_path / "cut.keras", weights=edit)
    with pytest.raises(ValueError, match=r"Dense 'up'.* has codes of int8 and shape \(7, 12\)"):
        keras.models.load_model(file)


def test_a_range_that_is_missing_is_refused_by_the_layer_s_name(tmp_path):
    def edit(file):
        del file["heads/k_qdq/vars/a_scale"]

    file = changed("net_static_int8", tmp_path / "cut.keras", weights=edit)
    with pytest.raises(ValueError, match="MultiHeadAttention '.*': .* has no range for it"):
        keras.models.load_model(file)


def test_a_layer_that_no_config_fits_is_refused_by_its_name(tmp_path):
    def edit(config):  # as if names were given anew
        first, second = config["config"]["_quant_config"]["configs"]
        first["config"]["white_list"], second["config"]["white_list"] = ["x"], ["y"]
        second["quantization_type"] = "static_quant"
        config["config"]["_quant_config"]["configs"].append(first)

    file = changed("graph_sum", tmp_path / "names.keras", edit)
    with pytest.raises(ValueError, match="Conv2D 'patch' was quantized by one of several configs"):
        keras.models.load_model(file)


def test_layers_that_calibration_did_not_reach_are_float_and_named(tmp_path):
    def edit(file):
        place = file["layers/q_static_dense/vars"]
        kernel = place["_kernel_quant"][()].astype("float32") * place["w_scale"][()]
        for key in list(place):
            if key != "bias":
                del place[key]
        place["kernel"] = kernel

    file = changed("sequence_static_int8", tmp_path / "float.keras", weights=edit)
    with pytest.warns(UserWarning, match="Dense 'up' is float: Neural Compressor saved it so"):
        model = keras.models.load_model(file)
    assert quantized(model) == {"down": "QStaticDense"}
    assert np.isfinite(output(model, "sequence_static_int8")).all()


def test_a_config_without_its_parts_is_refused(tmp_path):
    def edit(config):
        del config["config"]["_quant_config"]

    file = changed("sequence_static_int8", tmp_path / "less.keras", edit)
    with pytest.raises(ValueError, match="its config of Neural Compressor"):
        keras.models.load_model(file)
