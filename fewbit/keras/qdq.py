"""Layers that round what passes through them to few bits and back.

They are for graphs of one's own; `quantize_model(..., emulate=True)` rounds inside the layers of a
model. `call` is `call_dq(call_q(x))`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import keras

from fewbit.keras._calibration import CalibrationError
from fewbit.keras._variables import drop_variables
from fewbit.keras.utility import get_dequantize_fun, get_q_params, get_quantize_fun
from fewbit.numerics import format_of

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
        self, name: str, activation_dtype: Any, dtype: Any, asymmetric: bool, fixed_range: Any
    ):
        super().__init__(name=name, dtype=dtype)
        if fixed_range is not None and not float(fixed_range[0]) < float(fixed_range[1]):
            raise ValueError(_MSG_RANGE.format(name=name, found=fixed_range))
        self.activation_dtype = format_of(activation_dtype).name
        self.asymmetric, self.fixed_range = bool(asymmetric), fixed_range
        self.supports_masking = True

    def params_of(self, low: Any, high: Any) -> tuple[jax.Array, jax.Array | None]:
        """Scale and zero point of a range."""
        edges = jnp.stack([jnp.asarray(edge, self.compute_dtype) for edge in (low, high)])
        scale, zero = get_q_params(
            edges, self.activation_dtype, self.compute_dtype, self.asymmetric
        )
        return scale[0], None if zero is None else zero[0]

    def quantized(self, x: Any, scale: Any, zero: Any) -> jax.Array:
        x = jnp.asarray(x, self.compute_dtype)
        return get_quantize_fun(self.activation_dtype, True)(x, scale, zero)

    def dequantized(self, codes: Any, scale: Any, zero: Any) -> jax.Array:
        return get_dequantize_fun(self.compute_dtype, True)(codes, scale, zero)

    def call_q(self, inputs: Any) -> Any:
        raise NotImplementedError

    def call_dq(self, inputs: Any) -> Any:
        raise NotImplementedError

    def call(self, inputs: Any, mask: Any = None) -> Any:
        return self.call_dq(self.call_q(inputs))

    def get_config(self) -> dict[str, Any]:
        own = {
            "activation_dtype": self.activation_dtype,
            "asymmetric": self.asymmetric,
            "fixed_range": self.fixed_range,
        }
        config = super().get_config()
        return {key: config[key] for key in ("name", "dtype")} | own


@keras.saving.register_keras_serializable(package="fewbit")
class DynamicQDQLayer(_QDQLayer):
    """Rounds each input in its own range, or in a fixed one.

    >>> layer = DynamicQDQLayer('qdq', 'int8')
    >>> layer(jnp.array([[0.1, 127.0]]))
    Array([[  0., 127.]], dtype=float32)
    """

    def __init__(
        self,
        name: str,
        activation_dtype: Any,
        dtype: Any = "float32",
        asymmetric: bool = False,
        fixed_range: tuple[float, float] | None = None,
    ):
        super().__init__(name, activation_dtype, dtype, asymmetric, fixed_range)
        self._last: Any = None

    def add_variables(self) -> None:
        """Nothing: the range is not kept."""

    def call_q(self, inputs: Any) -> jax.Array:
        """Codes; `call_dq` decodes those of the last call."""
        if self.fixed_range is None:
            x = jnp.asarray(inputs, self.compute_dtype)
            self._last = self.params_of(jnp.min(x), jnp.max(x))
        else:
            self._last = self.params_of(*self.fixed_range)
        return self.quantized(inputs, *self._last)

    def call_dq(self, inputs: Any) -> jax.Array:
        if self._last is None:
            before = "call_q, which finds the range"
            raise ValueError(
                _MSG_NOT_PREPARED.format(name=self.name, method="call_dq", before=before)
            )
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

    def add_observers(self) -> None:
        """Keep the range of what passes, from now on."""
        if self.fixed_range is None and not self._observed:
            self._observed = [
                self.add_weight(name=name, shape=(), initializer=start, trainable=False)
                for name, start in (("a_min", _infinite), ("a_max", _minus_infinite))
            ]

    def add_variables(self) -> None:
        """Room for the scale and the zero point."""
        scale = {"name": "a_scale", "initializer": "ones", "dtype": self.compute_dtype}
        zero = {"name": "a_zero_point", "initializer": "zeros", "dtype": "int32"}
        if self.const_scale:
            self.a_scale = jnp.ones((), self.compute_dtype)
            self.a_zero_point = jnp.zeros((), jnp.int32) if self._has_zero else None
            return
        self.a_scale = self.add_weight(shape=(), trainable=False, **scale)
        if self._has_zero:
            self.a_zero_point = self.add_weight(shape=(), trainable=False, **zero)

    @property
    def _has_zero(self) -> bool:
        return self.asymmetric and format_of(self.activation_dtype).kind == "int"

    def convert(self) -> None:
        """Settle the range; from now on inputs are rounded."""
        if self.a_scale is None:
            before = "add_variables()"
            raise ValueError(
                _MSG_NOT_PREPARED.format(name=self.name, method="convert", before=before)
            )
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
        scale, zero = (getattr(p, "value", p) for p in (self.a_scale, self.a_zero_point))
        return scale, zero

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


def _infinite(shape: Any, dtype: Any = None) -> jax.Array:
    return jnp.full(shape, jnp.inf, dtype)


def _minus_infinite(shape: Any, dtype: Any = None) -> jax.Array:
    return jnp.full(shape, -jnp.inf, dtype)
