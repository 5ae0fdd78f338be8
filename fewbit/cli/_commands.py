"""What each command of the command line does; returns its exit code.

Below the commands: how they read what they are given (models, rules, names) and what `doctor` says
beyond versions and kernels.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

import fewbit
from fewbit import debug, kernels
from fewbit._util import (
    VARIABLES,
    human_bytes,
    installed,
    is_on,
    judged,
    load_yaml,
    nearest,
    read_file,
    unknown_variables,
)
from fewbit.calibration import is_fixed
from fewbit.io import check_source, quantize_checkpoint
from fewbit.models import front_end
from fewbit.rules import QuantizationRule, rules_from_json, rules_from_yaml

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
    # A Linen module's variables may come before its inputs: errors are measured with them.
    first = inputs[0] if inputs else None
    variables = _kind(model) == "linen" and isinstance(first, Mapping) and "params" in first
    wanted = inputs[1:] if variables else inputs
    return fewbit.plan(model, rules, *wanted, strict=not args.no_strict), model, inputs


def _kind(model: Any) -> str:
    return str(front_end(model).__name__).rpartition(".")[2]


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
        read = human_bytes(check_source(args.source, made, names, **given))
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
        print(f"{name + ':':16}{judged(name, installed(name))}")
    print(f"{'keras backend:':16}{keras_backend()}")
    found = kernels.info()
    print(found)
    print(f"{'fp8:':16}{fp8_here()}")
    for line in settings():
        print(f"{'setting:':16}{line}")
    return 0 if found.native else 1


# --- `module:function` on the command line: the model and inputs that a command is about ----------

_MSG_FORM = (
    "{text!r} does not name a model. Write module:function or path/to/file.py:function; the "
    "function takes no arguments and returns (model, *inputs), as fewbit.plan takes them after "
    "the rules; abstract parameters and inputs will do."
)
_MSG_NO_MODULE = "{module!r} cannot be imported: {error}. The current folder is searched first."
_MSG_NO_FUNCTION = "{module} has no function {name!r}.{near}"
_MSG_RETURNED = (
    "{text} returned {found}, not (model, *inputs). Return a tuple: the model, then what it is "
    "called with (for a plain function the parameters first)."
)
_MSG_RAISED = "{text} raised an error{place}: {what}. --traceback shows all of it."
_MSG_RULES = (
    "{path} is not a file of rules: its name ends in {suffix!r}, not in .yaml, .yml or .json."
)
_MSG_NAMES = (
    "{path} is not a list of names. Write one list a line: - [pattern, replacement] or "
    "- [pattern, replacement, T]."
)
_MSG_FIELD = "--rule {text!r} is not field=value[,field=value]: {part!r} has no '='."


class Misuse(ValueError):
    """The command line asks for something that cannot be; exit code 2."""


def load_function(text: str) -> Any:
    """What `module:function` or `file.py:function` names.

    >>> load_function('math:sqrt')(9.0)
    3.0
    >>> load_function('math:squirt')
    Traceback (most recent call last):
        ...
    fewbit.cli._commands.Misuse: math has no function 'squirt'. Did you mean 'sqrt'?
    """
    module_name, _, name = text.rpartition(":")
    if not module_name or not name:
        raise Misuse(_MSG_FORM.format(text=text))
    found: Any = _from_file(module_name) if module_name.endswith(".py") else _import(module_name)
    for part in name.split("."):
        if not hasattr(found, part):
            near = nearest(part, [w for w in dir(found) if w[0] != "_"], cutoff=0.6)
            raise Misuse(_MSG_NO_FUNCTION.format(module=module_name, name=part, near=near))
        found = getattr(found, part)
    return found


def load_model(text: str) -> tuple[Any, tuple[Any, ...]]:
    """The model that a function named on the command line makes, and its inputs."""
    function = load_function(text)
    if not callable(function):
        raise Misuse(_MSG_FORM.format(text=text))
    made = _carefully(text, function)
    if not isinstance(made, tuple) or not made:
        raise Misuse(_MSG_RETURNED.format(text=text, found=f"a {type(made).__name__}"))
    return made[0], made[1:]


def load_rules(file: str | None, inline: Iterable[str]) -> tuple[QuantizationRule, ...]:
    """Rules given on the command line, then those of a file: the first that matches counts.

    >>> load_rules(None, ['module_path=layers.*,weight_qtype=int4,tile_size=32'])
    (QuantizationRule(module_path='layers.*', weight_qtype='int4', tile_size=32),)
    """
    try:
        rules = tuple(_inline(text) for text in inline) + _from_rules_file(file)
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, Misuse) else Misuse(str(error)) from error
    if not rules:
        raise Misuse("no rules: give --rules FILE or --rule weight_qtype=int8,act_qtype=int8.")
    return rules


def _from_rules_file(file: str | None) -> tuple[QuantizationRule, ...]:
    if file is None:
        return ()
    path = Path(file)
    if not path.exists():
        raise _no_file(file)
    if path.suffix.lower() not in (".yaml", ".yml", ".json"):
        raise Misuse(_MSG_RULES.format(path=file, suffix=path.suffix))
    return (rules_from_json if path.suffix.lower() == ".json" else rules_from_yaml)(path)


def load_names(file: str | None) -> list[tuple[Any, ...]] | None:
    """How tensors of a source are called in the model: a YAML list of lists."""
    if file is None:
        return None
    if not Path(file).exists():
        raise _no_file(file)
    try:
        entries = load_yaml(read_file(file).decode("utf-8"), file)
    except ValueError as error:
        no_text = isinstance(error, UnicodeDecodeError)
        raise Misuse(f"{file} is not YAML: {error}" if no_text else str(error)) from error
    if not isinstance(entries, list) or not all(isinstance(entry, list) for entry in entries):
        raise Misuse(_MSG_NAMES.format(path=file))
    return [tuple(tuple(x) if isinstance(x, list) else x for x in entry) for entry in entries]


def _inline(text: str) -> QuantizationRule:
    """One rule from field=value pairs; values are YAML, so numbers and lists are what they look."""
    lines = []
    for part in _split(text):
        field, equals, value = part.partition("=")
        if not equals:
            raise Misuse(_MSG_FIELD.format(text=text, part=part))
        plain = field.strip() == "module_path"  # a regex is text, whatever it looks like
        lines.append(f"{field.strip()}: {repr(value) if plain else value}")
    (rule,) = rules_from_yaml("- " + "\n  ".join(lines))
    return rule


def _split(text: str) -> list[str]:
    """At commas that begin a new field: `tile_size=32,op_names=[einsum,take]` has two."""
    parts: list[str] = []
    for piece in text.split(","):
        name = piece.partition("=")[0]
        if parts and not ("=" in piece and name.strip().isidentifier()):
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return parts


def _import(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return _carefully(name, importlib.import_module, name)
    except ImportError as error:
        raise Misuse(_MSG_NO_MODULE.format(module=name, error=error)) from error


def _carefully(text: str, run: Callable[..., Any], *args: Any) -> Any:
    """What the user's code returns; its errors say whose they are and where they were raised."""
    try:
        return run(*args)
    except Exception as error:
        if isinstance(error, ImportError) and error.name == text:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        what = "".join(traceback.format_exception_only(error)).strip()
        raise ValueError(_MSG_RAISED.format(text=text, place=place, what=what)) from error


def _from_file(path: str) -> ModuleType:
    file = Path(path)
    name = f"_fewbit_cli_{file.stem}"  # a file called jax.py must not become jax
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise _no_file(path)
    sys.path.insert(0, str(file.parent.resolve()))  # its own imports, as when it is run
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _carefully(path, spec.loader.exec_module, module)
    return module


def _no_file(path: str) -> Misuse:
    here = Path(path)
    beside = here.parent.iterdir() if here.parent.is_dir() else ()
    names = [file.name for file in beside if file != here]
    near = nearest(here.name, names, cutoff=0.6, show=lambda name: repr(str(here.parent / name)))
    return Misuse(f"there is no file {path!r}.{near}")


# --- What `fewbit doctor` says beyond versions and kernels: fp8 units, Keras' backend, settings ---

_CPU_UNITS = {"amx_fp8": "AMX-FP8", "avx10_2": "AVX10.2", "avx10.2": "AVX10.2"}
_FIRST_FP8_GPU = 8.9  # NVIDIA Ada; Hopper is 9.0
_TPU_WITH_FP8 = ("7", "ironwood")

_MSG_CPU_NATIVE = (
    "native on this CPU ({units}): emulate=True with the XLA_FLAGS of docs/keras.md lets XLA use "
    "it; fewbit's own kernels decode fp8"
)
_MSG_DEVICE_NATIVE = "native on {device}"
_MSG_NONE = (
    "not native here ({device} has no fp8 units): fp8 weights are decoded in the kernels, which "
    "saves memory; int8 is the fast 8-bit type"
)
_MSG_BACKEND = "{found}, which fewbit.keras runs on"
_MSG_OTHER_BACKEND = "{found}; fewbit.keras needs jax: set KERAS_BACKEND=jax"


def fp8_here(devices: Any = None, cpu_flags: frozenset[str] | None = None) -> str:
    """Whether products of fp8 numbers would run on units of this machine made for them.

    >>> fp8_here([], frozenset(['avx512f', 'amx_fp8'])).partition(':')[0]
    'native on this CPU (AMX-FP8)'
    >>> fp8_here([], frozenset(['avx512f'])).partition(':')[0]
    'not native here (the CPU has no fp8 units)'
    """
    if devices is None:
        devices = [device for device in jax.devices() if device.platform != "cpu"]
    for device in devices:  # the first speaks for all
        kind = f"this {device.platform.upper()} ({device.device_kind})"
        return (_MSG_DEVICE_NATIVE if _has_fp8(device) else _MSG_NONE).format(device=kind)
    flags = _cpu_flags() if cpu_flags is None else cpu_flags
    units = sorted({_CPU_UNITS[flag] for flag in flags if flag in _CPU_UNITS})
    if units:
        return _MSG_CPU_NATIVE.format(units=", ".join(units))
    return _MSG_NONE.format(device="the CPU")


def keras_backend(environment: Any = os.environ) -> str:
    """The backend that Keras would take, read as Keras reads it; Keras is not imported.

    >>> keras_backend({'KERAS_BACKEND': 'jax'})
    'jax, which fewbit.keras runs on'
    >>> keras_backend({'KERAS_BACKEND': 'torch'})
    'torch; fewbit.keras needs jax: set KERAS_BACKEND=jax'
    """
    found = environment.get("KERAS_BACKEND") or _configured(environment) or "tensorflow"
    return (_MSG_BACKEND if found == "jax" else _MSG_OTHER_BACKEND).format(found=found)


def settings(environment: Any = os.environ) -> list[str]:
    """Fewbit's environment variables that are set; those that cannot be followed say so.

    >>> settings({'FEWBIT_PROGRESS': 'no', 'FEWBIT_BACKENDS': 'xla'})
    ["FEWBIT_PROGRESS is 'no', and can be 0 or 1. Set it to one of these, or unset it.",
     'FEWBIT_BACKENDS is set, but fewbit does not read it; did you mean FEWBIT_BACKEND?']
    """
    said = []
    for name in (name for name in VARIABLES if name in environment):
        try:
            if name == "FEWBIT_PROGRESS":
                is_on(name, environment)
            said.append(f"{name}={environment[name]}")
        except ValueError as error:
            said.append(str(error))
    return said + unknown_variables(environment)


def _configured(environment: Any) -> str | None:
    home = Path(environment.get("KERAS_HOME") or Path.home() / ".keras")
    try:
        return json.loads(read_file(home / "keras.json")).get("backend")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _has_fp8(device: Any) -> bool:
    if device.platform == "tpu":
        kind = device.device_kind.lower().replace("tpu", "").strip(" v")
        return kind.startswith(_TPU_WITH_FP8)
    try:
        return float(device.compute_capability) >= _FIRST_FP8_GPU
    except (AttributeError, TypeError, ValueError):
        return False


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())
