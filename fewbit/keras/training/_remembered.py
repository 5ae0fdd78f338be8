"""What a layer that trains remembers of its steps, in Keras variables that are saved with it.

Ranges of activations for static scales change as those of BatchNormalization do: not trainable, in
calls with training=True. Amax histories of delayed scales are trainable variables whose gradient is
their next value (`overwrite_with_gradient`), which optimizers set as it is.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import jax
import jax.numpy as jnp
import keras
import numpy as np

from fewbit.interpreter import Runner, empty_histories_of, empty_statistics_of
from fewbit.keras.layers._variables import add_variable, drop_variables, unlocked
from fewbit.planning import is_one_number
from fewbit.training import COUNT, SUFFIX, Statistic, entry, two_uses

Run = tuple[Runner, Any]
_MSG_CALL = (
    "'{path}' is trained in a way that it was not planned for: {what}. What it remembers of its "
    "steps has the form of the inputs it was built on. Build the layer on inputs of this rank, or "
    "tell of all ways to call it before quantize_model: fewbit.keras.register_calls."
)


@dataclass(eq=False)
class Remembered:
    """The variables of one layer, by entry: '<op_id>_lhs/count', '<op_id>_lhs_amax_history'."""

    variables: dict[str, keras.Variable] = field(default_factory=dict)
    _checked: "WeakSet[Runner]" = field(default_factory=WeakSet)

    def __bool__(self) -> bool:
        return bool(self.variables)

    def add(self, layer: keras.Layer, values: Mapping[str, Any]) -> None:
        """Let a built layer hold these, unless it does already."""
        with unlocked(layer):
            for name, value in values.items():
                if name not in self.variables:
                    self.variables[name] = add_variable(
                        layer, name.replace("/", "_"), value, overwritten=name.endswith(SUFFIX)
                    )

    def drop(self, layer: keras.Layer) -> None:
        """Let the layer forget them."""
        drop_variables(layer, list(self.variables.values()))
        self.variables = {}

    def values(self) -> dict[str, Any]:
        """What is remembered, for one call of the layer.

        A layer may be called again in the same step, and then works from the same history: what
        this call leaves of it is in the variable until the step ends.
        """
        values = {name: variable.value for name, variable in self.variables.items()}
        for name, variable in self.histories.items():
            if isinstance(values[name], jax.core.Tracer):  # or there is no gradient, so no step
                values[name], rest = two_uses(values[name])
                variable.assign(rest)
        return values

    def run(self, runner: Runner, dynamic: list[Any], path: str) -> Any:
        """One call, remembered if it is one of training."""
        self._check(runner, dynamic, path)
        if len(self.histories) == len(self.variables) or not is_training():
            return runner(dynamic)
        result, found = runner.collecting(dynamic)
        for name, statistic in found.items():
            for key, value in statistic.items():
                variable = self.variables[entry(_last(name), key)]
                variable.assign(value.reshape(variable.shape))
        return result

    @property
    def histories(self) -> dict[str, keras.Variable]:
        """The amax histories alone."""
        return {name: v for name, v in self.variables.items() if name.endswith(SUFFIX)}

    @property
    def statistics(self) -> dict[str, Statistic]:
        """What was seen of each operand, by '<op_id>_lhs'."""
        found: dict[str, Statistic] = {}
        for name, variable in self.variables.items():
            operand, _, key = name.partition("/")
            if key:
                found.setdefault(operand, {})[key] = np.asarray(variable.value)
        return found

    def shapes(self) -> dict[str, Any]:
        """What a config says of them, for `empty`."""
        return {
            name: {"shape": list(v.shape), "dtype": str(v.dtype)}
            for name, v in self.variables.items()
        }

    def _check(self, runner: Runner, dynamic: list[Any], path: str) -> None:
        """Raise where a call needs others than there are, or of another form."""
        if runner in self._checked:
            return
        for name, value in beginning([(runner, dynamic)]).items():
            held = self.variables.get(name)
            if held is None and not name.endswith(SUFFIX):
                continue  # of a range that the rule itself says
            if held is None or not _serves(held.shape, value.shape):
                found = "nothing" if held is None else f"the shape {tuple(held.shape)}"
                what = f"its {name} needs the shape {value.shape}, and there is {found}"
                raise ValueError(_MSG_CALL.format(path=path, what=what))
        self._checked.add(runner)


def beginning(runs: Sequence[Run], but: Sequence[str] = ()) -> dict[str, jax.Array]:
    """What training begins with, by entry; `but` are operands whose ranges are known."""
    found: dict[str, Any] = {}
    for run in runs:
        if run[0].provider.collects:
            for name, statistic in empty_statistics_of(run).items():
                if name not in but:
                    found |= {entry(_last(name), key): v for key, v in statistic.items()}
        found |= {_last(name): value for name, value in empty_histories_of(run).items()}
    return found


def empty(shapes: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The same from a config, to be filled from a file."""
    return {
        str(name): jnp.zeros(tuple(about["shape"]), about["dtype"])
        for name, about in shapes.items()
    }


def has_seen(statistic: Statistic) -> bool:
    """Whether any step reached this operand."""
    return bool((statistic[COUNT] > 0).all())


def is_training() -> bool:
    """Whether the layer that is being called is called to be trained.

    >>> is_training()
    False
    """
    return _phase()(np.zeros((), "float32"))


class _Phase(keras.Layer):
    """Asks Keras: the argument `training` reaches layers inside of those that do not take it."""

    def call(self, inputs: Any, training: bool | None = None) -> bool:
        return bool(training)


@functools.cache
def _phase() -> keras.Layer:
    return _Phase(name="fewbit_phase", dtype="float32")


def _serves(held: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether the forms are one; a single number serves inputs of every rank."""
    return tuple(held) == tuple(wanted) or (is_one_number(held) and is_one_number(wanted))


def _last(name: str) -> str:
    """A name without its layer's path; '<path>/<op_id>_lhs'."""
    return name.rpartition("/")[2]
