"""Masks of tensors, which Keras keeps beside the tensors and not in the arguments of a call.

A layer's call may read the masks of its inputs, drop them, and set one on its outputs. A trace has
other tensors than the call it is made for, so masks go in and come out as values. Keras has no
public way to read or set them.
"""

from typing import Any

import jax
from keras.src.backend import get_keras_mask, set_keras_mask

Masks = dict[str, Any]  # by the number of the leaf


def masks_of(tree: Any) -> Masks:
    """The masks of a tree's tensors."""
    found = {str(k): get_keras_mask(leaf) for k, leaf in enumerate(jax.tree.leaves(tree))}
    return {k: mask for k, mask in found.items() if mask is not None}


def set_masks(tree: Any, masks: Masks, *, drop: bool = False) -> None:
    """Set the masks of a tree's tensors; with `drop`, remove those that are not there."""
    for k, leaf in enumerate(jax.tree.leaves(tree)):
        if str(k) in masks:
            set_keras_mask(leaf, masks[str(k)])
        elif drop and get_keras_mask(leaf) is not None:
            set_keras_mask(leaf, None)
