"""Every name that code moving to fewbit may use: it works, comes later, or never, and says so."""

import ast
import importlib
import pathlib
import subprocess
import sys
import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fewbit
from fewbit._absent import LATER, MODULES, NEVER
from fewbit._util import homes

X, W = jnp.ones((2, 4)), jnp.eye(4)
RULES = [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
NUMBERS = (((1,), (0,)), ((), ()))
INT8_TRAINING = dict(lhs_qtype="int8", rhs_qtype="int8", drhs_grad_qtype="int8")
QT_RULE = fewbit.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")


def model(params, x):
    return x @ params["w"]


def q():
    return fewbit.quantize(W, "int8")


def quantized_params():
    return fewbit.quantize_params({"w": W}, fewbit.plan(model, RULES, {"w": W}, X))


def calibrated():
    rules = [RULES[0].replace(act_static_scale=True)]
    return fewbit.calibrate(model, rules, {"w": W}, [X])


def close(x):
    return bool(jnp.allclose(jnp.asarray(x, jnp.float32).reshape(2, 4), X, atol=0.02))


def float_params_of_a_layer():
    return len(nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), fewbit.float_params())) == 2


def saved_and_loaded():
    with tempfile.TemporaryDirectory() as folder:
        info = fewbit.save(f"{folder}/m", quantized_params())
        found = fewbit.load(f"{folder}/m", lazy=False).params["w"]
        same = info == fewbit.inspect(f"{folder}/m") and fewbit.verify(f"{folder}/m").ok
    return same and jnp.allclose(fewbit.dequantize(found), W, atol=0.01)


def raises_for(read):
    with pytest.raises(fewbit.CheckpointError, match="does not exist"):
        read("nowhere")
    return True


# keras.md 1.1: what users of Neural Compressor's JAX backend import, and what is beside it here.
KERAS = """
quantize_model StaticQuantConfig DynamicQuantConfig JaxComposableConfig JaxBaseConfig print_model
get_default_static_config get_default_dynamic_config
clone_model plan register_calls CalibrationError GreedySampler TopKSampler quantize_kv_cache
StaticQDQLayer DynamicQDQLayer check_backend iterate_over_layers get_scale get_q_params
get_quantize_fun get_dequantize_fun register_algo algos_mapping verify_api static_quantize
dynamic_quantize causal_lm_make_replace_generate_function
""".split()


# A tiny check for each name that works.
def trains():
    rules = [fewbit.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")]
    f = fewbit.quantize_model(lambda p, x: x @ p["w"], fewbit.QtProvider(rules))
    return f, jax.grad(lambda p: f(p, X).sum())({"w": W})["w"]


def served():
    converted = fewbit.to_ptq(trains()[0], {"w": W}, None, X)
    return converted.model(converted.params, X)


def learns():
    rules = [fewbit.QtRule(weight_qtype="int4", weight_calibration_method="learned")]
    f = fewbit.quantize_model(lambda p, x: x @ p["w"], fewbit.QtProvider(rules))
    return fewbit.add_learned_scales(f, {"w": W}, X)


WORKS = {
    "QtProvider": lambda: jnp.allclose(trains()[1], X.sum(0)[:, None], rtol=0.02),
    "AmaxHistory": lambda: fewbit.AmaxHistory.__name__ == "AmaxHistory",
    "QuantStat": lambda: fewbit.QuantStat.__name__ == "QuantStat",
    "to_ptq": lambda: close(served()),
    "add_learned_scales": lambda: learns()["w_qscale"].shape == (1, W.shape[1]),
    "QArray": lambda: isinstance(fewbit.QArray(q().qvalue, q().scale), fewbit.QArray),
    "quantize": lambda: q().qtype == jnp.int8,
    "dequantize": lambda: jnp.allclose(fewbit.dequantize(q()), W, atol=0.01),
    "dot_general": lambda: close(fewbit.dot_general(X, q(), NUMBERS)),
    "dot": lambda: close(fewbit.dot(X, q())),
    "einsum": lambda: close(fewbit.einsum("bi,io->bo", X, q())),
    "conv_general_dilated": lambda: close(
        fewbit.conv_general_dilated(
            X[:, :, None], q()[None], (1,), "VALID", dimension_numbers=("NCW", "WIO", "NCW")
        )
    ),
    "ragged_dot": lambda: close(fewbit.ragged_dot(X, q()[None], jnp.array([2], jnp.int32))),
    "ragged_dot_general": lambda: close(
        fewbit.ragged_dot_general(
            X,
            q()[None],
            jnp.array([2], jnp.int32),
            jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0]),
        )
    ),
    "quantize_model": lambda: close(
        fewbit.quantize_model(model, fewbit.PtqProvider(RULES))(quantized_params(), X)
    ),
    "quantize_params": lambda: isinstance(quantized_params()["w"], fewbit.WithAux),
    "QuantizationRule": lambda: fewbit.QuantizationRule(weight_qtype="int8").matches("a", "einsum"),
    "QtRule": lambda: fewbit.QtRule(weight_qtype="int8", bwd_qtype="int8").bwd_qtype == jnp.int8,
    "LoraRule": lambda: fewbit.LoraRule(rank=4, alpha=8.0).rank == 4,
    "LoraProvider": lambda: fewbit.LoraProvider(rank=4, alpha=8.0).rules[0].rank == 4,
    "apply_lora_to_model": lambda: close(
        fewbit.apply_lora_to_model(model, fewbit.LoraProvider(rank=1, alpha=1.0))(
            {
                "w": W,
                "w_lora_a": jnp.zeros((W.shape[0], 1)),
                "w_lora_b": jnp.zeros((1, W.shape[1])),
            },
            X,
        )
    ),
    "lora": lambda: callable(fewbit.lora.init) and callable(fewbit.lora.split),
    "merge_lora": lambda: fewbit.merge_lora is fewbit.lora.merge_lora,
    "save_adapters": lambda: fewbit.save_adapters is fewbit.lora.save_adapters,
    "load_adapters": lambda: fewbit.load_adapters is fewbit.lora.load_adapters,
    "QuantizationProvider": lambda: fewbit.QuantizationProvider(RULES).rules == tuple(RULES),
    "BoxedParamProvider": lambda: fewbit.BoxedParamProvider(RULES).quantizes_params,
    "PtqProvider": lambda: fewbit.PtqProvider(RULES, disable_jit=True).disable_jit,
    "__version__": lambda: fewbit.__version__.count(".") >= 1,
    "WithAux": lambda: quantized_params()["w"].how.qtype == jnp.int8,
    "HowToQuantize": lambda: fewbit.HowToQuantize(qtype="int8").channelwise_axes == (),
    "numerics": lambda: fewbit.numerics.should_quantize(jnp.float32),
    "observers": lambda: fewbit.observers.Observer is fewbit.calibration.Observer,
    "debug": lambda: all(
        callable(getattr(fewbit.debug, name)) for name in ("compare", "bisect", "training_stats")
    ),
    "get_current_rule": lambda: fewbit.get_current_rule("gmm") is None,
    "pallas": lambda: fewbit.pallas.QArray is fewbit.QArray,
    "contrib": lambda: fewbit.contrib.gptq is fewbit.gptq,
    "process_prequantized_params": lambda: isinstance(
        fewbit.process_prequantized_params({"w": q()}, {"w": W})["w"], jax.Array
    ),
    "restore_quantization_rules": lambda: (
        fewbit.restore_quantization_rules({"w": q()}, fewbit.QuantizationRule)[0].weight_qtype
        == jnp.int8
    ),
    "training": lambda: callable(fewbit.training.DotGeneral) and callable(fewbit.training.pair),
    "DotGeneralQtConfig": lambda: fewbit.DotGeneralQtConfig(**INT8_TRAINING).quantizes_gradients,
    "ConvGeneralQtConfig": lambda: fewbit.ConvGeneralQtConfig().lhs_qtype is None,
    "RaggedDotQtConfig": lambda: fewbit.RaggedDotQtConfig(tile_size=4).tile_size == 4,
    "dot_general_qt": lambda: close(
        fewbit.dot_general_qt(X, W, NUMBERS, fewbit.DotGeneralQtConfig(**INT8_TRAINING))
    ),
    "einsum_qt": lambda: close(
        fewbit.einsum_qt("bi,io->bo", X, W, fewbit.DotGeneralQtConfig(**INT8_TRAINING))
    ),
    "conv_general_qt": lambda: close(
        fewbit.conv_general_qt(
            X[:, :, None],
            W[None],
            fewbit.ConvGeneralQtConfig(**INT8_TRAINING),
            (1,),
            "VALID",
            dimension_numbers=("NCW", "WIO", "NCW"),
        )
    ),
    "ragged_dot_qt": lambda: close(
        fewbit.ragged_dot_qt(
            X, W[None], jnp.array([2], jnp.int32), fewbit.RaggedDotQtConfig(**INT8_TRAINING)
        )
    ),
    "QtDotGeneral": lambda: close(fewbit.QtDotGeneral(QT_RULE).apply({}, X, W, NUMBERS)),
    "QtEinsum": lambda: close(fewbit.QtEinsum(QT_RULE).apply({}, "bi,io->bo", X, W)),
    "NnxQtDotGeneral": lambda: close(fewbit.NnxQtDotGeneral(QT_RULE)(X, W, NUMBERS)),
    "NnxQtEinsum": lambda: close(fewbit.NnxQtEinsum(QT_RULE)("bi,io->bo", X, W)),
    "keras": lambda: all(callable(getattr(fewbit.keras, name)) for name in KERAS),
    # fewbit's own
    "install_as_qwix": lambda: callable(fewbit.install_as_qwix),
    "quantize_checkpoint": lambda: callable(fewbit.quantize_checkpoint),
    "read_checkpoint": lambda: fewbit.read_checkpoint({"w": W})["w"].shape == W.shape,
    "calibrate": lambda: calibrated().batches == 1,
    "Statistics": lambda: isinstance(calibrated(), fewbit.Statistics),
    "Batch": lambda: fewbit.Batch(X, train=True).kwargs == {"train": True},
    "Observer": lambda: isinstance(fewbit.observers.observer_named("range"), fewbit.Observer),
    "register_observer": lambda: (
        fewbit.register_observer(fewbit.observers.observer_named("range")).name == "range"
    ),
    "plan": lambda: fewbit.plan(model, RULES, {"w": W}, X).kind == "function",
    "Plan": lambda: fewbit.Plan(rules=(), sites=(), leaves=()).totals.sites == 0,
    "Site": lambda: fewbit.plan(model, RULES, {"w": W}, X).sites[0].site.id == "w:dot_general0",
    "PlanError": lambda: issubclass(fewbit.PlanError, ValueError),
    "UntraceableModelError": lambda: issubclass(fewbit.UntraceableModelError, TypeError),
    "report": lambda: isinstance(fewbit.report(quantized_params()), fewbit.Report),
    "Report": lambda: fewbit.Report(()).bytes == 0,
    "take": lambda: jnp.allclose(fewbit.take(q(), jnp.array([1])), W[1:2], atol=0.01),
    "pack": lambda: fewbit.pack(fewbit.quantize(W, "int4")).layout == "bits",
    "QuantizedParams": lambda: fewbit.QuantizedParams({"w": W}, {}).params["w"] is W,
    "unpack": lambda: fewbit.unpack(fewbit.pack(fewbit.quantize(W, "int4"))).layout == "plain",
    "trainable": lambda: fewbit.trainable({"w": q(), "b": X}) == {"w": False, "b": True},
    "split_trainable": lambda: fewbit.split_trainable({"w": q(), "b": X})[0]["w"] is None,
    "merge_trainable": lambda: fewbit.merge_trainable({"a": None}, {"a": 1}) == {"a": 1},
    "float_params": float_params_of_a_layer,
    "save": lambda: saved_and_loaded(),
    "load": lambda: issubclass(fewbit.CheckpointError, Exception) and raises_for(fewbit.load),
    "inspect": lambda: raises_for(fewbit.inspect),
    "verify": lambda: raises_for(fewbit.verify),
    "CheckpointError": lambda: issubclass(fewbit.CheckpointError, ValueError),
    "rules_to_json": lambda: list(fewbit.rules_from_json(fewbit.rules_to_json(RULES))) == RULES,
    "rules_to_vllm": lambda: fewbit.rules_to_vllm(RULES)[0]["weight_qtype"] == "int8",
    "rules_from_json": lambda: not fewbit.rules_from_json("[]"),
    "rules_to_yaml": lambda: list(fewbit.rules_from_yaml(fewbit.rules_to_yaml(RULES))) == RULES,
    "rules_from_yaml": lambda: not fewbit.rules_from_yaml("[]"),
}

# flax.md 1.1, complete, and what its users need besides.
FAMILIAR = """
QArray quantize dequantize dot_general dot einsum conv_general_dilated ragged_dot ragged_dot_general
quantize_model apply_lora_to_model quantize_params QuantizationRule QtRule LoraRule
QuantizationProvider BoxedParamProvider PtqProvider QtProvider LoraProvider OdmlQatProvider
OdmlConversionProvider process_prequantized_params restore_quantization_rules QuantStat contrib
__version__
WithAux HowToQuantize calibrate numerics disable_interceptions awq smooth_quant qep hadamard_rot
SparsityRule
get_current_rule quantize_act create_quantized_param _fast_dot_general get_intercept_map pallas
""".split()


@pytest.mark.parametrize("name", FAMILIAR)
def test_every_familiar_name_has_one_answer(name):
    answers = [name in WORKS, name in LATER, name in NEVER]
    assert sum(answers) == 1, f"{name}: works, later or never?"
    assert hasattr(fewbit, name)


@pytest.mark.parametrize("name", WORKS)
def test_names_that_work(name):
    assert bool(WORKS[name]())


def test_nothing_public_is_left_out():
    modules = {m.rpartition(".")[2] for m in sys.modules if m.startswith("fewbit.")}
    public = {n for n in {*vars(fewbit), *homes("fewbit")} if not n.startswith("_")} - modules
    assert public - set(WORKS) == set()


@pytest.mark.parametrize("name", [name for name in LATER if "." not in name])
def test_later_names_import_and_say_what_they_will_do(name):
    found = getattr(fewbit, name)
    with pytest.raises(NotImplementedError) as error:
        found.anything if name in MODULES else found([], 1, key=2)
    text = str(error.value)
    assert f"fewbit.{name} is not there yet. It will {LATER[name].what}." in text
    assert f"Until then, {LATER[name].until}" in text


@pytest.mark.parametrize("name", NEVER)
def test_never_names_say_why(name):
    with pytest.raises(NotImplementedError, match=f"fewbit has no {name}, and needs none: "):
        getattr(fewbit, name)(print)


def test_the_reason_there_is_no_interception():
    with pytest.raises(NotImplementedError, match="no function of JAX or Flax is replaced"):
        fewbit.disable_interceptions(print)
    provider = fewbit.PtqProvider(RULES)
    assert not hasattr(provider, "get_intercept_map")
    with pytest.raises(AttributeError, match="override dot_general, einsum"):
        provider.get_interceptors()
    with pytest.raises(AttributeError, match="'PtqProvider' object has no attribute 'rulez'"):
        provider.rulez  # noqa: B018
    mine = type("Mine", (fewbit.PtqProvider,), {"get_intercept_map": lambda self: {}})
    with pytest.raises(TypeError, match="Mine overrides a method that is never called: get_interc"):
        type("Ours", (mine,), {})(RULES)


def test_imports_of_migrating_code():
    from fewbit import LoraProvider, QtProvider  # noqa: F401
    from fewbit.contrib import gptq, padded_ptq  # noqa: F401

    class Fp8Provider(QtProvider):
        def dot_general(self, *args, **kwargs):
            return super().dot_general(*args, **kwargs)

    assert Fp8Provider(RULES).rules == (fewbit.QtRule(weight_qtype="int8", act_qtype="int8"),)
    with pytest.raises(NotImplementedError, match="fewbit.gptq is not there yet"):
        gptq.GptqCalibrationProvider(RULES)
    with pytest.raises(AttributeError, match="fewbit.contrib has no 'gptk'. It has gptq, awq"):
        fewbit.contrib.gptk  # noqa: B018


def test_pallas():
    import fewbit.pallas as qpl

    assert qpl.quantize is fewbit.quantize and qpl.dequantize is fewbit.dequantize
    assert qpl.get_current_rule("gmm") is None
    assert close(qpl.dot(X, q())) and close(qpl.einsum("bi,io->bo", X, q()))
    assert close(qpl.dot_general(X, q(), NUMBERS)) and callable(qpl.pallas_call)
    spec = jax.ShapeDtypeStruct((4, 4), "int8")
    assert qpl.QArray("a ref", "its scale", qtype="int8").qvalue == "a ref"
    assert qpl.QArray(spec, spec).shape == (4, 4)


def test_class_relations():
    f = fewbit
    assert issubclass(f.PtqProvider, f.BoxedParamProvider)
    assert issubclass(f.LoraProvider, f.BoxedParamProvider)
    assert not issubclass(f.LoraProvider, f.PtqProvider)
    assert f.QtProvider.__mro__.count(f.QuantizationProvider) == 1
    assert not issubclass(f.QtProvider, f.BoxedParamProvider)
    assert not issubclass(f.OdmlQatProvider, f.BoxedParamProvider)
    assert issubclass(f.OdmlConversionProvider, f.OdmlQatProvider)
    assert issubclass(f.QtRule, f.QuantizationRule) and issubclass(f.LoraRule, f.QuantizationRule)
    assert not isinstance(f.PtqProvider(RULES), f.QtProvider)


def test_a_name_that_is_nobodys():
    assert not hasattr(fewbit, "nonsense") and not hasattr(fewbit, "__wrapped__")
    with pytest.raises(
        AttributeError, match="fewbit has no 'PtqProvidr'. Did you mean 'PtqProvider'"
    ):
        fewbit.PtqProvidr  # noqa: B018
    with pytest.raises(AttributeError, match="Did you mean 'QtProvider'"):
        fewbit.QTProvider  # noqa: B018
    with pytest.raises(AttributeError, match="dir.fewbit. lists what there is"):
        fewbit.xyzzy  # noqa: B018
    with pytest.raises(ImportError):
        from fewbit import nonsense  # noqa: F401


FACES = sorted(path.parent for path in pathlib.Path(fewbit.__file__).parent.rglob("*.pyi"))


@pytest.mark.parametrize("folder", FACES, ids=lambda folder: folder.name)
def test_type_checkers_see_the_names_that_are_loaded_when_first_used(folder):
    parts = folder.relative_to(pathlib.Path(fewbit.__file__).parent.parent).parts
    face = importlib.import_module(".".join(parts))
    tree = ast.parse((folder / "__init__.pyi").read_text(encoding="utf-8"))
    assert all(isinstance(node, ast.ImportFrom) for node in tree.body)
    seen = {a.asname: (node.module, a.name) for node in tree.body for a in node.names}
    assert seen == homes(face.__name__)
    for name, (module, there) in seen.items():
        home = importlib.import_module(module)
        found = (
            getattr(home, there)
            if module != face.__name__
            else importlib.import_module(f"{module}.{there}")
        )
        assert getattr(face, name) is found
    assert seen.keys() <= set(dir(face))


def test_later_names_load_no_framework():
    code = "import sys, fewbit; fewbit.QtProvider, fewbit.to_ptq, fewbit.pallas, fewbit.contrib;"
    code += "assert not {'flax', 'keras', 'yaml', 'tensorflow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_methods_that_subclasses_call_or_override():
    """Familiar methods of a provider, by name and first arguments."""
    provider = fewbit.PtqProvider(RULES)
    for name in (
        *("dot_general", "einsum", "conv_general_dilated", "ragged_dot", "get_unused_rules"),
        *("process_model_inputs", "process_model_output", "_init_rule"),
        "_get_current_rule_and_op_id",
    ):
        assert callable(getattr(provider, name))
    assert fewbit.quantize_model(nn.Dense(2), provider)._unquantized_type is nn.Dense
