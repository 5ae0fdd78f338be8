"""Small functions under the names that Intel Neural Compressor gives them.

Scales are safe for ranges of nothing, and ranges with a zero point contain zero; otherwise the
numbers are the known ones. Names that belong to that library's inner workings say so when used.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from fewbit._util import refusal
from fewbit.calibration import CalibrationError
from fewbit.keras.config._fields import effective_weight_method
from fewbit.keras.layers._classes import PREFIXES, quantized_class
from fewbit.keras.layers._variables import drop_variables, sublayers, value_of
from fewbit.numerics import QType, convert_from, convert_to, format_of
from fewbit.qarray import HowToQuantize, calibrate, compute_scales

_MSG_BACKEND = (
    "fewbit.keras only supports the JAX backend, but the current Keras backend is {found!r}. Set "
    "KERAS_BACKEND=jax in the environment before Keras is first imported."
)
_MSG_NEVER = "fewbit.keras has no {name}, and needs none: {why}."
_ONE_WAY = (
    "every layer goes one way, fewbit.keras.quantize_model(model, config). A way of your own is a "
    "provider (fewbit.PtqProvider has the methods to override) or a layer told of by "
    "fewbit.keras.register_calls"
)
NEVER = {
    "register_algo": _ONE_WAY,
    "algos_mapping": _ONE_WAY,
    "static_quantize": (
        "write fewbit.keras.quantize_model(model, StaticQuantConfig(...), calib_function)"
    ),
    "dynamic_quantize": "write fewbit.keras.quantize_model(model, DynamicQuantConfig(...))",
    "verify_api": (
        "no layer's code is copied, so there is no signature to compare with that of Keras: a "
        "quantized layer runs its float class's own call"
    ),
    "causal_lm_make_replace_generate_function": (
        "calibration reads layers while model.generate runs as it is: "
        "quantize_model(model, config, lambda model: model.generate(prompts))"
    ),
}

globals().update(
    (name, refusal(f"fewbit.keras.{name}", _MSG_NEVER.format(name=name, why=why)))
    for name, why in NEVER.items()
)

dtype_mapping = {name: format_of(name).storage for name in ("int8", "fp8", "fp8_e4m3", "fp8_e5m2")}


def check_backend(raise_error: bool = True) -> bool:
    """Whether Keras runs on JAX; an error if it does not, unless told otherwise.

    >>> check_backend()
    True
    """
    found = keras.config.backend()
    if found != "jax" and raise_error:
        raise ValueError(_MSG_BACKEND.format(found=found))
    return found == "jax"


def get_q_params(
    orig_weight: jax.Array,
    dtype: QType = "fp8_e4m3",
    compute_dtype: Any = jnp.float32,
    asymmetric: bool = False,
    axis: int | tuple[int, ...] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Scale and zero point (None if symmetric) of an array; `axis` names what shares one.

    >>> scale, zero_point = get_q_params(jnp.array([0.0, 255.0]), 'int8', asymmetric=True)
    >>> scale, zero_point
    (Array([1.], dtype=float32), Array([-128], dtype=int32))
    """
    row, x = format_of(dtype), jnp.asarray(orig_weight)
    if x.size == 0:
        return jnp.ones((), compute_dtype), jnp.zeros((), jnp.int32) if asymmetric else None
    shared = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    axes = {a % x.ndim for a in shared}
    zero = asymmetric and row.kind == "int"
    how = HowToQuantize(
        qtype=dtype,
        channelwise_axes=tuple(a for a in range(x.ndim) if a not in axes),
        calibration_method="minmax" if zero else effective_weight_method("absmax", row.name, True),
    )
    scale, zero_point, _ = compute_scales(calibrate(x, how), dtype)
    whole = None if zero_point is None else zero_point.astype(jnp.int32)
    return scale.astype(compute_dtype), whole


def get_scale(
    orig_weight: jax.Array,
    dtype: QType = "fp8_e4m3",
    compute_dtype: Any = jnp.float32,
    axis: int | tuple[int, ...] | None = None,
) -> jax.Array:
    """The symmetric scale of an array; `axis` names what shares one.

    >>> get_scale(jnp.array([[1.0, -127.0], [2.0, 254.0]]), 'int8', axis=1)
    Array([[1.],
           [2.]], dtype=float32)
    """
    return get_q_params(orig_weight, dtype, compute_dtype, axis=axis)[0]


def get_quantize_fun(
    dtype: QType = "fp8_e4m3", asymmetric: bool = False
) -> Callable[..., jax.Array]:
    """A function from an array, its scale and (with `asymmetric`) its zero point to codes.

    >>> get_quantize_fun('int8')(jnp.array([1.0, -3.0]), jnp.array([0.5]))
    Array([ 2, -6], dtype=int8)
    """
    format_of(dtype)  # an unknown name is an error here

    def quantize(x: jax.Array, scale: jax.Array, zero_point: Any = None) -> jax.Array:
        ratio = x / scale.astype(x.dtype)
        if zero_point is not None:
            ratio = ratio + jnp.asarray(zero_point).astype(x.dtype)
        return convert_to(ratio, dtype)

    return quantize if asymmetric else lambda x, scale: quantize(x, scale)


def get_dequantize_fun(dtype: Any = jnp.float32, asymmetric: bool = False) -> Callable[..., Any]:
    """A function from codes, their scale and (with `asymmetric`) their zero point to numbers.

    >>> get_dequantize_fun()(jnp.array([2, -6], jnp.int8), jnp.array([0.5]))
    Array([ 1., -3.], dtype=float32)
    """

    def dequantize(x: jax.Array, scale: jax.Array, zero_point: Any = None) -> jax.Array:
        numbers = convert_from(x, x.dtype, dtype)
        if zero_point is not None:
            numbers = numbers - jnp.asarray(zero_point).astype(dtype)
        return numbers * scale.astype(dtype)

    return dequantize if asymmetric else lambda x, scale: dequantize(x, scale)


def iterate_over_layers(
    model: keras.Layer,
    operations: Iterable[Callable[[keras.Layer], Any]],
    /,
    *,
    filter_function: Callable[[type], bool] = lambda _: True,
) -> keras.Layer:
    """Call each operation on the model and every layer in it whose class passes; the model again.

    >>> seen = []
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> same = iterate_over_layers(
    ...     model, [lambda layer: seen.append(layer.units)],
    ...     filter_function=lambda cls: cls is keras.layers.Dense)
    >>> seen, same is model
    ([4], True)
    """
    wanted = list(operations)
    for layer in [model, *sublayers(model)]:
        if filter_function(type(layer)):
            for operation in wanted:
                operation(layer)
    return model


def __getattr__(name: str) -> Any:
    """The class of a quantized layer of Keras itself, as `QStaticDense`."""
    for kind in ("static", "dynamic"):
        prefix = PREFIXES[kind]
        word = name.removeprefix(prefix).replace("Conv2d", "Conv2D")
        if name.startswith(prefix) and hasattr(keras.layers, word):
            return quantized_class(getattr(keras.layers, word), kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# --- Layers that round what passes through them to few bits and back ------------------------------

_MSG_RANGE = (
    "{name}: fixed_range={found!r} is no range. Write (low, high) with low < high, or None for one "
    "that is seen."
)
_MSG_UNSEEN = (
    "{name} has seen no data, so its range is not known. Call it on samples between "
    "add_observers() and convert(), or give it a fixed_range=(low, high)."
)
_MSG_NOT_PREPARED = (
    "{name}.{method}() comes after {before}. A static layer is made ready so: add_observers(), "
    "add_variables(), calls on samples, convert(), post_quantization_cleanup()."
)


class _QDQLayer(keras.layers.Layer):
    """What both kinds share: the types, the range and the two halves of the way."""

    def __init__(
        self,
        name: str,
        activation_dtype: Any,
        dtype: Any = "float32",
        asymmetric: bool = False,
        fixed_range: tuple[float, float] | None = None,
    ):
        super().__init__(name=name, dtype=dtype)
        if fixed_range is not None and not float(fixed_range[0]) < float(fixed_range[1]):
            raise ValueError(_MSG_RANGE.format(name=name, found=fixed_range))
        self.activation_dtype = format_of(activation_dtype).name
        self.asymmetric, self.fixed_range = bool(asymmetric), fixed_range
        self.supports_masking = True

    def params_of(self, low: Any, high: Any) -> tuple[jax.Array, jax.Array | None]:
        """Scale and zero point of a range."""
        dtype = self.compute_dtype
        edges = jnp.stack([jnp.asarray(edge, dtype) for edge in (low, high)])
        scale, zero = get_q_params(edges, self.activation_dtype, dtype, self.asymmetric)
        return scale[0], None if zero is None else zero[0]

    def quantized(self, x: Any, scale: Any, zero: Any) -> jax.Array:
        x = jnp.asarray(x, self.compute_dtype)
        return get_quantize_fun(self.activation_dtype, True)(x, scale, zero)

    def dequantized(self, codes: Any, scale: Any, zero: Any) -> jax.Array:
        return get_dequantize_fun(self.compute_dtype, True)(codes, scale, zero)

    def call(self, inputs: Any, mask: Any = None) -> Any:
        return self.call_dq(self.call_q(inputs))

    def get_config(self) -> dict[str, Any]:
        config, own = super().get_config(), ("activation_dtype", "asymmetric", "fixed_range")
        shared = {key: config[key] for key in ("name", "dtype")}
        return shared | {key: getattr(self, key) for key in own}

    def _unready(self, method: str, before: str) -> ValueError:
        return ValueError(_MSG_NOT_PREPARED.format(name=self.name, method=method, before=before))


@keras.saving.register_keras_serializable(package="fewbit")
class DynamicQDQLayer(_QDQLayer):
    """Rounds each input in its own range, or in a fixed one.

    >>> layer = DynamicQDQLayer('qdq', 'int8')
    >>> layer(jnp.array([[0.1, 127.0]]))
    Array([[  0., 127.]], dtype=float32)
    """

    _last: Any = None

    def add_variables(self) -> None:
        """Nothing: the range is not kept."""

    def call_q(self, inputs: Any) -> jax.Array:
        """Codes; `call_dq` decodes those of the last call."""
        x = jnp.asarray(inputs, self.compute_dtype)
        edges = (jnp.min(x), jnp.max(x)) if self.fixed_range is None else self.fixed_range
        self._last = self.params_of(*edges)
        return self.quantized(x, *self._last)

    def call_dq(self, inputs: Any) -> jax.Array:
        if self._last is None:
            raise self._unready("call_dq", "call_q, which finds the range")
        return self.dequantized(inputs, *self._last)


@keras.saving.register_keras_serializable(package="fewbit")
class StaticQDQLayer(_QDQLayer):
    """Rounds inputs in the range that was seen before `convert()`, or in a fixed one.

    >>> layer = StaticQDQLayer('qdq', 'int8')
    >>> layer.add_observers()
    >>> layer.add_variables()
    >>> layer(jnp.array([[0.1, 127.0]])), layer.convert()  # as it is, until it is converted
    (Array([[1.00e-01, 1.27e+02]], dtype=float32), None)
    >>> layer(jnp.array([[0.1, 300.0]]))
    Array([[  0., 127.]], dtype=float32)
    """

    def __init__(
        self,
        name: str,
        activation_dtype: Any,
        dtype: Any = "float32",
        asymmetric: bool = False,
        const_scale: bool = False,
        fixed_range: tuple[float, float] | None = None,
        converted: bool = False,
    ):
        super().__init__(name, activation_dtype, dtype, asymmetric, fixed_range)
        self.const_scale, self.converted = bool(const_scale), bool(converted)
        self._observed: list[keras.Variable] = []
        self.a_scale: Any = None
        self.a_zero_point: Any = None
        if converted:
            self.add_variables()

    def _number(self, name: str, start: Any, dtype: Any = None) -> keras.Variable:
        made = dict(shape=(), initializer=start, dtype=dtype, trainable=False)
        return self.add_weight(name=name, **made)

    def add_observers(self) -> None:
        """Keep the range of what passes, from now on."""
        if self.fixed_range is None and not self._observed:
            for name, start in (("a_min", jnp.inf), ("a_max", -jnp.inf)):
                self._observed.append(self._number(name, keras.initializers.Constant(start)))

    def add_variables(self) -> None:
        """Room for the scale and the zero point."""
        if self.const_scale:
            self.a_scale = jnp.ones((), self.compute_dtype)
            self.a_zero_point = jnp.zeros((), jnp.int32) if self._has_zero else None
            return
        self.a_scale = self._number("a_scale", "ones", self.compute_dtype)
        if self._has_zero:
            self.a_zero_point = self._number("a_zero_point", "zeros", "int32")

    @property
    def _has_zero(self) -> bool:
        return self.asymmetric and format_of(self.activation_dtype).kind == "int"

    def convert(self) -> None:
        """Settle the range; from now on inputs are rounded."""
        if self.a_scale is None:
            raise self._unready("convert", "add_variables()")
        low, high = self.fixed_range or tuple(v.value for v in self._observed) or (1.0, 0.0)
        if not float(low) <= float(high):
            raise CalibrationError(_MSG_UNSEEN.format(name=self.name))
        scale, zero = self.params_of(low, high)
        if self.const_scale:
            self.a_scale, self.a_zero_point = scale, zero
        else:
            self.a_scale.assign(scale)
            if zero is not None:
                self.a_zero_point.assign(zero)
        self.converted = True

    def post_quantization_cleanup(self) -> None:
        """Forget what was observed."""
        drop_variables(self, self._observed)
        self._observed = []

    def call_q(self, inputs: Any) -> Any:
        """Codes; before `convert()` the input itself, whose range is noted."""
        if self.converted:
            return self.quantized(inputs, *self._params())
        if self._observed:
            x = jnp.asarray(inputs, self.variable_dtype)
            low, high = self._observed
            low.assign(jnp.minimum(low.value, jnp.min(x)))
            high.assign(jnp.maximum(high.value, jnp.max(x)))
        return inputs

    def call_dq(self, inputs: Any) -> Any:
        return self.dequantized(inputs, *self._params()) if self.converted else inputs

    def _params(self) -> tuple[Any, Any]:
        return value_of(self.a_scale), value_of(self.a_zero_point)

    def get_config(self) -> dict[str, Any]:
        own = {"const_scale": self.const_scale, "converted": self.converted}
        return super().get_config() | own

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        if self.const_scale and self.converted:
            store["const_scale"] = self.a_scale.astype(jnp.float32)
            if self.a_zero_point is not None:
                store["const_zero_point"] = self.a_zero_point

    def load_own_variables(self, store: Any) -> None:
        if self.const_scale and self.converted:
            self.a_scale = jnp.asarray(store["const_scale"], self.compute_dtype)
            if self._has_zero:
                self.a_zero_point = jnp.asarray(store["const_zero_point"], jnp.int32)
            return
        super().load_own_variables(store)
