"""Small functions under the names that Intel Neural Compressor gives them.

Scales are safe for ranges of nothing, and ranges with a zero point contain zero; otherwise the
numbers are the known ones. Names that belong to that library's inner workings say so when used.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from fewbit._scales import compute_scales
from fewbit.calibration import calibrate
from fewbit.keras._config_checks import effective_weight_method
from fewbit.keras._printing import print_model as print_model
from fewbit.keras._variables import sublayers
from fewbit.numerics import QType, convert_from, convert_to, format_of
from fewbit.qarray import HowToQuantize

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

    def symmetric(x: jax.Array, scale: jax.Array) -> jax.Array:
        return quantize(x, scale)

    return quantize if asymmetric else symmetric


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

    def symmetric(x: jax.Array, scale: jax.Array) -> jax.Array:
        return dequantize(x, scale)

    return dequantize if asymmetric else symmetric


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


def _stand_in(name: str) -> Callable[..., Any]:
    def stub(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(_MSG_NEVER.format(name=name, why=NEVER[name]))

    stub.__name__ = stub.__qualname__ = name
    stub.__doc__ = _MSG_NEVER.format(name=name, why=NEVER[name])
    return stub


_STANDINS = {name: _stand_in(name) for name in NEVER}


def __getattr__(name: str) -> Any:
    if name in _STANDINS:
        return _STANDINS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
