"""Layers that say themselves how they are built, as those of KerasHub's SAM: quantized, saved."""

import keras
import numpy as np
import pytest
from keras import layers as L
from keras_nets import error_of, sample

import fewbit.keras as fk

# Keras' own, of a NumPy that is newer than it knows.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
X, PROMPTS = sample(8, 16), sample(8, 6, seed=1)
INT8 = {"weight_scale_granularity": "per_channel"}
CONFIGS = [fk.DynamicQuantConfig("int8", **INT8), fk.StaticQuantConfig("int8", **INT8)]


class _Decoder(L.Layer):
    """Weights of its own, and a Sequential that it makes and builds itself."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.mlp = keras.Sequential([L.Dense(units), L.Activation("relu"), L.Dense(units)])

    def _make(self, images, prompts):
        self.made_for = [int(images), int(prompts)]
        self.kernel = self.add_weight(name="kernel", shape=(images, self.units))
        self.table = self.add_weight(name="table", shape=(prompts, self.units))
        self.mlp.build((None, self.units))
        self.built = True

    def call(self, images, prompts):
        mixed = keras.ops.matmul(images, self.kernel) + keras.ops.matmul(prompts, self.table)
        return self.mlp(mixed)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable(package="fewbit_tests")
class Named(_Decoder):
    """What it was built for, under names that Keras does not know."""

    def build(self, images_shape, prompts_shape):
        self._make(images_shape[-1], prompts_shape[-1])

    def get_build_config(self):
        return {"made_for": self.made_for, "version": 3}

    def build_from_config(self, config):
        self._make(*config["made_for"])


@keras.saving.register_keras_serializable(package="fewbit_tests")
class Silent(_Decoder):
    """It is built for what its config says, so that there is nothing to tell."""

    def build(self, images_shape=None, prompts_shape=None):
        self._make(16, 6)

    def get_build_config(self):
        return None

    def build_from_config(self, config):
        self.build()


@keras.saving.register_keras_serializable(package="fewbit_tests")
class Misleading(Named):
    """What looks like the shape of an input, and is none."""

    def get_build_config(self):
        return {"input_shape": self.made_for}

    def build_from_config(self, config):
        self._make(*config["input_shape"])


def whole(cls):
    keras.utils.set_random_seed(0)
    images, prompts = keras.Input((16,)), keras.Input((6,))
    return keras.Model([images, prompts], L.Dense(4)(cls(32, name="decoder")(images, prompts)))


def inside(cls):
    model = whole(cls)
    images, prompts = keras.Input((16,)), keras.Input((6,))
    return keras.Model([images, prompts], L.Dense(4)(model([images, prompts])))


@pytest.mark.parametrize("config", CONFIGS, ids=["dynamic", "static"])
@pytest.mark.parametrize("make", [whole, inside])
@pytest.mark.parametrize("cls", [Named, Silent, Misleading])
def test_layers_with_a_build_config_of_their_own(cls, make, config, tmp_path):
    model = make(cls)
    wanted = model.predict([X, PROMPTS], verbose=0)
    data = [X, PROMPTS] if config.static else None
    small = fk.quantize_model(model, config, data, progress=False)
    names = [type(layer).__name__ for layer in small._flatten_layers()]
    kind = "QStatic" if config.static else "QDynamic"
    assert f"{kind}{cls.__name__}" in names and names.count(f"{kind}Dense") >= 3
    y = small.predict([X, PROMPTS], verbose=0)
    assert error_of(y, wanted) < 0.05
    small.save(tmp_path / "small.keras")
    loaded = keras.saving.load_model(tmp_path / "small.keras")
    assert [type(layer).__name__ for layer in loaded._flatten_layers()] == names
    assert np.array_equal(loaded.predict([X, PROMPTS], verbose=0), y)
    small.save_weights(tmp_path / "small.weights.h5")
    loaded.load_weights(tmp_path / "small.weights.h5")
    assert np.array_equal(loaded.predict([X, PROMPTS], verbose=0), y)


SIZE = 64


def segmenter(keras_hub):
    """KerasHub's SAM, as small as it goes."""
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.SAMBackbone(
        image_encoder=keras_hub.models.ViTDetBackbone(
            hidden_size=32,
            num_layers=2,
            intermediate_dim=64,
            num_heads=2,
            global_attention_layer_indices=[1],
            patch_size=16,
            num_output_channels=16,
            window_size=2,
            image_shape=(SIZE, SIZE, 3),
        ),
        prompt_encoder=keras_hub.layers.SAMPromptEncoder(
            hidden_size=16,
            image_embedding_size=(4, 4),
            input_image_size=(SIZE, SIZE),
            mask_in_channels=16,
        ),
        mask_decoder=keras_hub.layers.SAMMaskDecoder(
            num_layers=1,
            hidden_size=16,
            intermediate_dim=32,
            num_heads=2,
            embedding_dim=16,
            num_multimask_outputs=3,
            iou_head_depth=2,
            iou_head_hidden_dim=16,
        ),
        dtype="float32",
    )
    return keras_hub.models.SAMImageSegmenter(backbone)


@pytest.fixture(scope="module")
def prompted():
    numbers = np.random.default_rng(0)
    return {
        "images": sample(2, SIZE, SIZE, 3),
        "points": numbers.uniform(0, SIZE, (2, 1, 2)).astype("float32"),
        "labels": np.ones((2, 1), "float32"),
        "boxes": numbers.uniform(0, SIZE, (2, 1, 2, 2)).astype("float32"),
        "masks": sample(2, 1, 16, 16, 1),
    }


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`compile\\(\\)` was not called:UserWarning")
@pytest.mark.parametrize("config", CONFIGS, ids=["dynamic", "static"])
def test_sam(config, prompted, tmp_path):
    keras_hub = pytest.importorskip("keras_hub")
    model = segmenter(keras_hub)
    wanted = model.predict(prompted, verbose=0)
    # Not the data itself: KerasHub's SAM has no predict_on_batch that works.
    run = (lambda model: model.predict(prompted, verbose=0)) if config.static else None
    # Tables of relative positions begin as zeros, of which nothing static can be made.
    config = config.replace(exclude_list=["add_relative_positional_embedding"])
    small = fk.quantize_model(model, config, run, progress=False)
    y = small.predict(prompted, verbose=0)
    assert error_of(y["iou_pred"], wanted["iou_pred"]) < 0.1
    small.save(tmp_path / "sam.keras")
    small.save_to_preset(tmp_path / "sam")
    for loaded in (
        keras.saving.load_model(tmp_path / "sam.keras"),
        keras_hub.models.SAMImageSegmenter.from_preset(str(tmp_path / "sam")),
    ):
        found = loaded.predict(prompted, verbose=0)
        assert all(np.array_equal(found[name], y[name]) for name in y)


@pytest.mark.long
def test_sam_s_backbone_alone_is_refused_with_the_reason(prompted, tmp_path):
    keras_hub = pytest.importorskip("keras_hub")
    small = fk.quantize_model(segmenter(keras_hub), CONFIGS[0], progress=False)
    # KerasHub's own float one does not load either: what the segmenter builds is not built then.
    with pytest.raises(ValueError, match="is not built. Give the class that holds it a build"):
        small.backbone.save_to_preset(tmp_path / "sam")
    assert not (tmp_path / "sam").exists()
