"""In which order Sites run, and which is the first to give a value that is not finite."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fewbit import jaxprs
from fewbit.taps import Reading
from fewbit.trace import Node, Program


def first_not_finite(
    program: Program, readings: Mapping[str, Sequence[Reading]], run: int
) -> str | None:
    """The Site, with its layer in a scan, whose result is the first with NaN or infinity."""
    bad = []
    for site_id, place in _places(program.root).items():
        if site_id not in readings:
            continue
        counts = np.asarray(readings[site_id][run].value["not_finite"])
        for layer in np.ndindex(counts.shape[:-1]):
            if counts[layer][0] > 0:
                bad.append((place(layer), site_id, layer, counts[layer][1:].tolist()))
    if not bad:
        return None
    _, site_id, layer, (activations, weight) = min(bad)
    text = site_id + (f", layer {', '.join(map(str, layer))}" if layer else "")
    if weight:
        return f"{text} (its stored weight is not finite)"
    return f"{text} (its operands were not finite already)" if activations else text


def _places(root: Node) -> dict[str, Any]:
    """For each Site a function from its layer to a key that sorts in the order of running."""
    found: dict[str, Any] = {}

    def walk(node: Node, before: tuple[int, ...]) -> None:
        """`before` has -1 where a layer's number comes in, -2 where layers run backwards."""
        for i in range(len(node.jaxpr.eqns)):
            if i in node.sites:
                found[node.sites[i].site.id] = _filled((*before, i))
            for k, child in enumerate(node.children.get(i, ())):
                step: tuple[int, ...] = (i, k)
                if child.per_layer:
                    step += (-2 if jaxprs.scan_params(node.jaxpr.eqns[i]).reverse else -1,)
                walk(child, (*before, *step))

    walk(root, ())
    return found


def _filled(places: tuple[int, ...]) -> Any:
    def key(layer: tuple[int, ...]) -> tuple[int, ...]:
        numbers = iter(layer)
        return tuple(
            place if place >= 0 else next(numbers) * (1 if place == -1 else -1) for place in places
        )

    return key
