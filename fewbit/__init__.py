"""fewbit: JAX models with fewer bits, and the truth about it.

Trace a model, read the plan, quantize its parameters, run it:

>>> import fewbit, jax.numpy as jnp
>>> rules = [fewbit.QuantizationRule(module_path='.*', weight_qtype='int8', act_qtype='int8')]
>>> def f(params, x):
...     return jnp.tanh(x @ params['up']) @ params['down']
>>> params = {'up': jnp.eye(4), 'down': jnp.eye(4)}
>>> plan = fewbit.plan(f, rules, params, jnp.ones((1, 4)))
>>> qparams = fewbit.quantize_params(params, plan)
>>> fewbit.quantize_model(f, fewbit.PtqProvider(rules))(qparams, jnp.ones((1, 4))).shape
(1, 4)

Imports go downwards only: formats and arrays, ops, rules, trace/plan/interpret, modes, models. No
framework is imported until a model of its kind is seen.
"""

import typing as _typing

from fewbit import kernels as kernels
from fewbit._version import __version__ as __version__
from fewbit.layouts import pack as pack
from fewbit.layouts import unpack as unpack
from fewbit.ops import conv_general_dilated as conv_general_dilated
from fewbit.ops import dot as dot
from fewbit.ops import dot_general as dot_general
from fewbit.ops import einsum as einsum
from fewbit.ops import ragged_dot as ragged_dot
from fewbit.ops import ragged_dot_general as ragged_dot_general
from fewbit.ops import take as take
from fewbit.qarray import HowToQuantize as HowToQuantize
from fewbit.qarray import QArray as QArray
from fewbit.qarray import WithAux as WithAux
from fewbit.qarray import dequantize as dequantize
from fewbit.qarray import quantize as quantize
from fewbit.rules import LoraRule as LoraRule
from fewbit.rules import QtRule as QtRule
from fewbit.rules import QuantizationRule as QuantizationRule

if _typing.TYPE_CHECKING:  # loaded when first used (fewbit._lazy): importing fewbit stays quick
    from fewbit._plan import Plan as Plan
    from fewbit._plan import Site as Site
    from fewbit._plan_messages import PlanError as PlanError
    from fewbit._trainable import merge_trainable as merge_trainable
    from fewbit._trainable import split_trainable as split_trainable
    from fewbit._trainable import trainable as trainable
    from fewbit.calibrating import Batch as Batch
    from fewbit.calibrating import calibrate as calibrate
    from fewbit.current import get_current_rule as get_current_rule
    from fewbit.engine import UntraceableModelError as UntraceableModelError
    from fewbit.io.errors import CheckpointError as CheckpointError
    from fewbit.io.inspecting import inspect as inspect
    from fewbit.io.inspecting import verify as verify
    from fewbit.io.loading import load as load
    from fewbit.io.prequantized import process_prequantized_params as process_prequantized_params
    from fewbit.io.quantize_checkpoint import quantize_checkpoint as quantize_checkpoint
    from fewbit.io.read_checkpoint import read_checkpoint as read_checkpoint
    from fewbit.io.restored_rules import restore_quantization_rules as restore_quantization_rules
    from fewbit.io.saving import save as save
    from fewbit.lora.merging import merge_lora as merge_lora
    from fewbit.lora.peft_reading import load_adapters as load_adapters
    from fewbit.lora.peft_writing import save_adapters as save_adapters
    from fewbit.models import plan as plan
    from fewbit.models import quantize_model as quantize_model
    from fewbit.models.adapted import apply_lora_to_model as apply_lora_to_model
    from fewbit.models.converting import to_ptq as to_ptq
    from fewbit.models.learning import add_learned_scales as add_learned_scales
    from fewbit.models.linen_drop_in import QtDotGeneral as QtDotGeneral
    from fewbit.models.linen_drop_in import QtEinsum as QtEinsum
    from fewbit.models.nnx_drop_in import NnxQtDotGeneral as NnxQtDotGeneral
    from fewbit.models.nnx_drop_in import NnxQtEinsum as NnxQtEinsum
    from fewbit.modes.lora import LoraProvider as LoraProvider
    from fewbit.modes.provider import QuantizationProvider as QuantizationProvider
    from fewbit.modes.ptq import BoxedParamProvider as BoxedParamProvider
    from fewbit.modes.ptq import PtqProvider as PtqProvider
    from fewbit.modes.qt import QtProvider as QtProvider
    from fewbit.observed import Statistics as Statistics
    from fewbit.observers import Observer as Observer
    from fewbit.observers import register_observer as register_observer
    from fewbit.params import quantize_params as quantize_params
    from fewbit.reporting import Report as Report
    from fewbit.reporting import report as report
    from fewbit.rules_io import rules_from_json as rules_from_json
    from fewbit.rules_io import rules_from_yaml as rules_from_yaml
    from fewbit.rules_io import rules_to_json as rules_to_json
    from fewbit.rules_io import rules_to_yaml as rules_to_yaml
    from fewbit.static_scales import QuantizedParams as QuantizedParams
    from fewbit.training.configs import ConvGeneralQtConfig as ConvGeneralQtConfig
    from fewbit.training.configs import DotGeneralQtConfig as DotGeneralQtConfig
    from fewbit.training.configs import RaggedDotQtConfig as RaggedDotQtConfig
    from fewbit.training.conv_products import conv_general_qt as conv_general_qt
    from fewbit.training.dot_products import dot_general_qt as dot_general_qt
    from fewbit.training.einsum_products import einsum_qt as einsum_qt
    from fewbit.training.ragged_products import ragged_dot_qt as ragged_dot_qt


def __dir__() -> list[str]:
    from fewbit._lazy import LAZY

    return sorted({*globals(), *LAZY})


def __getattr__(name: str) -> object:
    """Names that are loaded when first used, that come later, or that are misspelt."""
    if name.startswith("__"):  # Python's own questions are not about us
        raise AttributeError(name)
    from fewbit._lazy import load

    try:
        value = load(name)
    except KeyError:
        from fewbit._later import resolve

        return resolve(name)
    globals()[name] = value
    return value
