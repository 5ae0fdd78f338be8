"""What each command of the command line does; returns its exit code."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import fewbit
from fewbit import _text, _versions, debug, kernels
from fewbit._cli_model import Misuse, load_model, load_names, load_rules
from fewbit._doctor import fp8_here, keras_backend, settings
from fewbit.io.quantize_checkpoint import check_source, quantize_checkpoint
from fewbit.models import front_end
from fewbit.static_statistics import is_fixed

_LIBRARIES = ("python", "jax", "jaxlib", "numpy", "flax", "keras", "keras-hub")
_MSG_NO_PLAN = (
    "{path} was saved without a plan, and a report is about one. Save it with its plan: "
    "fewbit.save(path, params, plan)."
)
_MSG_ABSTRACT = (
    "--model {text} returned abstract values, so nothing can be measured. Return the float "
    "parameters and a batch, or leave --model out for a report of the plan alone."
)


_MSG_NO_STATS = (
    "the rules ask for static ranges (act_static_scale) of {count} operands: {names}. Give "
    "--stats FILE; fewbit.calibrate(model, rules, params, batches).save(FILE) makes one."
)
_MSG_NO_PARAMS = (
    "--model {text} did not return the float parameters. To measure errors it returns (model, "
    "params, *inputs); for a Linen module the variables, {{'params': ...}}."
)
_MSG_KIND = "--model {text} returned {found}, and the checkpoint's plan is of {kind}."
_KINDS = {"nnx": "an NNX model", "linen": "a Linen module", "function": "a function"}


def plan(args: argparse.Namespace) -> int:
    """Print the plan of a model."""
    made = _plan(args)[0]
    print(made.to_json() if args.json else made)
    return 0


def _plan(args: argparse.Namespace) -> tuple[fewbit.Plan, Any, tuple[Any, ...]]:
    rules = load_rules(args.rules, args.rule)
    model, inputs = load_model(args.model)
    wanted = inputs[1:] if _has_variables(model, inputs) else inputs
    return fewbit.plan(model, rules, *wanted, strict=not args.no_strict), model, inputs


def _kind(model: Any) -> str:
    return str(front_end(model).__name__).rpartition(".")[2]


def _has_variables(model: Any, inputs: tuple[Any, ...]) -> bool:
    """Whether a Linen module's variables come first, which errors are measured with."""
    first = inputs[0] if inputs else None
    return _kind(model) == "linen" and isinstance(first, Mapping) and "params" in first


def quantize(args: argparse.Namespace) -> int:
    """Stream a checkpoint through a plan; with --dry-run show the plan and check the source."""
    names = load_names(args.names)
    made, _, inputs = _plan(args)
    stats = None if args.stats is None else fewbit.Statistics.load(args.stats)
    measured = [scale.name for scale in made.scales if not is_fixed(scale)]
    if measured and stats is None:
        shown = ", ".join(measured[:3]) + ", ..." * (len(measured) > 3)
        raise Misuse(_MSG_NO_STATS.format(count=len(measured), names=shown))
    given: dict[str, Any] = {"quant_stats": stats}
    if made.kind == "function":
        given["into"] = inputs[0]
    if args.dry_run:
        print(made)
        read = _text.human_bytes(check_source(args.source, made, names, **given))
        print(f"\n{args.source} has every parameter of the plan, {read}; nothing was written.")
        return 0
    options = dict(resume=not args.restart, progress=not args.quiet)
    info = quantize_checkpoint(args.source, args.target, made, names, **given, **options)
    print(info.summary)
    return 0


def inspect(args: argparse.Namespace) -> int:
    """Print what a checkpoint holds."""
    found = fewbit.inspect(args.checkpoint)
    print(found.to_json() if args.json else found)
    return 0


def verify(args: argparse.Namespace) -> int:
    """Print what differs from the checksums; 1 if anything does."""
    found = fewbit.verify(args.checkpoint)
    print(found)
    return 0 if found else 1


def report(args: argparse.Namespace) -> int:
    """Write the page about a checkpoint, with measured errors if there is a model."""
    loaded = fewbit.load(args.checkpoint)
    if loaded.plan is None:
        raise ValueError(_MSG_NO_PLAN.format(path=args.checkpoint))
    comparison = None if args.model is None else _compare(args.model, loaded)
    title = args.title or f"Quantization of {args.checkpoint}"
    path = debug.html_report(args.output, plan=loaded.plan, comparison=comparison, title=title)
    if comparison is not None:
        print(comparison)
    print(f"wrote {path}")
    return 0


def _compare(text: str, loaded: Any) -> Any:
    """The float model of the command line against the checkpoint."""
    import jax

    model, inputs = load_model(text)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(inputs)):
        raise Misuse(_MSG_ABSTRACT.format(text=text))
    if _kind(model) != loaded.plan.kind:
        found, kind = _KINDS[_kind(model)], _KINDS[loaded.plan.kind]
        raise Misuse(_MSG_KIND.format(text=text, found=found, kind=kind))
    provider = fewbit.PtqProvider(loaded.plan.rules)
    if loaded.plan.kind == "nnx":
        template = fewbit.quantize_model(model, provider, *inputs)
        quantized = fewbit.load(loaded.path, into=template).params
        return debug.compare(model, quantized, inputs)
    quantized = fewbit.quantize_model(model, provider)
    if len(inputs) < 2:
        raise Misuse(_MSG_NO_PARAMS.format(text=text))
    params, *batch = inputs
    return debug.compare(model, quantized, tuple(batch), params=params, qparams=loaded.params)


def doctor() -> int:
    """Print versions, kernels and what runs natively; 1 if the native part is missing."""
    print(f"fewbit {fewbit.__version__}")
    for name in _LIBRARIES:
        print(f"{name + ':':16}{_versions.judged(name, _versions.installed(name))}")
    print(f"{'keras backend:':16}{keras_backend()}")
    found = kernels.info()
    print(found)
    print(f"{'fp8:':16}{fp8_here()}")
    for line in settings():
        print(f"{'setting:':16}{line}")
    return 0 if found.native else 1
