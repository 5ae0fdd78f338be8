"""What each of the three products of a training step does with each of its operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from fewbit._util import nearest
from fewbit.numerics import format_of, qtype_name
from fewbit.qarray import HowToQuantize, history_length
from fewbit.rules._checks import check_bool, check_calibration, check_qtype, check_tile, same_value

_MSG_METHOD_NONE = "{where}: {field} is None. Write 'absmax'."
_MSG_CALLABLE = "{where}: {field} must be a function{what} or None, got {value!r}.{fix}"
_MSG_SPARSITY = (
    "{where}: sparsity_rule is not there yet. Prune the float weights before they are quantized, "
    "and leave sparsity_rule=None."
)
_MSG_CONV_TILE = (
    "{where}: {field}={value!r}, but a convolution has one scale per image and per output feature. "
    "Leave {field} out."
)
_MSG_CONV_FORMAT = (
    "{where}: {field}={value} has a scale for every {tile} values, which a convolution has not. "
    "Use a type without tiles, such as 'int8' or 'float8_e4m3fn'."
)


_MSG_CONFIG = (
    "{op} is configured by a {kind}, got {found!r}. Write for instance "
    "{kind}(lhs_qtype='int8', rhs_qtype='int8')."
)


def check_config(op: str, kind: type, config: Any) -> None:
    """Raise for a config that is none."""
    if not isinstance(config, DotGeneralQtConfig):
        raise TypeError(_MSG_CONFIG.format(op=op, kind=kind.__name__, found=config))


@dataclasses.dataclass(frozen=True)
class GradientSettings:
    """The fields of one gradient product, without its prefix."""

    qtype: Any
    calibration_method: str
    tile_size: Any
    noise_fn: Any
    disable_channelwise_axes: bool
    residual_qtype: Any
    residual_calibration_method: str
    residual_disable_channelwise_axes: bool

    @property
    def delayed(self) -> bool:
        """Whether the range of the gradient comes from the steps before."""
        return self.qtype is not None and history_length(self.calibration_method) is not None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DotGeneralQtConfig:
    """How `dot_general_qt` and `einsum_qt` quantize, forward and in both gradients.

    A type of None leaves numbers as they are. `tile_size` is on the last contracted axis of the
    forward product, `dlhs_tile_size` and `drhs_tile_size` on that of a gradient product.
    `{dlhs,drhs}_grad_*` is about the incoming gradient, `*_residual_*` about the operand that it
    is multiplied with: the forward's codes, or the float array if those cannot serve or
    `use_original_residuals` is set. `{lhs,rhs}_collect_quant_stat` is given a calibration and
    returns the one to use. A gradient whose method is 'delayed' has its range in
    `grad_delayed_range`, made by `delayed_range(history)`. That and the noise functions are the
    children of this pytree.

    >>> config = DotGeneralQtConfig(lhs_qtype='int8', rhs_qtype='int8', dlhs_grad_qtype='int8',
    ...                             drhs_grad_qtype='int8')
    >>> config.quantizes_gradients, config.gradient(0).calibration_method
    (True, 'absmax')
    """

    lhs_qtype: Any = None
    rhs_qtype: Any = None
    tile_size: Any = None
    lhs_calibration_method: str = "absmax"
    rhs_calibration_method: str = "absmax"
    lhs_collect_quant_stat: Any = None
    rhs_collect_quant_stat: Any = None
    lhs_disable_channelwise_axes: bool = False
    rhs_disable_channelwise_axes: bool = False

    dlhs_grad_qtype: Any = None
    dlhs_grad_calibration_method: str = "absmax"
    dlhs_tile_size: Any = None
    dlhs_stochastic_rounding_noise_fn: Any = None
    dlhs_grad_disable_channelwise_axes: bool = False
    dlhs_residual_qtype: Any = None
    dlhs_residual_calibration_method: str = "absmax"
    dlhs_residual_disable_channelwise_axes: bool = False

    drhs_grad_qtype: Any = None
    drhs_grad_calibration_method: str = "absmax"
    drhs_tile_size: Any = None
    drhs_stochastic_rounding_noise_fn: Any = None
    drhs_grad_disable_channelwise_axes: bool = False
    drhs_residual_qtype: Any = None
    drhs_residual_calibration_method: str = "absmax"
    drhs_residual_disable_channelwise_axes: bool = False

    grad_delayed_range: Any = None
    disable_gradient_clipping: bool = False
    use_original_residuals: bool = False
    sparsity_rule: Any = None

    def __post_init__(self) -> None:
        for side in ("lhs", "rhs"):
            self._check_operand(side, "")
            self._check_function(f"{side}_collect_quant_stat", " from calibration to calibration")
        for side in ("dlhs", "drhs"):
            self._check_operand(side, "_grad")
            self._check_operand(side, "_residual")
            self._check_noise(f"{side}_stochastic_rounding_noise_fn")
            types = (
                getattr(self, f"{side}_grad_qtype"),
                getattr(self, f"{side}_residual_qtype"),
            )
            self._store(f"{side}_tile_size", check_tile, types)
        self._store("tile_size", check_tile, (self.lhs_qtype, self.rhs_qtype))
        self._store("disable_gradient_clipping", check_bool)
        self._store("use_original_residuals", check_bool)
        if self.sparsity_rule is not None:
            raise NotImplementedError(_MSG_SPARSITY.format(where=self._where))

    @property
    def _where(self) -> str:
        return type(self).__name__

    def _store(self, field: str, check: Any, *args: Any) -> None:
        object.__setattr__(self, field, check(self._where, field, getattr(self, field), *args))

    def _check_operand(self, side: str, what: str) -> None:
        self._store(f"{side}{what}_qtype", check_qtype)
        field = f"{side}{what}_calibration_method"
        if getattr(self, field) is None:
            raise TypeError(_MSG_METHOD_NONE.format(where=self._where, field=field))
        remembers = what == "_grad" and self.grad_delayed_range is not None
        qtype = getattr(self, f"{side}{what}_qtype")
        self._store(field, check_calibration, qtype, False, remembers)
        self._store(f"{side}{what}_disable_channelwise_axes", check_bool)

    def _check_function(self, field: str, what: str, fix: str = "") -> None:
        value = getattr(self, field)
        if value is not None and not callable(value):
            raise TypeError(
                _MSG_CALLABLE.format(
                    where=self._where, field=field, what=what, value=value, fix=fix
                )
            )

    def _check_noise(self, field: str) -> None:
        value = getattr(self, field)
        name = value if isinstance(value, str) else "uniform"
        self._check_function(
            field,
            " from shape to noise",
            f" Make one with fewbit.training.get_noise_fn({name!r}, key).",
        )

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        names = (field.name for field in dataclasses.fields(self))
        return all(same_value(getattr(self, name), getattr(other, name)) for name in names)

    def __hash__(self) -> int:
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return hash((type(self), *values))

    @property
    def quantizes_gradients(self) -> bool:
        """Whether any of the two gradient products has a quantized gradient."""
        return self.dlhs_grad_qtype is not None or self.drhs_grad_qtype is not None

    def operand(self, side: int) -> dict[str, Any]:
        """What the forward product does with lhs (0) or rhs (1), in the words of granularity."""
        name = ("lhs", "rhs")[side]
        return dict(
            qtype=getattr(self, f"{name}_qtype"),
            calibration_method=getattr(self, f"{name}_calibration_method"),
            tile_size=self.tile_size,
            disable_channelwise_axes=getattr(self, f"{name}_disable_channelwise_axes"),
        )

    def collect(self, side: int) -> Any:
        """The hook that is shown the calibration of lhs (0) or rhs (1), or None."""
        return getattr(self, ("lhs", "rhs")[side] + "_collect_quant_stat")

    def gradient(self, side: int) -> GradientSettings:
        """What the gradient of lhs (0) or rhs (1) is made of."""
        name = ("dlhs", "drhs")[side]
        return GradientSettings(
            qtype=getattr(self, f"{name}_grad_qtype"),
            calibration_method=getattr(self, f"{name}_grad_calibration_method"),
            tile_size=getattr(self, f"{name}_tile_size"),
            noise_fn=getattr(self, f"{name}_stochastic_rounding_noise_fn"),
            disable_channelwise_axes=getattr(self, f"{name}_grad_disable_channelwise_axes"),
            residual_qtype=getattr(self, f"{name}_residual_qtype"),
            residual_calibration_method=getattr(self, f"{name}_residual_calibration_method"),
            residual_disable_channelwise_axes=getattr(
                self, f"{name}_residual_disable_channelwise_axes"
            ),
        )

    def replace(self, **changes: Any) -> Any:
        """A copy with some fields changed, checked again.

        >>> DotGeneralQtConfig(lhs_qtype='int8').replace(lhs_qtype=None).lhs_qtype is None
        True
        """
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ConvGeneralQtConfig(DotGeneralQtConfig):
    """How `conv_general_qt` quantizes: the fields of `DotGeneralQtConfig`, without tiles.

    >>> ConvGeneralQtConfig(lhs_qtype='int8', rhs_qtype='int8').lhs_qtype
    dtype('int8')
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name.endswith("_qtype"):
                form = format_of(check_qtype(self._where, field.name, value))
                if form.tile is not None:
                    raise ValueError(
                        _MSG_CONV_FORMAT.format(
                            where=self._where,
                            field=field.name,
                            value=qtype_name(value),
                            tile=form.tile,
                        )
                    )
            elif field.name.endswith("tile_size"):
                raise ValueError(
                    _MSG_CONV_TILE.format(where=self._where, field=field.name, value=value)
                )
        super().__post_init__()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RaggedDotQtConfig(DotGeneralQtConfig):
    """How `ragged_dot_qt` quantizes: the fields of `DotGeneralQtConfig`.

    >>> RaggedDotQtConfig(lhs_qtype='float8_e4m3fn', rhs_qtype='float8_e4m3fn').tile_size
    """


_CHILDREN = (
    "dlhs_stochastic_rounding_noise_fn",
    "drhs_stochastic_rounding_noise_fn",
    "grad_delayed_range",
)


def _register(cls: type) -> None:
    names = [field.name for field in dataclasses.fields(cls)]
    static = tuple(name for name in names if name not in _CHILDREN)

    def flatten(config: Any) -> tuple[Any, Any]:
        children = tuple(getattr(config, name) for name in _CHILDREN)
        return children, _Static(tuple(getattr(config, name) for name in static))

    def unflatten(aux: _Static, children: Any) -> Any:
        # Not through __init__: JAX puts placeholders where the children were.
        config: Any = object.__new__(cls)
        for name, value in zip((*static, *_CHILDREN), (*aux.values, *children), strict=True):
            object.__setattr__(config, name, value)
        return config

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)


class _Static:
    """Field values that compare with 1 and 1.0 apart, as tile sizes must."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def _key(self) -> tuple[Any, ...]:
        return tuple((type(v).__name__, v) for v in self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


for _cls in (DotGeneralQtConfig, ConvGeneralQtConfig, RaggedDotQtConfig):
    _register(_cls)


def gradient_how(
    settings: GradientSettings, noise_fn: Any, how_for: Any, residual: bool = False
) -> HowToQuantize:
    """How a gradient product quantizes the incoming gradient, or its residual.

    `how_for` is a granularity function that knows the product's axes.
    """
    if residual:
        return how_for(
            qtype=settings.residual_qtype,
            calibration_method=settings.residual_calibration_method,
            tile_size=settings.tile_size,
            disable_channelwise_axes=settings.residual_disable_channelwise_axes,
        )
    return how_for(
        qtype=settings.qtype,
        calibration_method=settings.calibration_method,
        tile_size=settings.tile_size,
        disable_channelwise_axes=settings.disable_channelwise_axes,
        noise_fn=noise_fn,
    )


# --- What a rule may say of one operand of one training product: `additional_qt_config`, checked --

_PARTS = ("lhs", "rhs", "dlhs_grad", "drhs_grad", "dlhs_residual", "drhs_residual")
_TYPES = tuple(f"{part}_qtype" for part in _PARTS)
_METHODS = tuple(f"{part}_calibration_method" for part in _PARTS)
_TILES = ("tile_size", "dlhs_tile_size", "drhs_tile_size")
_TRUTHS = (
    *(f"{part}_disable_channelwise_axes" for part in _PARTS),
    "disable_gradient_clipping",
    "use_original_residuals",
)
_FUNCTIONS = (
    *(f"{side}_collect_quant_stat" for side in ("lhs", "rhs")),
    *(f"{side}_stochastic_rounding_noise_fn" for side in ("dlhs", "drhs")),
)
_NOT_HERE = ("grad_delayed_range", "sparsity_rule")
QT_FIELDS = (*_TYPES, *_METHODS, *_TILES, *_TRUTHS, *_FUNCTIONS, *_NOT_HERE)

_MSG_MAPPING = "{where}: {field} must be a mapping from field name to value, got {value!r}."
_MSG_UNKNOWN = (
    "{where}: {field} has {name!r}, which is no field of fewbit.DotGeneralQtConfig.{near}"
)
_MSG_FUNCTION = "{where}: {field}[{name!r}] must be a function or None, got {value!r}.{fix}"
_FIX_NOISE = " For all steps write bwd_stochastic_rounding='uniform' in the rule instead."
_MSG_COLLECT = (
    "{where}: {field}[{name!r}] would see one operand of one product, and what serves afterwards "
    "would not. Write act_static_scale=True in the rule to collect ranges while training, or give "
    "the function to fewbit.DotGeneralQtConfig where fewbit.dot_general_qt is called."
)
_MSG_DELAYED = (
    "{where}: {field}[{name!r}]={value!r} takes the range from the steps before, which is kept by "
    "rule. Write {instead}={value!r} in the rule instead."
)
_INSTEAD = {
    "lhs": "act_calibration_method (of a weight: weight_calibration_method)",
    "rhs": "weight_calibration_method (of an activation: act_calibration_method)",
}
_MSG_RANGE = (
    "{where}: {field}['grad_delayed_range'] is made at each step from a history. Write "
    "bwd_calibration_method='delayed' in the rule instead."
)
_MSG_SPARSITY_RULE = (
    "{where}: {field}['sparsity_rule'] is not there yet. Prune the float weights before they are "
    "quantized, and leave it out."
)


def check_qt_config(where: str, field: str, value: Any) -> dict[str, Any] | None:
    """The fields with their values in standard form.

    >>> check_qt_config('rule', 'additional_qt_config', {'dlhs_grad_qtype': 'int8'})
    {'dlhs_grad_qtype': dtype('int8')}
    """
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(_MSG_MAPPING.format(where=where, field=field, value=value))
    return {name: _checked(where, field, name, item) for name, item in value.items()}


def _checked(where: str, field: str, name: str, item: Any) -> Any:
    place = f"{field}[{name!r}]"
    if name not in QT_FIELDS:
        near = nearest(name, QT_FIELDS)
        raise ValueError(_MSG_UNKNOWN.format(where=where, field=field, name=name, near=near))
    if name in _TYPES:
        return check_qtype(where, place, item)
    if name in _METHODS:
        if isinstance(item, str) and item.split(",")[0].strip() == "delayed":
            part = name.removesuffix("_calibration_method")
            instead = _INSTEAD.get(part, "bwd_calibration_method")
            text = dict(where=where, field=field, name=name, value=item, instead=instead)
            raise ValueError(_MSG_DELAYED.format(**text))
        return None if item is None else check_calibration(where, place, item, None)
    if name in _TILES:
        return check_tile(where, place, item, ())
    if name in _TRUTHS:
        return check_bool(where, place, item)
    if name in _FUNCTIONS:
        if item is not None and not callable(item):
            fix = _FIX_NOISE if name.endswith("noise_fn") else ""
            text = dict(where=where, field=field, name=name, value=item, fix=fix)
            raise TypeError(_MSG_FUNCTION.format(**text))
        if item is not None and name.endswith("collect_quant_stat"):
            raise ValueError(_MSG_COLLECT.format(where=where, field=field, name=name))
        return item
    if item is not None:
        if name == "sparsity_rule":
            raise NotImplementedError(_MSG_SPARSITY_RULE.format(where=where, field=field))
        raise ValueError(_MSG_RANGE.format(where=where, field=field))
    return item
