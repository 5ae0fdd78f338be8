"""Low-rank adapters of Keras (`enable_lora`) beside a weight that stays quantized.

Keras adds an adapter to the float kernel, x @ (W + s A B). Here the product with W runs on its few
bits, and the adapter's own small products are added to it: x @ W + s (x @ A) @ B.
"""

import contextlib
import functools
import string
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

_PARTS = ("lora_kernel_a", "lora_kernel_b", "lora_embeddings_a", "lora_embeddings_b")


def adapters(layer: Any) -> list[keras.Variable]:
    """The variables of the layer's adapter; none without one.

    >>> layer = keras.layers.Dense(4)
    >>> layer.build((None, 8))
    >>> layer.enable_lora(2)
    >>> [tuple(variable.shape) for variable in adapters(layer)]
    [(8, 2), (2, 4)]
    """
    if not getattr(layer, "lora_enabled", False):
        return []
    return [variable for name in _PARTS if (variable := getattr(layer, name, None)) is not None]


def with_adapter(layer: Any, float_call: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a layer with its adapter beside the weight; `float_call` if it has none.

    A class that writes its own call keeps it, adding the adapter to the weight it has decoded.
    """
    return _CALLS.get(float_call, float_call) if adapters(layer) else float_call


def adapter_methods(original: type[keras.Layer]) -> dict[str, Any]:
    """`enable_lora` for a quantized `original`, if that has one.

    Keras forgets the strength (`lora_alpha`) of an adapter when it makes a saved layer again; here
    the adapter is saved as it is, beside the weight, so its strength has to come back with it.
    """
    enable: Any = getattr(original, "enable_lora", None)
    if enable is None:
        return {}

    @functools.wraps(enable)
    def enable_lora(
        self: Any, rank: int, lora_alpha: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if lora_alpha is None and self.lora_rank == rank:
            lora_alpha = self.lora_alpha
        enable(self, rank, lora_alpha, *args, **kwargs)

    return {"enable_lora": enable_lora}


def low_rank_equation(equation: str) -> tuple[tuple[str, bool], tuple[str, bool]]:
    """The two products of an adapter A B in place of one with the kernel; True: with A.

    >>> low_rank_equation('btd,ndh->btnh')  # with A, then with B
    (('btd,nda->btna', True), ('btna,ah->btnh', False))
    >>> low_rank_equation('ab,cb->ac')  # the kernel's last axis is summed: B first
    (('ab,db->ad', False), ('ad,cd->ac', True))
    """
    operands, out = equation.split("->")
    x, kernel = operands.split(",")
    rank = next(letter for letter in string.ascii_letters if letter not in equation)
    last = kernel[-1]
    with_a, with_b = kernel[:-1] + rank, rank + last
    if last in out:
        between = out.replace(last, rank)
        return (f"{x},{with_a}->{between}", True), (f"{between},{with_b}->{out}", False)
    between = x.replace(last, rank)
    return (f"{x},{with_b}->{between}", False), (f"{between},{with_a}->{out}", True)


@contextlib.contextmanager
def _without_adapter(layer: Any) -> Iterator[None]:
    """While `layer.kernel` is the stored weight alone."""
    layer.lora_enabled = False
    try:
        yield
    finally:
        layer.lora_enabled = True


def _added(layer: Any, product: Any, adapter: Any) -> Any:
    strength = layer.lora_alpha / layer.lora_rank
    return ops.add(product, ops.cast(ops.multiply(adapter, strength), product.dtype))


def _finished(layer: Any, x: Any) -> Any:
    if layer.bias is not None:
        x = ops.add(x, layer.bias)
    return x if layer.activation is None else layer.activation(x)


def _dense(layer: Any, inputs: Any, training: Any = None) -> Any:
    with _without_adapter(layer):
        product = ops.matmul(inputs, layer.kernel)
    adapter = ops.matmul(ops.matmul(inputs, layer.lora_kernel_a), layer.lora_kernel_b)
    return _finished(layer, _added(layer, product, adapter))


def _einsum_dense(layer: Any, inputs: Any, training: Any = None) -> Any:
    with _without_adapter(layer):
        product = ops.einsum(layer.equation, inputs, layer.kernel)
    adapter = inputs
    for equation, with_a in low_rank_equation(layer.equation):
        part = layer.lora_kernel_a if with_a else layer.lora_kernel_b
        adapter = ops.einsum(equation, adapter, part)
    return _finished(layer, _added(layer, product, adapter))


def _embedding(layer: Any, inputs: Any) -> Any:
    if inputs.dtype not in ("int32", "int64"):
        inputs = ops.cast(inputs, "int32")
    with _without_adapter(layer):
        rows = ops.take(layer.embeddings, inputs, axis=0)
    adapter = ops.take(layer.lora_embeddings_a, inputs, axis=0)
    rows = _added(layer, rows, ops.matmul(adapter, layer.lora_embeddings_b))
    return ops.cast(rows, dtype=layer.compute_dtype)


def _reversible_embedding(layer: Any, inputs: Any, reverse: bool = False) -> Any:
    if not reverse:
        return _embedding(layer, inputs)
    with _without_adapter(layer):
        kernel = ops.transpose(layer.embeddings) if layer.tie_weights else layer.reverse_embeddings
    if layer.reverse_dtype is not None:
        inputs, kernel = (ops.cast(x, layer.reverse_dtype) for x in (inputs, kernel))
    logits = ops.matmul(inputs, kernel)
    if layer.tie_weights:
        narrow = ops.matmul(inputs, ops.transpose(layer.lora_embeddings_b))
        logits = _added(layer, logits, ops.matmul(narrow, ops.transpose(layer.lora_embeddings_a)))
    cap = layer.logit_soft_cap
    return logits if cap is None else ops.multiply(ops.tanh(ops.divide(logits, cap)), cap)


_CALLS: dict[Any, Callable[..., Any]] = {
    keras.layers.Dense.call: _dense,
    keras.layers.EinsumDense.call: _einsum_dense,
    keras.layers.Embedding.call: _embedding,
    keras.layers.ReversibleEmbedding.call: _reversible_embedding,
}
