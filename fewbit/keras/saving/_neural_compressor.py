"""Files that Neural Compressor's JAX backend wrote (3.10), as models that fewbit quantized.

Its config holds the float model and how it was quantized; its weights file has codes, as int8, and
scales under the names of variables. While Keras loads such a file, layers that may be quantized
wait under the names of its classes, by which Keras finds their values; then they become ours.
"""

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from fewbit.keras._planning import LayerPlan, layers_of, plan_layer
from fewbit.keras._quantize import convert, forget_compiled
from fewbit.keras.config._choose import Choice, rule_for_config
from fewbit.keras.config._configs import JaxBaseConfig
from fewbit.keras.config._fields import symmetric_act_method
from fewbit.keras.layers._calls import Examples
from fewbit.keras.layers._classes import PREFIXES
from fewbit.keras.layers._variables import own_variables
from fewbit.keras.saving._format import KEY, damaged, keep_config, saved_dtype
from fewbit.keras.saving._layer import Door
from fewbit.keras.saving._restore import make_saveable
from fewbit.keras.training._qat import guard_training
from fewbit.kernels import for_kernels
from fewbit.numerics import format_of
from fewbit.qarray import QArray, WithAux, validate_qarray

_PACKAGE, _MODULE = "INC", "neural_compressor"
_KERNELS = ("Dense", "EinsumDense", "Conv2D")
# Where attention's own products have their ranges, by the names of its layers for them.
_MULTI_HEAD = dict(
    f_qdq="einsum0_lhs", k_qdq="einsum0_rhs", v_qdq="einsum1_lhs", a_qdq="einsum1_rhs"
)
_RANGES: dict[str, dict[str, str]] = {
    "MultiHeadAttention": _MULTI_HEAD,
    "CachedGemma3Attention": dict(
        q_qdq="einsum0_rhs",
        k_qdq="einsum0_lhs",
        v_qdq="einsum1_lhs",
        attention_softmax_qdq="einsum1_rhs",
    ),
    "Gemma3VisionAttention": dict(
        query_qdq="dot_general0_lhs",
        key_qdq="dot_general0_rhs",
        dropout_attention_probs_qdq="dot_general1_lhs",
        value_qdq="dot_general1_rhs",
    ),
    # Of the table its file has the floats: what is seen of them is their range.
    "ReversibleEmbedding": dict(inputs_qdq="dot_general0_lhs", kernel_qdq="dot_general0_rhs"),
}
_ITS_NAMES = {"fp8": "float8_e4m3"}  # where fewbit means another type by the name
_LAST = "_zz_fewbit_read_last"  # sorts behind all attributes by which Keras finds what to load

_MSG_CLASS = (
    "{name} is a {cls} of Neural Compressor, which fewbit cannot read. Quantize the float model "
    "again, with fewbit.keras.quantize_model(model, config) or there without that layer."
)
_MSG_UNREAD = (
    "{name} was quantized by Neural Compressor, and its saved values were not loaded. Load them: "
    "model.load_weights(...), or from_preset without load_weights=False."
)
_MSG_AMBIGUOUS = (
    "{name} was quantized by one of several configs ({types}), and the filters of none of them "
    "match its path {path!r}: automatic names change from process to process. Give the layers "
    "names of their own and save the model again."
)
_MSG_FLOAT = (
    "{name} is float: Neural Compressor saved it so, as its calibration did not reach that layer."
)
_MSG_LACKS = "{name}: Neural Compressor's file has {found} for it, and {wanted} is needed."


def let_keras_read_them() -> None:
    """Let Keras make our models of what Neural Compressor's classes wrote."""
    doors = {
        "KerasQuantizedModelWrapper": _Opened(),
        "KerasQuantizedGemmaWrapper": _Opened("Gemma3CausalLM"),
        "KerasQuantizedViTWrapper": _Opened("ViTImageClassifier"),
        "KerasQuantizedTokenizerWrapper": _Opened("Gemma3Tokenizer"),
        "KerasQuantizedModelBackboneWrapper": _OpenedBackbone("Backbone"),
    }
    found = keras.saving.get_custom_objects()
    for name, door in doors.items():
        found.setdefault(f"{_PACKAGE}>{name}", door)  # the library's own, where it is imported


class _Opened(Door):
    """Stands for a class of Neural Compressor around one of KerasHub, or around any model."""

    def __init__(self, name: str | None = None):
        super().__init__(name or "Model")
        self._any = name is None

    @property
    def original(self) -> type | None:
        return keras.Model if self._any else super().original

    def from_config(self, config: Any) -> Any:
        return _Reading(config).model


class _OpenedBackbone(_Opened):
    """Stands for the backbone of any task, as KerasHub asks whether a task's own `!=` it.

    Looking for the task of a backbone it asks by `==`: Gemma3 and ViT are those that Neural
    Compressor has tasks for.
    """

    def __eq__(self, other: object) -> bool:
        return other is self or getattr(other, "__name__", "") in ("Gemma3Backbone", "ViTBackbone")

    def __ne__(self, other: object) -> bool:
        base = self.original
        return not (isinstance(other, type) and base is not None and issubclass(other, base))

    __hash__ = Door.__hash__


# --- One file being read --------------------------------------------------------------------------


class _Reading:
    """A model while its values are read."""

    def __init__(self, config: Mapping[str, Any]):
        wrapped, written = config.get("_wrapped_model"), config.get("_quant_config")
        name = str(config.get("name") or "the model")
        if not isinstance(wrapped, Mapping) or not isinstance(written, Mapping):
            raise damaged(name, "its config of Neural Compressor", "it lacks its parts")
        _check_classes(wrapped)
        self.config = JaxBaseConfig.from_dict(_translated(written))
        self._told: list[tuple[keras.Layer, str]] = []
        self.model = self._built(_with_dtype(wrapped, config))
        self._layers = {path: each for path, each in layers_of(self.model).items() if _known(each)}
        for path, layer in self._layers.items():
            self._wait(path, layer)
        with keras.StatelessScope():
            pass  # leaving it makes Keras give the other variables their first values
        backbone = getattr(self.model, "backbone", None)
        self._roots = [self.model, *([] if backbone is None else [backbone])]
        for root in self._roots:
            vars(root)[_LAST] = _Last(self)

    def _built(self, wrapped: Mapping[str, Any]) -> Any:
        scope = {
            prefix + name: _Told(name, prefix + name, self._told)
            for prefix in (PREFIXES["static"], PREFIXES["dynamic"])
            for name in (*_KERNELS, *_RANGES)
        }
        scope["QStaticConv2d"] = scope["QStaticConv2D"]
        with keras.saving.custom_object_scope(scope):
            try:
                with keras.StatelessScope(initialize_variables=False):
                    return keras.saving.deserialize_keras_object(wrapped)
            except ValueError:  # variables made of arrays cannot wait
                return keras.saving.deserialize_keras_object(wrapped)

    def _wait(self, path: str, layer: Any) -> None:
        word = next((word for each, word in self._told if each is layer), None)
        part = _part(self.config, path, type(layer))
        if word is None and part is not None:
            word = PREFIXES["static" if part.static else "dynamic"] + type(layer).__name__
        arrival = _Arrival(layer, path, part, word)
        places = [*_RANGES.get(type(layer).__name__, {})]
        for place in [*places, "q_qdq"] if "f_qdq" in places else places:
            vars(layer)[place] = arrival.ranges[place] = _Range()
        if word is not None and type(layer).__name__ in _KERNELS:
            layer._kernel.__class__ = _Unmade
        layer.__class__ = _waiting_class(arrival.original, word or arrival.original.__name__)
        layer._fewbit_arrival = arrival

    def finish(self) -> None:
        """Make ours of the layers whose values came; of the model, once all did."""
        arrived = {}
        for path, layer in [*self._layers.items()]:
            arrival = layer._fewbit_arrival
            if arrival.found is not None:
                arrived[path] = arrival
                del self._layers[path]
                layer.__class__ = arrival.original
                for place in ("_fewbit_arrival", *arrival.ranges):
                    vars(layer).pop(place)
        examples = Examples(self.model)
        made = [_planned(arrival, self.config, examples) for arrival in arrived.values()]
        planned = [each for each in made if each is not None]
        for each in planned:
            arrival = arrived[each.path]
            convert(each, _scales(each, arrival), ready=_values(each, arrival))
        if not self._layers:
            for root in self._roots:
                del vars(root)[_LAST]
            make_saveable(self.model)
            guard_training(self.model)
            forget_compiled(self.model)
            keep_config(self.model, self.config)


class _Arrival:
    """What one layer is to become, and what came for it."""

    def __init__(self, layer: Any, path: str, part: Any, word: str | None):
        self.layer, self.path, self.part, self.word = layer, path, part, word
        self.original: Any = type(layer)
        self.found: dict[str, np.ndarray] | None = None
        self.ranges: dict[str, _Range] = {}

    @property
    def name(self) -> str:
        return f"{self.original.__name__} '{self.path}'"

    def range_of(self, place: str) -> Mapping[str, np.ndarray]:
        return vars(self.ranges[place]).get("_fewbit_found", {})


class _Told:
    """Makes the float layer where a config names one of Neural Compressor's classes."""

    def __init__(self, name: str, word: str, told: list[tuple[keras.Layer, str]]):
        self.__name__, self._name, self._word, self._told = word, name, word, told

    def from_config(self, config: Any) -> Any:
        cls = getattr(keras.layers, self._name, None)
        if cls is None:
            raise ValueError(_MSG_CLASS.format(name=f"'{config.get('name')}'", cls=self._word))
        layer = cls.from_config(config)
        self._told.append((layer, self._word))
        return layer


class _Range(keras.Layer):
    """Where the scale of an operand is read."""

    def load_own_variables(self, store: Any) -> None:
        self.__dict__["_fewbit_found"] = {key: np.asarray(store[key]) for key in store.keys()}


class _Last(keras.Layer):
    """What Keras loads when everything else of a model was loaded."""

    def __init__(self, reading: _Reading):
        super().__init__(name="fewbit_last")
        self.__dict__["_fewbit_finish"] = reading.finish

    def load_own_variables(self, store: Any) -> None:
        self.__dict__["_fewbit_finish"]()


class _Waiting:
    """A layer until its values are read."""

    _fewbit_arrival: _Arrival

    def call(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(_MSG_UNREAD.format(name=self._fewbit_arrival.name))

    def load_own_variables(self, store: Any) -> None:
        arrival, keys = self._fewbit_arrival, set(store.keys())
        if arrival.original.__name__ in _KERNELS:
            self._kernel.__class__ = keras.Variable  # type: ignore[attr-defined]
        if all(key.isdigit() for key in keys):  # a float layer, as Keras writes it
            arrival.original.load_own_variables(self, store)
            arrival.found = {}
            return
        found = {key: np.asarray(store[key]) for key in keys}
        for variable in own_variables(self):
            if variable.name in keys:
                variable.assign(found.pop(variable.name))
            elif "_kernel_quant" not in keys:
                shown = ", ".join(sorted(keys))
                text = dict(name=arrival.name, found=shown, wanted=variable.name)
                raise ValueError(_MSG_LACKS.format(**text))
        arrival.found = found


class _Unmade(keras.Variable):
    """A kernel that gets no first value: codes will come."""

    def _deferred_initialize(self) -> None:
        """Nothing."""


@functools.cache
def _waiting_class(original: Any, word: str) -> Any:
    return type(word, (_Waiting, original), {"__module__": __name__})


# --- What its config says -------------------------------------------------------------------------


def _translated(document: Mapping[str, Any]) -> dict[str, Any]:
    """A config in our names."""
    if "configs" in document:
        return {**document, "configs": [_translated(each) for each in document["configs"]]}
    fields = dict(document.get("config") or {})
    for field in ("weight_dtype", "activation_dtype"):
        fields[field] = _ITS_NAMES.get(fields.get(field, ""), fields.get(field, "fp8_e4m3"))
    return {**document, "config": fields}


def _check_classes(config: Any) -> None:
    """Raise for a layer of Neural Compressor that is none of those known here."""
    if isinstance(config, Mapping):
        word, module = str(config.get("class_name")), str(config.get("module"))
        known = {prefix + name for prefix in PREFIXES.values() for name in (*_KERNELS, *_RANGES)}
        if module.partition(".")[0] == _MODULE and word not in known | {"QStaticConv2d"}:
            name = config.get("name") or (config.get("config") or {}).get("name")
            raise ValueError(_MSG_CLASS.format(name=f"'{name}'", cls=word))
        config = list(config.values())
    for each in config if isinstance(config, list) else ():
        _check_classes(each)


def _with_dtype(wrapped: Mapping[str, Any], around: Mapping[str, Any]) -> dict[str, Any]:
    """The float model's config with the dtype that KerasHub wrote into the config around it."""
    fields = dict(wrapped.get("config") or {})
    if isinstance(fields.get("backbone"), Mapping):
        inside = (around.get("backbone") or {}).get("config") or {}
        fields["backbone"] = _with_dtype(fields["backbone"], inside)
    elif "dtype" in fields:
        given = {"dtype": around.get("dtype"), f"{KEY}_dtype": fields["dtype"]}
        fields["dtype"] = saved_dtype(given)
    return {**wrapped, "config": fields}


def _known(layer: Any) -> bool:
    """Whether Neural Compressor has a class for exactly this one."""
    cls = type(layer)
    own = getattr(keras.layers, cls.__name__, None) is cls or cls.__module__.startswith("keras_hub")
    return own and cls.__name__ in (*_KERNELS, *_RANGES)


def _part(config: JaxBaseConfig, path: str, cls: type) -> Any:
    """The config that selects a layer: the last that does."""
    found = [each for part in config.parts if (each := part.config_for(path, cls)) is not None]
    return found[-1] if found else None


# --- From its values to ours ----------------------------------------------------------------------


def _planned(arrival: _Arrival, config: JaxBaseConfig, examples: Examples) -> LayerPlan | None:
    """The plan of one layer, None if its values are floats."""
    static = _is_static(arrival)
    if static is None:
        if arrival.word is not None:
            warnings.warn(_MSG_FLOAT.format(name=arrival.name), stacklevel=2)
        return None
    part = arrival.part
    if part is None or not _fits(part, static, arrival):
        part = _only_one(arrival, [each for each in config.parts if _fits(each, static, arrival)])
    made = plan_layer(arrival.layer, arrival.path, _choice(arrival, part, static), examples)
    if isinstance(made, str):
        raise ValueError(f"{arrival.name}: {made}")
    return made


def _is_static(arrival: _Arrival) -> bool | None:
    """Whether a layer has stored ranges; None if it is float."""
    found = arrival.found or {}
    if arrival.original.__name__ in _KERNELS:
        return "a_scale" in found if "_kernel_quant" in found else None
    if any("a_scale" in arrival.range_of(place) for place in arrival.ranges):
        return True
    dynamic = arrival.word is not None and arrival.word.startswith(PREFIXES["dynamic"])
    return False if dynamic else None


def _fits(part: Any, static: bool, arrival: _Arrival) -> bool:
    """Whether a config may have made what came: integers with stored ranges have a zero point."""
    integer = format_of(part.activation_dtype).kind == "int"
    seen = "a_zero_point" in (arrival.found or {})
    tells = static and arrival.original.__name__ in _KERNELS
    return part.static == static and (not tells or integer == seen)


def _only_one(arrival: _Arrival, parts: list[Any]) -> Any:
    types = {(part.weight_dtype, part.activation_dtype): part for part in parts}
    if len(types) != 1:
        text = "; ".join(f"{weight} and {act}" for weight, act in types)
        raise ValueError(
            _MSG_AMBIGUOUS.format(name=arrival.name, types=text or "none", path=arrival.path)
        )
    return next(iter(types.values()))


def _choice(arrival: _Arrival, part: Any, static: bool) -> Choice:
    """The layer's rule: products run on codes where that is the same to the last place of a sum.

    It is with stored ranges in float32. Bfloat16 rounds what is decoded, and attention's products
    and ranges of a batch are Neural Compressor's own: these are emulated.
    """
    kernel = arrival.original.__name__ in _KERNELS and arrival.layer.compute_dtype == "float32"
    symmetric = "Gemma3" in arrival.original.__name__
    part = part.replace(
        emulate=not (kernel and static and _in_range(arrival)),
        act_calibration_method=_method(part.activation_dtype, symmetric),
        quantize_attention=True,
    )
    rule = rule_for_config(part, arrival.path)
    kind, fused = "static" if static else "dynamic", part.dot_product_attention_enable
    granularity = part.weight_scale_granularity
    return Choice(part, rule, kind, granularity, part.emulate, fused, as_read=True)


def _method(qtype: str, symmetric: bool) -> str:
    integer = format_of(qtype).kind == "int"
    return "minmax" if integer and not symmetric else symmetric_act_method(qtype) or "absmax"


def _in_range(arrival: _Arrival) -> bool:
    """Whether the zero point is a code: it is none where a range keeps away from zero."""
    zero = (arrival.found or {}).get("a_zero_point")
    return zero is None or -128 <= int(zero.reshape(-1)[0]) <= 127


def _scales(each: LayerPlan, arrival: _Arrival) -> dict[str, Any]:
    """The static scales of a layer, by '<op_id>_lhs_scale'."""
    places = _RANGES.get(arrival.original.__name__)
    if places is _MULTI_HEAD and each.choice.fused:
        places = {**places, "f_qdq": "", "q_qdq": places["f_qdq"]}  # before the scores' factor
    found = {home: arrival.range_of(place) for place, home in (places or {}).items()}
    made = {}
    for scale in each.plan.scales:
        name = scale.name.rpartition("/")[2]
        given = found.get(name, {}) if places is not None else arrival.found or {}
        if "a_scale" not in given:
            text = dict(name=arrival.name, found="no range", wanted=f"one of {name}")
            raise ValueError(_MSG_LACKS.format(**text))
        made[f"{name}_scale"] = jnp.asarray(given["a_scale"], scale.dtype).reshape(scale.shape)
        if "a_zero_point" in given:
            zero = np.asarray(given["a_zero_point"])
            dtype = "int8" if -128 <= int(zero.reshape(-1)[0]) <= 127 else "int32"
            made[f"{name}_zero_point"] = jnp.asarray(zero, dtype).reshape(scale.shape)
    return made


def _values(each: LayerPlan, arrival: _Arrival) -> dict[str, Any]:
    """The quantized kernel, in the layout that this machine's kernels read."""
    found = arrival.found or {}
    if "_kernel_quant" not in found:
        return {}
    leaf = next(leaf for leaf in each.plan.leaves if leaf.how is not None)
    assert leaf.how is not None
    how = leaf.how.replace(rule=leaf.rule)
    row, shape = format_of(how.qtype), tuple(leaf.shape)
    codes, scale = found["_kernel_quant"], found["w_scale"]
    if codes.shape != shape or codes.dtype != np.int8 or scale.ndim != len(shape):
        what = f"codes of {codes.dtype} and shape {codes.shape}"
        wanted = f"int8 of shape {shape}"
        raise ValueError(_MSG_LACKS.format(name=arrival.name, found=what, wanted=wanted))
    kept = tuple(n if axis in how.channelwise_axes else 1 for axis, n in enumerate(shape))
    scales = jnp.broadcast_to(jnp.asarray(scale, leaf.dtype), kept)
    q = QArray(jnp.asarray(codes.view(row.storage)), scales, qtype=how.qtype)
    q = q.with_dtype(leaf.dtype)
    validate_qarray(q)
    return {leaf.path.rpartition("/")[2]: WithAux(for_kernels(q, how), how)}
