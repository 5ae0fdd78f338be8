"""A layer's float `call` as a pure function of its variables, traced once per way of calling it.

The quantized layer runs that trace through the interpreter, so every layer whose products JAX can
see is quantized by the same code, subclasses and layers of other libraries included.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import keras

from fewbit.calls import Cache, Call, split_call
from fewbit.engine import Runner
from fewbit.jaxprs import scope_name
from fewbit.keras._attention import attention_way, sublayer_scopes
from fewbit.keras._autocast import as_called, held_values
from fewbit.keras._emulation import EmulatingProvider
from fewbit.keras._lora import adapters, with_adapter
from fewbit.keras._losses import losses_of_call
from fewbit.keras._masks import masks_of, set_masks
from fewbit.keras._model_calls import Calls
from fewbit.modes.ptq import PtqProvider
from fewbit.modes.qt import QtProvider
from fewbit.rules import QuantizationRule
from fewbit.static_scales import NOISE, ScaleName

INSIDE = "inside "  # what the paths of variables begin with that are not the layer's own
_VARIABLES, _STORED, _SCALES, _NOISE = 0, 1, 4, 6


class LayerProgram:
    """How one layer is called: `float_call` with a rule deciding what happens at its Sites.

    `fused` says which way attention takes; None leaves it to the layer.
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
    ):
        self.layer, self.float_call, self.path, self.fused = layer, float_call, path, fused
        self.provider: Any
        if trains:
            self.provider = QtProvider([rule], emulate=emulate)
        else:
            self.provider = (EmulatingProvider if emulate else PtqProvider)([rule])
        if isinstance(self.provider, EmulatingProvider):
            keras_own = isinstance(layer, keras.layers.MultiHeadAttention)
            self.provider.attention = keras_own and not fused
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

        values = list(map(_abstract, others)) if abstract else held_values(others)
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

    def _names(self, own: Mapping[str, keras.Variable]) -> dict[int, str]:
        """Paths of all variables. Those of sublayers and adapters have their own, so that a rule
        for this layer does not meet their products."""
        names = {id(v): f"{self.path}/{name}" for name, v in own.items()}
        names = {id(v): f"{INSIDE}{v.path}" for v in self.layer.variables} | names
        return names | {id(v): f"{INSIDE}{v.path}" for v in adapters(self.layer)}

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
                    sublayer_scopes(self.layer),
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


def _abstract(variable: keras.Variable) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(variable.shape), variable.dtype)
