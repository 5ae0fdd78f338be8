"""The plans of the models that a program quantizes, written to files: `--plan FILE`.

A model's plan is written when it is known: an NNX model's as it is quantized, a Linen model's when
the program ends, from the inputs of its last call. FILE has the first model's, FILE-2 the second's
and so on; a model that is quantized again to the same plan is the same model. Each reads back by
`fewbit.Plan.from_json`. Nothing here imports JAX before the program does: it may still set it up.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbit import models
from fewbit._util import UsageError, found_at, write_atomically
from fewbit.as_qwix._table import TABLE

if TYPE_CHECKING:
    from fewbit.planning import Plan

# Names of the table that quantize models.
_PLACES = (
    *(("qwix", "quantize_model"), ("qwix", "apply_lora_to_model")),
    *(("qwix._src.model", "quantize_model"), ("qwix._src.providers.lora", "apply_lora_to_model")),
    *(("qwix._src.model", "quantize_linen_model"), ("qwix._src.model", "quantize_nnx_model")),
)

_MSG_NO_FOLDER = "--plan {path}: there is no folder {folder}. Make it first"
_MSG_FOLDER = "--plan {path}: this is a folder. Name a file in it, as {path}/plan.json"
_MSG_WROTE = "fewbit: plan of {name}: {quantized} of {sites} Sites quantized, written to {path}"
_MSG_NOTHING = "fewbit: --plan {path}: the program quantized no model, so no plan was written"
_MSG_NOT_CALLED = (
    "fewbit: --plan {path}: {name} was quantized but never called, so its plan is not known"
)
_MSG_FAILED = "fewbit: --plan {path}: no plan of {name}: {kind}: {error}"


def write_plans(path: str) -> None:
    """From now on, write the plan of each model that is quantized by one of Qwix's names."""
    place = Path(path).absolute()  # the program may go to another folder
    if place.is_dir():
        raise UsageError(_MSG_FOLDER.format(path=path))
    if not place.parent.is_dir():
        raise UsageError(_MSG_NO_FOLDER.format(path=path, folder=place.parent))
    plans = Plans(place)
    for home, name in _PLACES:
        vars(importlib.import_module(home))[name] = plans.watched(str(TABLE[home][name]))
    atexit.register(plans.finish)


class Plans:
    """The plans seen so far, and the models whose plan is not known yet."""

    def __init__(self, path: Path):
        self.path = path
        self.found: list[Plan] = []
        self.waiting: list[tuple[Any, Any, Any]] = []
        self.said = False

    def watched(self, place: str) -> Callable[..., Any]:
        """The function of this full name, after which the plan of what it quantized is taken."""

        def quantizing(*args: Any, **kwargs: Any) -> Any:
            quantize = found_at(place)
            made = quantize(*args, **kwargs)
            given = inspect.signature(quantize).bind(*args, **kwargs)
            model, provider, *inputs = given.args
            if models.is_nnx(model):
                settings = {k: v for k, v in kwargs.items() if k not in ("model", "provider")}
                self.nnx(model, provider, inputs, settings)
            else:
                self.waiting.append((made, model, provider))
            return made

        quantizing.__name__ = place.rpartition(".")[2]
        quantizing.__doc__ = f"{place}, and its plan is written."
        return quantizing

    def nnx(self, model: Any, provider: Any, inputs: Any, settings: dict[str, Any]) -> None:
        """Plan an NNX model on the inputs that it was quantized with."""
        for name in ("skip_nnx_init", "quant_stats"):
            settings.pop(name, None)
        methods = (settings.pop("call_method", "__call__"),)
        methods = tuple(settings.pop("methods", methods))
        if "rngs" not in inspect.signature(getattr(model, methods[0])).parameters:
            settings.pop("rngs", None)
        settings |= dict(methods=methods, strict=False)
        self.take(model, functools.partial(models.plan, model, provider, *inputs, **settings))

    def take(self, model: Any, make: Callable[[], Plan]) -> None:
        """Make a plan and write it, unless it is known; a failure is told and no more."""
        name = type(model).__name__
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the program itself has had these
                made = make()
            if made not in self.found:
                self.found.append(made)
                self.write(made, name)
        except Exception as error:  # whatever it is, the program goes on
            first = str(error).strip().split("\n")[0]
            said = dict(path=self.path, name=name, kind=type(error).__name__, error=first)
            print(_MSG_FAILED.format(**said), file=sys.stderr)
            self.said = True

    def write(self, made: Plan, name: str) -> None:
        """Write the plan that was found last."""
        path = self.path
        if len(self.found) > 1:
            path = path.with_name(f"{path.stem}-{len(self.found)}{path.suffix}")
        text = made.to_json() + "\n"
        write_atomically(path, lambda file: file.write(text.encode()))
        totals = made.totals
        counts = dict(quantized=totals.quantized_sites, sites=totals.sites)
        print(_MSG_WROTE.format(name=name, path=path, **counts), file=sys.stderr)

    def finish(self) -> None:
        """What is known only when the program ends."""
        for made, model, provider in self.waiting:
            last = models.front_end(made).last_call(made)
            if last is None:
                text = dict(path=self.path, name=type(model).__name__)
                print(_MSG_NOT_CALLED.format(**text), file=sys.stderr)
                self.said = True
                continue
            args, kwargs = last
            again = functools.partial(models.plan, model, provider, *args, strict=False, **kwargs)
            self.take(model, again)
        if not self.found and not self.said:
            print(_MSG_NOTHING.format(path=self.path), file=sys.stderr)
