"""Where the program stands: the module being traced, the Site being run.

These context variables are the only ambient state. They are set by the front ends' scope hooks and
by the interpreter, always inside `with`, and let a user's own kernel ask `get_current_rule('gmm')`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax

from fewbit.rules import QuantizationRule
from fewbit.tracing import LEFT_FLOAT, Site


@dataclass(frozen=True)
class CurrentSite:
    """The Site the interpreter is at, the rule that governs it, and where to report what ran it.

    `static` holds (scale, zero point or None) for each operand that has a stored scale. `finish` is
    the bias (or None) and the activation (or None) that are wanted of the product itself. `noise`
    is the key of the Site's stochastic rounding, `planning` tells that the run is an abstract one,
    `weight` is the operand that is a parameter, `adapter` its low-rank adapter, if it has one, and
    `delayed` the ranges of the steps before, of operands ('lhs', 'rhs') and of the gradient
    ('grad'). `trained` holds, by operand, the weight with its codes whose floats alone were given
    to a method that is not ours.
    """

    site: Site
    rule: QuantizationRule | None
    report: Callable[[str], None]
    static: Mapping[int, tuple[Any, Any]] = field(default_factory=dict)
    finish: tuple[Any, str | None] = (None, None)
    noise: Any = None
    planning: bool = False
    weight: int | None = None
    adapter: Any = None
    delayed: Mapping[str, Any] = field(default_factory=dict)
    trained: Mapping[int, Any] = field(default_factory=dict)


_provider: ContextVar[Any] = ContextVar("fewbit_provider", default=None)
_path: ContextVar[str] = ContextVar("fewbit_path", default="")
_failed: ContextVar[list[str] | None] = ContextVar("fewbit_failed", default=None)
_site: ContextVar[CurrentSite | None] = ContextVar("fewbit_site", default=None)
_left_float: ContextVar[bool] = ContextVar("fewbit_left_float", default=False)


@contextmanager
def _set(variable: ContextVar, value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def tracing(provider: Any) -> Iterator[list[str]]:
    """While a model is traced for `provider`; yields a list that gets a failing module's path."""
    failed: list[str] = []
    with _set(_provider, provider), _set(_failed, failed), _set(_path, ""), _set(_site, None):
        yield failed


@contextmanager
def in_module(path: str) -> Iterator[None]:
    """Around one module call; the innermost that raises is remembered for the error message."""
    with _set(_path, path):
        try:
            yield
        except Exception:
            failed = _failed.get()
            if failed == []:
                failed.append(path)
            raise


def at_site(current: CurrentSite) -> AbstractContextManager[None]:
    """While the interpreter evaluates one Site."""
    return _set(_site, current)


def current_site() -> CurrentSite | None:
    """The Site being evaluated; None outside the interpreter."""
    return _site.get()


@contextmanager
def left_float() -> Iterator[None]:
    """Around what a program asks to leave as it is: no rule matches in it."""
    with _set(_left_float, True), jax.named_scope(LEFT_FLOAT):
        yield


def module_path() -> str | None:
    """The path of the module that is traced, or whose Site is evaluated; None outside of both."""
    here = _site.get()
    if here is not None:
        return here.site.path
    return _path.get() if is_tracing() else None


def wanted_finish() -> tuple[Any, str | None]:
    """What the product of the current Site has to do after it."""
    here = _site.get()
    return (None, None) if here is None else here.finish


def is_tracing() -> bool:
    """Whether a front end is tracing a float twin now (nested quantized models step aside)."""
    return _provider.get() is not None


def get_current_rule(op_name: str) -> QuantizationRule | None:
    """The rule for `op_name` in the module being traced; None outside a quantized model.

    Meant for people's own kernels, which bring their own op names. In a provider's own method, such
    as an overridden `dot_general`, it is the rule of the Site that the method is called for.

    >>> get_current_rule('gmm') is None
    True
    """
    here, provider = _site.get(), _provider.get()
    if here is not None:
        return here.rule
    if provider is None or _left_float.get():
        return None
    return provider.rule_for_kernel(_path.get(), op_name)
