"""Which layer gets which config, as a value: rules and configs meet the layers of a model.

What is decided here is final: whoever quantizes, plans or saves a model asks for its choices once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fewbit._util import compile_pattern, describe
from fewbit.keras.config._configs import JaxBaseConfig, LeafConfig
from fewbit.keras.config._fields import (
    Entry,
    LayerInfo,
    class_names,
    effective_weight_method,
    entry_name,
    first_entry,
    is_class_entry,
    nearest_places,
    symmetric_act_method,
)
from fewbit.planning import Complaint, PlanError, complaints
from fewbit.rules import QuantizationRule

_LOG = logging.getLogger("fewbit")

# Attention whose products the reference rounds without a zero point.
_SYMMETRIC = frozenset(("CachedGemma3Attention", "Gemma3VisionAttention"))
_MSG_NO_CONFIG = (
    "A StaticQuantConfig, a DynamicQuantConfig, a sum of them or a list of QuantizationRules is "
    "needed, got {value}. {fix}"
)
_MSG_ENTRY = "{where}: {field} entry {entry!r} matches no layer.{near} Correct or drop it."
_MSG_WHITE_LIST = "{where}: white_list={entries} matches no layer.{near} Correct it."
_MSG_NOTHING = (
    "{where}: white_list=None selects no layer, and set_local names none. Write white_list='*' for "
    "every layer, or name some with set_local."
)
_MSG_RULE = "{rule!r} matches no layer.{near} Correct or drop it."
_MSG_LATE_RULE = (
    "{rule!r} decides no layer: an earlier rule matches first wherever it would, rule {first}; the "
    "more particular rule comes first. Correct or drop it."
)
_MSG_TWO_LAYERS = (
    "Two layers have the path {path!r}, and get different choices ({one} and {other}). Build the "
    "model first, or give its layers names of their own."
)


@dataclass(frozen=True)
class Choice:
    """What happens to one layer.

    `rule` is None for a layer that is left alone, and `reason` says why. `config` is the single
    config that decided (None for rules), `kind` is 'static', 'dynamic' or 'weight_only',
    `granularity` 'per_tensor', 'per_channel' or 'per_group', `packed` whether weights are stored
    as this machine's kernels read them, `as_read` whether it is of a file of Neural Compressor.
    """

    config: LeafConfig | None = None
    rule: QuantizationRule | None = None
    kind: str | None = None
    granularity: str | None = None
    emulate: bool = False
    fused: bool | None = None  # the way of attention; None: the layer decides
    packed: bool = True
    as_read: bool = False
    reason: str = ""

    @property
    def quantized(self) -> bool:
        """Whether the layer is quantized at all."""
        return self.rule is not None

    @property
    def settings(self) -> dict[str, Any]:
        """What a layer, and its file, keep of it beside the rule and the kind."""
        ways = {"granularity": self.granularity, "emulate": self.emulate, "fused": self.fused}
        return ways | ({"as_read": True} if self.as_read else {})


def choose(
    config_or_rules: JaxBaseConfig | Sequence[QuantizationRule],
    layers: Sequence[LayerInfo],
    strict: bool | None = None,
) -> dict[str, Choice]:
    """The choice for each layer, by path; `layers` are (path, class) pairs.

    A filter entry or a rule that matches nothing is an error, or with `strict=False` (which is the
    config's own field where it is not given here) a part of one warning.

    >>> from fewbit.keras import StaticQuantConfig
    >>> config = StaticQuantConfig('int8', exclude_list=['head'])
    >>> choices = choose(config, [('net/up', 'Dense'), ('net/head', 'Dense')])
    >>> choices['net/up'].kind, choices['net/head'].reason
    ('static', "excluded by the exclude_list entry 'head'")
    """
    if isinstance(config_or_rules, JaxBaseConfig):
        return _by_config(config_or_rules, layers, strict)
    rules = _checked_rules(config_or_rules)
    with complaints(strict is not False) as complain:
        return _by_rules(rules, layers, complain)


def rule_for_config(config: LeafConfig, path: str) -> QuantizationRule:
    """A config as the rule for one layer and what is inside it.

    >>> from fewbit.keras import DynamicQuantConfig
    >>> rule_for_config(DynamicQuantConfig('int4', group_size=32), 'net/up')
    QuantizationRule(module_path='net/up(/.*)?', weight_qtype='int4', tile_size=32)
    """
    acts = config.activation_dtype is not None
    return QuantizationRule(
        module_path=_within(path),
        weight_qtype=config.weight_dtype,
        act_qtype=config.activation_dtype,
        tile_size=config.group_size,
        act_static_scale=config.static if acts else None,
        weight_calibration_method=effective_weight_method(
            config.weight_calibration_method, config.weight_dtype, config.emulate
        ),
        act_calibration_method=config.effective_act_method,
        act_static_reduction=config.act_static_reduction,
        scale_dtype=config.scale_dtype,
    )


def _within(path: str) -> str:
    return re.escape(path) + "(/.*)?"


# --- configs --------------------------------------------------------------------------------------


def _by_config(
    config: JaxBaseConfig, layers: Sequence[LayerInfo], strict: bool | None
) -> dict[str, Choice]:
    parts = config.parts
    for part in parts:
        part.check()
    judge_all = all(part.strict for part in parts) if strict is None else strict
    with complaints(judge_all) as complain:
        for number, part in enumerate(parts, 1):
            place = f" ({number} of {len(parts)})" if parts[1:] else ""
            _judge(type(part).__name__ + place, part, layers, complain)
    return _by_path((path, _choice(parts, path, layer_class)) for path, layer_class in layers)


def _choice(parts: Sequence[LeafConfig], path: str, layer_class: type | str) -> Choice:
    found: LeafConfig | None = None
    reasons = []
    for part in parts:
        config = part.config_for(path, layer_class)
        if config is None:
            reasons.append(_why_not(part, path, layer_class))
            continue
        if found is not None:
            _LOG.debug("quant config override: %s: %r gives way to %r", path, found, config)
        found = config
    if found is None:
        return Choice(reason="; ".join(dict.fromkeys(reasons)))
    names = class_names(layer_class)
    if "RotaryEmbedding" in names and not found.quantize_rotary:
        return Choice(reason="rotary tables stay float (quantize_rotary=True quantizes them)")
    if "Embedding" in names and not found.quantize_embeddings:
        return Choice(reason="quantize_embeddings=False leaves look-up tables float")
    rule = rule_for_config(found, path)
    if found.emulate and found.act_calibration_method is None and not _SYMMETRIC.isdisjoint(names):
        rule = rule.replace(act_calibration_method=symmetric_act_method(rule.act_qtype))
    granularity = found.weight_scale_granularity if rule.tile_size is None else "per_group"
    fused = found.dot_product_attention_enable
    return Choice(found, rule, _kind(rule), granularity, found.emulate, fused)


def _kind(rule: QuantizationRule) -> str:
    if rule.act_qtype is None:
        return "weight_only"
    return "static" if rule.act_static_scale else "dynamic"


def _why_not(part: LeafConfig, path: str, layer_class: type | str) -> str:
    entry = first_entry(part.exclude_list or (), path, layer_class)
    if entry is not None:
        return f"excluded by the exclude_list entry {entry_name(entry)!r}"
    return "white_list is None" if part.white_list is None else "not in white_list"


def _judge(where: str, part: LeafConfig, layers: Sequence[LayerInfo], complain: Complaint) -> None:
    """Complain about entries that reach nothing; an absent class is no mistake by itself."""

    def reaches(entry: Entry) -> bool:
        return any(first_entry([entry], path, cls) is not None for path, cls in layers)

    if part.white_list is None and not part.local_config:
        complain(_MSG_NOTHING.format(where=where))
    white = part.white_list if isinstance(part.white_list, list) else []
    if white and not any(map(reaches, white)):
        shown = [entry_name(entry) for entry in white]
        near = nearest_places(white[0], layers)
        complain(_MSG_WHITE_LIST.format(where=where, entries=shown, near=near))
        white = []
    local = [entry for entry, _ in part.local_entries()]
    filters = {"white_list": white, "exclude_list": part.exclude_list or [], "set_local": local}
    for field, entries in filters.items():
        for entry in entries:
            if not is_class_entry(entry) and not reaches(entry):
                text = dict(
                    field=field, entry=entry_name(entry), near=nearest_places(entry, layers)
                )
                complain(_MSG_ENTRY.format(where=where, **text))


# --- rules ----------------------------------------------------------------------------------------


def _checked_rules(rules: Any) -> list[QuantizationRule]:
    fix = "Write StaticQuantConfig() or DynamicQuantConfig()."
    if isinstance(rules, Mapping):
        fix = "Read a dict with JaxBaseConfig.from_dict(...)."
    elif isinstance(rules, str):
        fix = "Read a file with JaxBaseConfig.from_json_file(...), JSON text with from_json_string."
    elif isinstance(rules, QuantizationRule):
        fix = "Write a list: [rule]."
    elif isinstance(rules, type) and issubclass(rules, JaxBaseConfig):
        fix = f"Write {rules.__name__}()."
    elif isinstance(rules, list | tuple) and rules:
        wrong = [rule for rule in rules if not isinstance(rule, QuantizationRule)]
        if not wrong:
            return list(rules)
        configs = all(isinstance(item, JaxBaseConfig) for item in wrong)
        fix = "Add configs: config + config." if configs else f"The list has {describe(wrong[0])}."
    raise TypeError(_MSG_NO_CONFIG.format(value=describe(rules), fix=fix))


def _by_rules(
    rules: Sequence[QuantizationRule], layers: Sequence[LayerInfo], complain: Complaint
) -> dict[str, Choice]:
    first = [
        next((n for n, rule in enumerate(rules) if _rule_matches(rule, *layer)), None)
        for layer in layers
    ]
    choices = _by_path(
        (path, _choice_of_rule(number, rules, path))
        for number, (path, _) in zip(first, layers, strict=True)
    )
    for number, rule in enumerate(rules):
        if number not in first:
            complain(_unused_message(rules, number, rule, layers))
    return choices


def _choice_of_rule(number: int | None, rules: Sequence[QuantizationRule], path: str) -> Choice:
    if number is None:
        return Choice(reason="no rule matches")
    rule = rules[number]
    if rule.switched_off:
        unused = "" if rule.act_qtype is None else ": without weight_qtype its act_qtype is unused"
        return Choice(reason=f"rule {number} switches it off{unused}")
    granularity = "per_channel" if rule.tile_size is None else "per_group"
    return Choice(None, rule.replace(module_path=_within(path)), _kind(rule), granularity)


def _rule_matches(rule: QuantizationRule, path: str, layer_class: type | str) -> bool:
    return any(rule.matches(path, op) for op in layer_ops(layer_class))


def layer_ops(layer_class: type | str) -> tuple[str, ...]:
    """The ops that a layer's own call can hold, by which rules with `op_names` find it.

    >>> layer_ops('Conv2D'), layer_ops('ReversibleEmbedding')
    (('conv_general_dilated',), ('take', 'dot_general', 'einsum'))
    """
    names = class_names(layer_class)
    if any("Conv" in name for name in names):
        return ("conv_general_dilated",)
    if "ReversibleEmbedding" in names:
        return ("take", "dot_general", "einsum")
    return ("take",) if "Embedding" in names else ("dot_general", "einsum")


def _unused_message(
    rules: Sequence[QuantizationRule], number: int, rule: QuantizationRule, layers: Any
) -> str:
    reached = [(path, cls) for path, cls in layers if _rule_matches(rule, path, cls)]
    for first, earlier in enumerate(rules[:number]):
        if any(_rule_matches(earlier, *layer) for layer in reached):
            return _MSG_LATE_RULE.format(rule=rule, first=first)
    near = nearest_places(rule.module_path, layers, with_classes=False)
    module_path = compile_pattern(rule.module_path)
    if rule.op_names and any(module_path.matches(path) for path, _ in layers):
        near = f" The layers at that path have none of the ops {', '.join(rule.op_names)}."
    return _MSG_RULE.format(rule=rule, near=near)


def _by_path(found: Iterable[tuple[str, Choice]]) -> dict[str, Choice]:
    """Paths are names only as long as two layers of one path need not be told apart."""
    choices: dict[str, Choice] = {}
    for path, choice in found:
        before = choices.setdefault(path, choice)
        if before.rule != choice.rule or before.granularity != choice.granularity:
            one, other = (c.reason or repr(c.rule) for c in (before, choice))
            raise PlanError(_MSG_TWO_LAYERS.format(path=path, one=one, other=other))
    return choices
