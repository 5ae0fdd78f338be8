"""Names of `fewbit` whose home is loaded when they are first used.

Importing fewbit brings formats, arrays, ops and rules. What traces, plans and runs models comes
with the first of these names, and a framework with the first model of its kind.
"""

import importlib
import importlib.util
from typing import Any

# {name: (module, attribute, or None for the module itself)}
LAZY = {
    "Plan": ("fewbit._plan", "Plan"),
    "Site": ("fewbit._plan", "Site"),
    "PlanError": ("fewbit._plan_messages", "PlanError"),
    "merge_trainable": ("fewbit._trainable", "merge_trainable"),
    "split_trainable": ("fewbit._trainable", "split_trainable"),
    "trainable": ("fewbit._trainable", "trainable"),
    "get_current_rule": ("fewbit.current", "get_current_rule"),
    "UntraceableModelError": ("fewbit.engine", "UntraceableModelError"),
    "plan": ("fewbit.models", "plan"),
    "quantize_model": ("fewbit.models", "quantize_model"),
    "QuantizationProvider": ("fewbit.modes.provider", "QuantizationProvider"),
    "BoxedParamProvider": ("fewbit.modes.ptq", "BoxedParamProvider"),
    "PtqProvider": ("fewbit.modes.ptq", "PtqProvider"),
    "quantize_params": ("fewbit.params", "quantize_params"),
    "Report": ("fewbit.reporting", "Report"),
    "report": ("fewbit.reporting", "report"),
    "rules_from_json": ("fewbit.rules_io", "rules_from_json"),
    "rules_from_yaml": ("fewbit.rules_io", "rules_from_yaml"),
    "rules_to_json": ("fewbit.rules_io", "rules_to_json"),
    "rules_to_yaml": ("fewbit.rules_io", "rules_to_yaml"),
    "QuantizedParams": ("fewbit.static_scales", "QuantizedParams"),
    "float_params": ("fewbit.models.nnx", "float_params"),
    "QtProvider": ("fewbit.modes.qt", "QtProvider"),
    "LoraProvider": ("fewbit.modes.lora", "LoraProvider"),
    "apply_lora_to_model": ("fewbit.models.adapted", "apply_lora_to_model"),
    "to_ptq": ("fewbit.models.converting", "to_ptq"),
    "add_learned_scales": ("fewbit.models.learning", "add_learned_scales"),
    "AmaxHistory": ("fewbit.models.nnx_calls", "AmaxHistory"),
    "QuantStat": ("fewbit.models.nnx_calls", "QuantStat"),
    "debug": ("fewbit.debug", None),
    "training": ("fewbit.training", None),
    "dot_general_qt": ("fewbit.training", "dot_general_qt"),
    "einsum_qt": ("fewbit.training", "einsum_qt"),
    "conv_general_qt": ("fewbit.training", "conv_general_qt"),
    "ragged_dot_qt": ("fewbit.training", "ragged_dot_qt"),
    "DotGeneralQtConfig": ("fewbit.training", "DotGeneralQtConfig"),
    "ConvGeneralQtConfig": ("fewbit.training", "ConvGeneralQtConfig"),
    "RaggedDotQtConfig": ("fewbit.training", "RaggedDotQtConfig"),
    "QtDotGeneral": ("fewbit.models.linen_drop_in", "QtDotGeneral"),
    "QtEinsum": ("fewbit.models.linen_drop_in", "QtEinsum"),
    "NnxQtDotGeneral": ("fewbit.models.nnx_drop_in", "NnxQtDotGeneral"),
    "NnxQtEinsum": ("fewbit.models.nnx_drop_in", "NnxQtEinsum"),
    "keras": ("fewbit.keras", None),
    "observers": ("fewbit.observers", None),
    "Batch": ("fewbit.calibrating", "Batch"),
    "calibrate": ("fewbit.calibrating", "calibrate"),
    "CheckpointError": ("fewbit.io.errors", "CheckpointError"),
    "inspect": ("fewbit.io.inspecting", "inspect"),
    "verify": ("fewbit.io.inspecting", "verify"),
    "lora": ("fewbit.lora", None),
    "load_adapters": ("fewbit.lora.peft_reading", "load_adapters"),
    "merge_lora": ("fewbit.lora.merging", "merge_lora"),
    "save_adapters": ("fewbit.lora.peft_writing", "save_adapters"),
    "load": ("fewbit.io.loading", "load"),
    "save": ("fewbit.io.saving", "save"),
    "Statistics": ("fewbit.observed", "Statistics"),
    "Observer": ("fewbit.observers", "Observer"),
    "register_observer": ("fewbit.observers", "register_observer"),
    "pallas": ("fewbit.pallas", None),
    "contrib": ("fewbit.contrib", None),
    "process_prequantized_params": ("fewbit.io.prequantized", "process_prequantized_params"),
    "restore_quantization_rules": ("fewbit.io.restored_rules", "restore_quantization_rules"),
    "quantize_checkpoint": ("fewbit.io.quantize_checkpoint", "quantize_checkpoint"),
    "read_checkpoint": ("fewbit.io.read_checkpoint", "read_checkpoint"),
}


def load(name: str) -> Any:
    """What a name of `LAZY`, or of a public module of the package, stands for; else KeyError.

    >>> load('rules_to_json').__module__, load('params').__name__
    ('fewbit.rules_io', 'fewbit.params')
    """
    if name in LAZY:
        home, attribute = LAZY[name]
        module = importlib.import_module(home)
        return module if attribute is None else getattr(module, attribute)
    if not name.startswith("_") and importlib.util.find_spec(f"fewbit.{name}"):
        return importlib.import_module(f"fewbit.{name}")
    raise KeyError(name)
