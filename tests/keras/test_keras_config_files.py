"""Keras configs as dicts and JSON: both dialects, there and back without loss."""

import json
import os
import pathlib
import subprocess
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st
from keras_cases import (
    BOTH,
    FLAGS,
    Conv2D,
    Dense,
    Embedding,
    MyDense,
    says,
)

from fewbit.keras import (
    DynamicQuantConfig,
    JaxBaseConfig,
    JaxComposableConfig,
    StaticQuantConfig,
)


@BOTH
def test_the_nested_dialect_is_written(config_class):
    document = config_class("int8", white_list=[Dense], exclude_list=[".*skip.*"]).to_dict()
    assert document == {
        "quantization_type": config_class.name,
        "config": {
            "weight_dtype": "int8",
            "activation_dtype": "int8",
            "const_scale": False,
            "const_weight": False,
            "weight_scale_granularity": "per_tensor",
            "dot_product_attention_enable": False,
            "white_list": ["Dense"],
            "exclude_list": [".*skip.*"],
        },
    }
    assert "white_list" not in config_class().to_dict()["config"]
    assert "exclude_list" not in config_class().to_dict()["config"]
    restored = config_class.from_dict(document)
    assert restored.white_list == ["Dense"] and restored.exclude_list == [".*skip.*"]


@BOTH
def test_both_dialects_are_read(config_class):
    config = config_class("int4", "int8", group_size=32, exclude_list=["head"])
    config.set_local(Dense, DynamicQuantConfig("int2"))
    flat = config.to_dict(nested=False)
    assert "quantization_type" not in flat
    for document in (flat, config.to_dict()):
        restored = config_class.from_dict(document)
        assert type(restored) is config_class and restored == config
    assert JaxBaseConfig.from_dict(config.to_dict()) == config
    assert JaxComposableConfig.from_dict(config.to_dict()) == config


def test_the_document_says_the_class():
    document = DynamicQuantConfig().to_dict()
    assert type(StaticQuantConfig.from_dict(document)) is DynamicQuantConfig
    both = {"quantization_type": "composable_config", "configs": [document]}
    assert JaxBaseConfig.from_dict(both) == JaxComposableConfig([DynamicQuantConfig()])


def test_bad_documents():
    read = JaxBaseConfig.from_dict
    says(
        lambda: read({"weight_dtype": "int8"}),
        "Unknown config class: None. Must be one of: dynamic_quant or static_quant.",
        "StaticQuantConfig.from_dict(...)",
    )
    says(lambda: read({"quantization_type": "static"}), "class: static.", "mean 'static_quant'?")
    says(lambda: read({"quantization_type": ["a"]}), "Unknown config class: ['a'].")
    says(lambda: read("static_quant"), "must be a mapping, got the string", kind=TypeError)
    nested = {"quantization_type": "static_quant"}
    says(lambda: read({**nested, "weight_dtype": "int8"}), "A field belongs inside 'config'.")
    says(lambda: read({**nested, "confg": {}}), "has the key 'confg'", "Did you mean 'config'?")
    says(lambda: read({**nested, "config": []}), "'config' of static_quant", kind=TypeError)
    says(lambda: read({**nested, "config": {1: 2}}), "1 is no name of a field", kind=TypeError)
    says(lambda: read({**nested, "local": []}), "'local' of StaticQuantConfig", kind=TypeError)
    says(lambda: read({"quantization_type": "composable"}), "got None", kind=TypeError)
    says(lambda: read({**nested, "config": {"weight_dtype": "x"}}), "weight_dtype='x'")


def test_bad_json():
    read = StaticQuantConfig.from_json_string
    says(lambda: read("{"), "config is not JSON", "line 1")
    says(lambda: read('{"weight_dtype": "int8", "weight_dtype": "int4"}'), "given twice")
    says(lambda: read('{"group_size": NaN}'), "NaN is not a value JSON has")
    says(lambda: read("[]"), "must be a mapping, got an empty list", kind=TypeError)
    says(lambda: read(None), "needs JSON text, got None", kind=TypeError)


def test_files(tmp_path):
    path = tmp_path / "config.json"
    config = StaticQuantConfig("int8") + DynamicQuantConfig(white_list=["naïve"])
    config.to_json_file(path)
    assert json.loads(path.read_text(encoding="utf-8")) == config.to_dict()
    for reader in (JaxBaseConfig, StaticQuantConfig):
        assert reader.from_json_file(str(path)) == config
    says(
        lambda: JaxBaseConfig.from_json_file(tmp_path / "confg.json"),
        "No config file",
        "Did you mean 'config.json'?",
        kind=FileNotFoundError,
    )
    (tmp_path / "broken.json").write_text('{"quantization_type"')
    says(lambda: JaxBaseConfig.from_json_file(tmp_path / "broken.json"), "broken.json is not JSON")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    says(lambda: JaxBaseConfig.from_json_file(tmp_path / "bytes.json"), "no text in UTF-8")
    os.mkfifo(tmp_path / "pipe.json")
    says(lambda: JaxBaseConfig.from_json_file(tmp_path / "pipe.json"), "not a file, but a pipe")
    (tmp_path / "deep.json").write_text("[" * 5000 + "]" * 5000)
    says(lambda: JaxBaseConfig.from_json_file(tmp_path / "deep.json"), "more than 300 levels deep")


def test_a_file_that_cannot_be_written_stays_what_it_was(tmp_path):
    path = tmp_path / "config.json"
    StaticQuantConfig().to_json_file(path)
    before = path.read_bytes()
    config = StaticQuantConfig(white_list=["a"])
    config.white_list.append(object())
    says(lambda: config.to_json_file(path), "which is no entry", kind=TypeError)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_file_is_read_in_a_new_process(tmp_path):
    path = tmp_path / "config.json"
    config = StaticQuantConfig("int8", exclude_list=[Dense])
    config.set_local("head", DynamicQuantConfig("int4", group_size=32))
    config.to_json_file(path)
    code = "from fewbit.keras import JaxBaseConfig as read; "
    code += f"print(read.from_json_file({str(path)!r}))"
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout.strip() == repr(config), done.stderr


entries = st.lists(st.sampled_from(["Dense", Dense, "net/.*", "a|b", "é"]), min_size=1, max_size=3)
types = st.sampled_from(["int8", "int4", "int2", "nf4", "fp8", "fp8_e5m2", "mxfp4", jnp.int8])


@st.composite
def leaves(draw, local=True):
    config_class = draw(st.sampled_from([StaticQuantConfig, DynamicQuantConfig]))
    fields = {flag: draw(st.booleans()) for flag in FLAGS if flag != "quantize_attention"}
    fields["weight_dtype"] = draw(types)
    if draw(st.booleans()):
        fields["activation_dtype"] = None
    if fields["weight_dtype"] != "mxfp4":
        fields["group_size"] = draw(st.sampled_from([None, 16, 128]))
    fields["weight_calibration_method"] = draw(st.sampled_from(["absmax", "absmax,0.9", "mse"]))
    if local:
        fields["white_list"] = draw(st.one_of(st.just("*"), st.none(), entries))
        fields["exclude_list"] = draw(st.one_of(st.none(), entries))
    config = config_class(**fields)
    for entry in draw(entries) if local and draw(st.booleans()) else []:
        config.set_local(entry, draw(leaves(local=False)))
    return config


@settings(max_examples=60, deadline=None)
@given(st.lists(leaves(), min_size=1, max_size=3))
def test_text_keeps_a_config_whole(configs):
    config = configs[0] if len(configs) == 1 else JaxComposableConfig(configs)
    texts = [JaxBaseConfig.from_json_string(config.to_json_string())]
    texts.append(type(config).from_dict(config.to_dict()))
    texts.append(eval(repr(config)))
    if len(configs) == 1:
        texts.append(type(config).from_dict(config.to_dict(nested=False)))
    loose = [("net/a", MyDense), ("net/b", Conv2D), ("head", Embedding)]
    for again in texts:
        assert type(again) is type(config) and again == config
        assert again.to_dict() == config.to_dict()
        mapping, same = (c.to_config_mapping(model_info=loose) for c in (config, again))
        assert list(mapping) == list(same)
