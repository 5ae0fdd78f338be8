"""What a quantized layer knows about itself, beside what Keras knows about it."""

import re
from dataclasses import dataclass, field
from typing import Any

import jax
import keras

from fewbit.jaxprs import scope_name
from fewbit.keras._program import LayerProgram
from fewbit.keras._remembered import Remembered
from fewbit.keras._variables import Stored, own_variables, value_of
from fewbit.rules import QuantizationRule

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
