"""A layer's float `call` as a pure function of its variables, traced once per way of calling it.

The quantized layer runs that trace through the interpreter, so every layer whose products JAX can
see is quantized by the same code, subclasses and layers of other libraries included.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras.src.backend import get_keras_mask, set_keras_mask

from fewbit.interpreter import Cache, Call, Runner, current, split_call
from fewbit.keras.layers._attention import attention_way, call_scopes, own_attributes
from fewbit.keras.layers._calls import Calls
from fewbit.keras.layers._lora import adapters, with_adapter
from fewbit.keras.layers._variables import Stored, own_variables, sublayers, value_of
from fewbit.keras.training._remembered import Remembered
from fewbit.numerics import format_of, get_asymmetric_bound
from fewbit.ops import as_float
from fewbit.planning import NOISE, ScaleName
from fewbit.providers import PtqProvider, QuantizationProvider, activation_hows
from fewbit.qarray import HowToQuantize, dequantize, quantize_static, quantize_with
from fewbit.rules import QuantizationRule
from fewbit.tracing import scope_name
from fewbit.training import QtProvider

# --- Masks of tensors, which Keras keeps beside the tensors and not in the arguments of a call ----

Masks = dict[str, Any]  # by the number of the leaf


def masks_of(tree: Any) -> Masks:
    """The masks of a tree's tensors."""
    found = {str(k): get_keras_mask(leaf) for k, leaf in enumerate(jax.tree.leaves(tree))}
    return {k: mask for k, mask in found.items() if mask is not None}


def set_masks(tree: Any, masks: Masks, *, drop: bool = False) -> None:
    """Set the masks of a tree's tensors; with `drop`, remove those that are not there."""
    for k, leaf in enumerate(jax.tree.leaves(tree)):
        if str(k) in masks:
            set_keras_mask(leaf, masks[str(k)])
        elif drop and get_keras_mask(leaf) is not None:
            set_keras_mask(leaf, None)


# --- The casts of mixed precision policies, as parts of a layer's trace ---------------------------

_NARROW = ("bfloat16", "float16")


class _Inside(keras.Layer):
    """Runs a function in the scope that a layer of its policy runs in."""

    def call(self, run: Callable[[], Any]) -> None:
        run()


def _inside(dtype: str, *, autocast: bool = True) -> keras.Layer:
    with keras.RematScope(mode=None):  # or what `run` traces would not outlive the call
        return _Inside(name="fewbit_inside", dtype=dtype, autocast=autocast)


_UNCAST = _inside("float32", autocast=False)


def held_values(variables: Sequence[keras.Variable]) -> list[Any]:
    """What variables hold now, before any cast.

    >>> class Layer(keras.layers.Dense):
    ...     def call(self, x):
    ...         print(self.kernel.value.dtype, held_values([self.kernel])[0].dtype)
    >>> Layer(2, dtype='mixed_bfloat16')(keras.ops.ones((1, 4)))
    bfloat16 float32
    """
    values: list[Any] = []

    def read() -> None:
        values.extend(variable.value for variable in variables)

    if any(variable.dtype in _NARROW for variable in variables):
        _UNCAST(run=read)
    else:  # nothing is lost, and calling a layer costs an eager call more than all this
        read()
    return values


def as_called(layer: keras.Layer, run: Callable[[], Any]) -> Any:
    """The result of `run` with the casts that variables have inside the layer's own call.

    >>> dense = keras.layers.Dense(2, dtype='mixed_bfloat16')
    >>> dense.build((None, 4))
    >>> dense.kernel.dtype, as_called(dense, lambda: dense.kernel.dtype)
    ('float32', 'bfloat16')
    """
    if not layer.autocast or layer.compute_dtype == layer.variable_dtype:
        return run()
    found: list[Any] = []
    _inside(f"mixed_{layer.compute_dtype}")(run=lambda: found.append(run()))
    return found[0]


# --- Losses that a layer adds to the model's: those of its weights, and those of its call ---------


class Regularized:
    """A layer that reports the regularizers of its quantized weights, of what these decode to."""

    def _get_own_losses(self) -> list[Any]:
        # What every model asks the layers inside it for, theirs from `add_loss` being the others.
        return [*super()._get_own_losses(), *_of_weights(self)]  # type: ignore[misc]


def _of_weights(layer: Any) -> list[Any]:
    """As Keras: only where the weight could be trained, were it float."""
    if not layer.trainable:
        return []
    return [
        variable.regularizer(variable.value)
        for variable in layer._fewbit.hollow.values()
        if variable.trainable and getattr(variable, "regularizer", None) is not None
    ]


@contextlib.contextmanager
def losses_of_call(layer: keras.Layer) -> Iterator[list[Any]]:
    """While `layer` is traced: what it, and layers inside it, give to `add_loss`."""
    losses: list[Any] = []

    def add_loss(loss: Any) -> None:
        losses.extend(keras.tree.flatten(loss))

    with own_attributes([(each, {"add_loss": add_loss}) for each in [layer, *sublayers(layer)]]):
        yield losses


# --- The float `call` of a layer as a pure function, traced once per way of calling it ------------

INSIDE = "inside "  # what the paths of variables begin with that are not the layer's own
_TABLES = ("embeddings", "reverse_embeddings")
_VARIABLES, _STORED, _SCALES, _NOISE = 0, 1, 4, 6


class LayerProgram:
    """How one layer is called: `float_call` with a rule deciding what happens at its Sites.

    `fused` says which way attention takes; None leaves it to the layer. `as_read` is of a file of
    Neural Compressor: float look-up tables are rounded for products, ranges are not widened.
    """

    def __init__(
        self,
        layer: keras.Layer,
        float_call: Callable[..., Any],
        path: str,
        rule: QuantizationRule,
        *,
        emulate: bool = False,
        fused: bool | None = None,
        trains: bool = False,
        as_read: bool = False,
    ):
        table = as_read and isinstance(layer, keras.layers.Embedding)
        self.plain = _TABLES if table else ()
        self.layer, self.float_call, self.path, self.fused = layer, float_call, path, fused
        self.provider: Any
        if trains:
            self.provider = QtProvider([rule], emulate=emulate)
        else:
            self.provider = (EmulatingProvider if emulate else PtqProvider)([rule])
        if isinstance(self.provider, EmulatingProvider):
            keras_own = isinstance(layer, keras.layers.MultiHeadAttention)
            self.provider.attention = keras_own and not fused
            self.provider.as_read = as_read
            self.provider.fused = bool(as_read and keras_own and fused)
            self.provider.table = table and not rule.act_static_scale
        self.calls: Calls | None = None  # the examples that the layer was planned with
        self._runners: Cache[Runner] = Cache()

    def prepare(
        self,
        own: Mapping[str, keras.Variable],
        stored: dict[str, Any],
        scales: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        abstract: bool = False,
        method: str = "__call__",
        noise: Any = None,
        beside: Iterable[keras.Variable] = (),
    ) -> tuple[Runner, list[Any], list[keras.Variable]]:
        """The runner for one call, the leaves to run it with, and the float variables it reads.

        `own` are the variables that may be quantized; `stored` holds the values of those that are,
        by name. Variables `beside` them are not the float call's.
        """
        hollow = {name: v for name, v in own.items() if name in stored}
        skipped = {id(v) for v in [*hollow.values(), *beside]}
        others = [v for v in self.layer.variables if id(v) not in skipped]
        names = self._names(own)

        def name(key: tuple[Any, ...]) -> str | None:
            if key[0].idx == _VARIABLES:
                return names[id(others[key[1].idx])]
            if key[0].idx == _STORED:
                return f"{self.path}/{key[1].key}"
            if key[0].idx == _NOISE:
                return NOISE
            if key[0].idx == _SCALES:
                return ScaleName(f"{self.path}/{key[1].key}")
            return None

        if abstract:
            values = [jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for v in others]
        else:
            values = held_values(others)
        masks = {} if abstract else masks_of((args, kwargs))
        dynamic, call = split_call((values, stored, args, kwargs, scales, masks, noise), name)
        # Variables look the same outside of a call and inside of it, and are cast only inside.
        seen = tuple(v.dtype for v in [*others, *hollow.values()])
        runner = self._runners.get(
            lambda: (call.key, method, abstract, seen),
            lambda: self._runner(call, others, hollow, method, abstract),
        )
        return runner, dynamic, others

    def runs(
        self,
        calls: Calls,
        own: Mapping[str, keras.Variable],
        stored: dict[str, Any] | None = None,
        beside: Iterable[keras.Variable] = (),
    ) -> list[tuple[Runner, list[Any]]]:
        """Runners for abstract calls of the layer, and the leaves to run them with."""
        found = []
        for number, (args, kwargs) in enumerate(calls):
            method = "__call__" if number == 0 else f"call{number + 1}"
            run = self.prepare(
                own,
                stored or {},
                {},
                args,
                kwargs,
                abstract=True,
                method=method,
                beside=beside,
            )
            found.append(run[:2])
        return found

    def finish(self, result: Any, others: list[keras.Variable], args: Any, kwargs: Any) -> Any:
        """What a run gives, after what it did to variables, losses and masks is done here too."""
        out, changed, losses, kept_masks, out_masks = result
        for k, value in changed.items():
            others[k].assign(value)
        if losses:
            self.layer.add_loss(losses)
        set_masks((args, kwargs), kept_masks, drop=True)
        set_masks(out, out_masks)
        return out

    def _names(self, own: Mapping[str, keras.Variable]) -> dict[int, str | None]:
        """Paths of all variables. Those of sublayers and adapters have their own, so that a rule
        for this layer does not meet their products."""
        names: dict[int, str | None] = {id(v): f"{INSIDE}{v.path}" for v in self.layer.variables}
        for name, v in own.items():
            names[id(v)] = None if name in self.plain else f"{self.path}/{name}"
        names.update((id(v), f"{INSIDE}{v.path}") for v in adapters(self.layer))
        return names

    def _runner(
        self,
        call: Call,
        others: list[keras.Variable],
        hollow: dict[str, keras.Variable],
        method: str,
        abstract: bool,
    ) -> Runner:
        float_call = with_adapter(self.layer, self.float_call)

        def pure(dynamic: list[Any]) -> Any:
            values, stored, args, kwargs, _, masks, _ = call.merge(dynamic)
            set_masks((args, kwargs), masks)
            mapping = [*zip(others, values, strict=True)]
            mapping += [(v, stored[name]) for name, v in hollow.items()]
            with keras.StatelessScope() as scope:
                for update in mapping:  # its own argument `state_mapping` would cast them
                    scope.add_update(update)
                with (
                    jax.named_scope(scope_name(self.path, type(self.layer).__name__)),
                    call_scopes([(f"{INSIDE}{each.path}", each) for each in sublayers(self.layer)]),
                    attention_way(self.layer, self.fused),
                    losses_of_call(self.layer) as losses,
                ):
                    out = float_call(self.layer, *args, **kwargs)
                after = [scope.get_current_value(v) for v in others]
            changed = {
                k: new
                for k, (old, new) in enumerate(zip(values, after, strict=True))
                if new is not old
            }
            return out, changed, losses, masks_of((args, kwargs)), masks_of(out)

        def planned(dynamic: list[Any]) -> Any:
            return as_called(self.layer, lambda: pure(dynamic))

        what = f"Layer '{self.path}' ({type(self.layer).__name__})"
        return Runner(
            planned if abstract else pure,
            self.provider,
            lambda key: call.names[key[0].idx],
            method=method,
            site_path="owner",
            what=what,
        )


# --- What a quantized layer knows about itself, beside what Keras knows about it ------------------

_MSG_UNLOADED = (
    "{path} is quantized and its saved values ({names}) were not loaded. Load them: "
    "model.load_weights(...), or from_preset without load_weights=False. A model made by "
    "keras.models.clone_model has no values: fewbit.keras.clone_model(model) copies them too."
)
OPS = ("dot_general", "einsum", "conv_general_dilated", "ragged_dot", "take")


@dataclass(eq=False)
class LayerState:
    """One layer's decision and what it holds: quantized variables, static scales, its traces."""

    path: str  # the layer's place in the model when it was quantized
    rule: QuantizationRule
    kind: str  # 'static' | 'dynamic' | 'weight_only' | 'training'
    program: LayerProgram
    settings: dict[str, Any] = field(default_factory=dict)
    stored: dict[str, Stored] = field(default_factory=dict)  # by the name of the variable
    hollow: dict[str, keras.Variable] = field(default_factory=dict)
    scales: dict[str, Any] = field(default_factory=dict)  # '<op_id>_lhs_scale': variable or array
    awaited: dict[str, Any] = field(default_factory=dict)  # what a file will give, and its shape
    awaited_scales: tuple[str, ...] = ()  # and the names of static scales there
    seed: Any = None  # of stochastic rounding, in a layer that trains
    remembered: Remembered = field(default_factory=Remembered)  # of the steps of training

    def run(self, layer: keras.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's call, quantized."""
        scales = {*self.awaited_scales} - self.scales.keys()
        if scales or self.awaited.keys() - self.stored.keys():
            return self._sketch(layer, args, kwargs)
        stored = {name: part.value() for name, part in self.stored.items()}
        static = {name: value_of(scale) for name, scale in self.scales.items()}
        own = {**named_variables(layer), **self.hollow}
        noise = None if self.seed is None else self.seed.next()
        kept = self.remembered
        runner, dynamic, others = self.program.prepare(
            own,
            stored,
            static | kept.values(),
            args,
            kwargs,
            noise=noise,
            beside=kept.variables.values(),
        )
        # The interpreter's own products are this layer's, to a quantized layer around it.
        with jax.named_scope(scope_name(self.path, type(layer).__name__)):
            result = kept.run(runner, dynamic, self.path) if kept else runner(dynamic)
        return self.program.finish(result, others, args, kwargs)

    def parts(self) -> list[Any]:
        """What holds its quantized values and static scales: variables, or constants."""
        return [p for stored in self.stored.values() for p in stored.parts] + [
            *self.scales.values()
        ]

    def _sketch(self, layer: keras.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The float call, for the shapes that Keras asks for before it loads the weights."""
        names = ", ".join([*self.awaited, *self.awaited_scales])
        message = _MSG_UNLOADED.format(path=layer.path or layer.name, names=names)
        if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))):
            raise ValueError(message)

        def refuse(x: Any) -> Any:
            raise ValueError(message)

        def refused(x: Any) -> Any:  # where this is compiled and run after all, as by predict
            if not isinstance(x, jax.core.Tracer):
                return x
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return jax.pure_callback(refuse, shape, x, vmap_method="sequential")

        return jax.tree.map(refused, self.program.float_call(layer, *args, **kwargs))


def named_variables(layer: keras.Layer) -> dict[str, keras.Variable]:
    """A layer's own variables by name; a name that comes again gets a number."""
    named: dict[str, keras.Variable] = {}
    for variable in own_variables(layer):
        name, number = variable.name, 2
        while name in named:
            name, number = f"{variable.name}_{number}", number + 1
        named[name] = variable
    return named


def layer_rule(path: str, rule: QuantizationRule) -> QuantizationRule:
    """The rule at the layer's own products and look-ups only, one static scale per operand."""
    axes = tuple(range(8)) if rule.act_static_scale else rule.act_batch_axes
    return rule.replace(module_path=re.escape(path), op_names=OPS, act_batch_axes=axes)


# --- Emulation: values rounded to few bits, arithmetic in float -----------------------------------
# The graph is quantize, dequantize, float product, with one activation scale per tensor: what Intel
# Neural Compressor computes, and the pattern that XLA's oneDNN rewrite knows on CPUs with fp8
# units. Ranges here hold zero, though: activations that keep away from it have a coarser scale
# than there, and constant ones are not lost.

# The second product of Keras' MultiHeadAttention is of the softmax and the values; jnp.einsum swaps
# its operands.
PROBABILITIES = "einsum1"


def range_of_probabilities(qtype: Any) -> str:
    """The calibration method for values that are known to lie between 0 and 1.

    >>> range_of_probabilities('int8'), range_of_probabilities('fp8_e4m3')
    ('fixed,0,1', 'fixed,-1,1')
    """
    return "fixed,0,1" if format_of(qtype).asymmetric is not None else "fixed,-1,1"


class EmulatingProvider(PtqProvider):
    """Every product in float, of operands that went through few bits and back.

    With `attention`, of Keras' MultiHeadAttention, the second einsum has a softmax on its right,
    whose range is known. With `table`, what is on the right is a float table, which is rounded as
    weights are. With `as_read`, ranges do not reach to zero where the values do not. With `fused`,
    the softmax is what Keras' fused operation does not show, and stays float.
    """

    attention = table = as_read = fused = False

    def dot_general(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
        rounded = self._rounded("dot_general", (lhs, rhs))
        return QuantizationProvider.dot_general(self, *rounded, *args, **kwargs)

    def einsum(self, einsum_str: str, *operands: Any, **kwargs: Any) -> jax.Array:
        rounded = self._rounded("einsum", operands)
        return QuantizationProvider.einsum(self, einsum_str, *rounded, **kwargs)

    def conv_general_dilated(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
        rounded = self._rounded("conv_general_dilated", (lhs, rhs))
        return QuantizationProvider.conv_general_dilated(self, *rounded, *args, **kwargs)

    def ragged_dot(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
        rounded = self._rounded("ragged_dot", (lhs, rhs))
        return QuantizationProvider.ragged_dot(self, *rounded, *args, **kwargs)

    def _rounded(self, op: str, operands: Sequence[Any]) -> list[Any]:
        rule, op_id = self._get_current_rule_and_op_id(op)

        def per_tensor(for_lhs: bool, tile_size: Any = None, **fields: Any) -> HowToQuantize:
            return HowToQuantize(**fields)

        hows = list(activation_hows(rule, operands, per_tensor))
        if self.attention and op_id == PROBABILITIES and hows[1] is not None:
            method = range_of_probabilities(hows[1].qtype)
            hows[1] = hows[1].replace(calibration_method=method)
        if self.fused and op_id == PROBABILITIES:
            hows[1] = None
        if self.table and rule is not None and hows[1] is not None:
            hows[1] = hows[1].replace(calibration_method=rule.weight_calibration_method)
        here = current.current_site()
        static = {} if here is None else dict(here.static)
        if here is not None:
            here.report("float, emulated")

        def rounded(k: int, x: Any) -> Any:
            how = hows[k]
            if how is None:
                return as_float(x)
            if self.as_read and how.calibration_method == "minmax":
                return _between(x, how.qtype, *(static.get(k) or _as_seen(x, how.qtype)))
            q = quantize_static(x, how, *static[k]) if k in static else quantize_with(x, how)
            return dequantize(q).astype(x.dtype)

        return [rounded(k, x) for k, x in enumerate(operands)]


def _as_seen(x: jax.Array, qtype: Any) -> tuple[jax.Array, jax.Array]:
    """Scale and zero point of just the range of `x`; where that is one number, of zero too."""
    lowest, highest = get_asymmetric_bound(qtype)
    low, high = jnp.min(x, keepdims=True), jnp.max(x, keepdims=True)
    one = low == high
    low, high = jnp.where(one, jnp.minimum(low, 0), low), jnp.where(one, jnp.maximum(high, 0), high)
    scale = jnp.where(low == high, 1, (high - low) / (highest - lowest)).astype(x.dtype)
    return scale, jnp.round(lowest - low / scale).astype(jnp.int32)


def _between(x: jax.Array, qtype: Any, scale: jax.Array, zero_point: jax.Array) -> jax.Array:
    """Rounded in a range that may keep away from zero, whose zero point is then no code."""
    zero = zero_point.astype(x.dtype)
    codes = jnp.clip(jnp.round(x / scale) + zero, *get_asymmetric_bound(qtype))
    return ((codes - zero) * scale).astype(x.dtype)
