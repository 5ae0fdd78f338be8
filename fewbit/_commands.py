"""What each command of the command line does; returns its exit code."""

from __future__ import annotations

import argparse
import importlib.metadata
from typing import Any

import fewbit
from fewbit import _text, debug, kernels
from fewbit._cli_model import Misuse, load_model, load_names, load_rules
from fewbit.io.quantize_checkpoint import check_source, quantize_checkpoint

_LIBRARIES = ("jax", "jaxlib", "numpy", "flax", "keras", "keras-hub")
_MSG_NO_PLAN = (
    "{path} was saved without a plan, and a report is about one. Save it with its plan: "
    "fewbit.save(path, params, plan)."
)
_MSG_ABSTRACT = (
    "--model {text} returned abstract values, so nothing can be measured. Return the float "
    "parameters and a batch, or leave --model out for a report of the plan alone."
)


def plan(args: argparse.Namespace) -> int:
    """Print the plan of a model."""
    made = _plan(args)[0]
    print(made.to_json() if args.json else made)
    return 0


def _plan(args: argparse.Namespace) -> tuple[fewbit.Plan, Any, tuple[Any, ...]]:
    rules = load_rules(args.rules, args.rule)
    model, inputs = load_model(args.model)
    return fewbit.plan(model, rules, *inputs, strict=not args.no_strict), model, inputs


def quantize(args: argparse.Namespace) -> int:
    """Stream a checkpoint through a plan; with --dry-run show the plan and check the source."""
    names = load_names(args.names)
    made = _plan(args)[0]
    if args.dry_run:
        print(made)
        read = _text.human_bytes(check_source(args.source, made, names))
        print(f"\n{args.source} has every parameter of the plan, {read}; nothing was written.")
        return 0
    stats = None if args.stats is None else fewbit.Statistics.load(args.stats)
    info = quantize_checkpoint(
        args.source, args.target, made, names, quant_stats=stats, progress=not args.quiet
    )
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
    provider = fewbit.PtqProvider(loaded.plan.rules)
    if loaded.plan.kind == "nnx":
        template = fewbit.quantize_model(model, provider, *inputs)
        quantized = fewbit.load(loaded.path, into=template).params
        return debug.compare(model, quantized, inputs)
    quantized = fewbit.quantize_model(model, provider)
    params, *batch = inputs
    return debug.compare(model, quantized, tuple(batch), params=params, qparams=loaded.params)


def doctor() -> int:
    """Print versions and kernels; 1 if the native part is missing."""
    print(f"fewbit {fewbit.__version__}")
    for name in _LIBRARIES:
        print(f"{name + ':':16}{_installed(name)}")
    found = kernels.info()
    print(found)
    return 0 if found.native else 1


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
