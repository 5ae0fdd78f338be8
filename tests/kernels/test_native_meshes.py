"""Every native op with every operand split along every axis: a mesh gives what one device gives.

One table of ops and operands; the splits are made from the shapes. `test_laws_...` fails when a
native function or a primitive of `fewbit.kernels` is not in the table.
"""

import importlib
import itertools
import math
import pkgutil
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import W8A8, relative_error
from helpers import quantized as quantized_model
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from native_cases import MATMUL, ONE, codes, normal, table
from tolerances import CODE_OF_NEXT_LAYER, MESH_F32

import fewbit
from fewbit import kernels
from fewbit.kernels import codes_dot, panel_conv, panel_product
from fewbit.kernels._library import FUNCTIONS
from fewbit.qarray import quantize
from fewbit.qarray._panels import to_panels

pytestmark = pytest.mark.skipif(
    not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
)

CASES = table()
SHARED = ("x", "y")  # names of mesh axes


def mesh_of(*sizes, kind=AxisType.Auto):
    devices = jax.devices()[: math.prod(sizes)]
    names = SHARED[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes), devices=devices)


def entries(mesh, size, names=None):
    """What may stand in a PartitionSpec for an axis of this size, but None."""
    names = mesh.axis_names if names is None else names
    found = [order for n in range(1, len(names) + 1) for order in itertools.permutations(names, n)]
    return [e for e in found if size and size % math.prod(mesh.shape[n] for n in e) == 0]


def shapes(case):
    """Of the operands and of the results, which may be split too."""
    results = jax.tree.leaves(jax.eval_shape(case.run, case.operands))
    return {n: a.shape for n, a in case.operands.items()} | {
        f"result {i}": r.shape for i, r in enumerate(results)
    }


def alone(case, mesh):
    """One operand or result split along one axis, in every way."""
    for name, shape in shapes(case).items():
        for axis, size in enumerate(shape):
            for entry in entries(mesh, size):
                yield {name: PartitionSpec(*[None] * axis, entry)}


def together(case, mesh):
    """All of them split at once, each along every axis that it has in turn."""
    found = shapes(case)
    for turn in range(max(len(shape) for shape in found.values())):
        split = {}
        for place, (name, shape) in enumerate(found.items()):
            fitting = [(a, e) for a, size in enumerate(shape) for e in entries(mesh, size)]
            if fitting and not name.startswith("result") or turn % 2 and fitting:
                axis, entry = fitting[(turn + place) % len(fitting)]
                split[name] = PartitionSpec(*[None] * axis, entry)
        yield split


def mixed(case, mesh, count):
    """Any axes of any of them over any mesh axes."""
    dice = random.Random(0)
    for _ in range(count):
        split = {}
        for name, shape in shapes(case).items():
            spec, left = [None] * len(shape), list(mesh.axis_names)
            for axis in dice.sample(range(len(shape)), len(shape)):
                fitting = entries(mesh, shape[axis], left)
                if fitting and dice.random() < 0.7:
                    spec[axis] = dice.choice(fitting)
                    left = [name for name in left if name not in spec[axis]]
            split[name] = PartitionSpec(*spec)
        yield split


def check(case, mesh, splits):
    """All splits in one program, which is compiled once."""
    splits, want = list(splits), jax.tree.leaves(jax.jit(case.run)(case.operands))

    def place(name, split):
        return NamedSharding(mesh, split.get(name, PartitionSpec()))

    def run(many):
        outs = [jax.tree.leaves(case.run(operands)) for operands in many]
        return [
            [
                lax.with_sharding_constraint(out, place(f"result {i}", split))
                if f"result {i}" in split
                else out
                for i, out in enumerate(leaves)
            ]
            for leaves, split in zip(outs, splits, strict=True)
        ]

    many = [
        {n: jax.device_put(a, place(n, split)) for n, a in case.operands.items()}
        for split in splits
    ]
    for split, got in zip(splits, jax.jit(run)(many), strict=True):
        for one, other in zip(got, want, strict=True):
            error = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).max()
            assert error <= MESH_F32 * np.abs(np.asarray(other, np.float64)).max(), (split, error)


@pytest.mark.parametrize("name", CASES)
def test_rules_for_two_devices(name):
    case, mesh = CASES[name], mesh_of(2)
    check(case, mesh, together(case, mesh))


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 4)], ids=["2", "4", "8"])
@pytest.mark.parametrize("name", CASES)
def test_rules_for_every_split(name, sizes):
    case, mesh = CASES[name], mesh_of(*sizes)
    check(case, mesh, [*alone(case, mesh), *mixed(case, mesh, 6)])


# What runs on explicit meshes is right; these are refused, whatever the split is.
REFUSED = {name for name in CASES if name.startswith("quantize ")}
REFUSED |= {"ragged", "batched codes", "attention", "take", "training"}
# JAX's words for shardings that do not fit, which it does not export.
REFUSALS = {"ShardingTypeError", "DuplicateSpecError"}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_rules_on_an_explicit_mesh_are_never_wrong(name):
    case, mesh = CASES[name], mesh_of(2, kind=AxisType.Explicit)
    refused, splits = [], list(together(case, mesh))
    for split in splits:
        try:
            check(case, mesh, [{n: s for n, s in split.items() if not n.startswith("result")}])
        except Exception as error:
            if not isinstance(error, ValueError) and type(error).__name__ not in REFUSALS:
                raise
            refused.append(error)
    assert len(refused) == (len(splits) if name in REFUSED else 0), refused


def test_laws_every_native_function_and_primitive_is_in_the_table():
    called, bound = set(), set()
    for case in CASES.values():
        traced = jax.jit(case.run).trace(case.operands)
        called |= set(re.findall(r"@(fewbit_\w+)", traced.lower().as_text()))
        bound |= set(re.findall(r"\bfewbit_\w+", str(traced.jaxpr)))
    assert called == set(FUNCTIONS), "add a case to `table` for what is missing"
    modules = [
        importlib.import_module(f"fewbit.kernels.{found.name}")
        for found in pkgutil.iter_modules(kernels.__path__)
    ]
    primitives = {
        value.name for m in modules for value in vars(m).values() if isinstance(value, Primitive)
    }
    assert primitives <= bound, "add a case to `table` for what is missing"


# --- what JAX knows of such a call ---------------------------------------------------------------


def test_programs_that_differ_in_the_call_alone_have_different_texts():
    """JAX's cache on disk knows a program by its text, in which an address may come again."""
    weight = to_panels(quantize(normal(64, 128), "int8", channelwise_axes=(1,)), "kn")
    kernel = to_panels(quantize(normal(1, 1, 64, 128), "int8", channelwise_axes=(3,)), "kkcn")
    mesh = mesh_of(2)

    def text(function, *args):
        args = jax.device_put(args, NamedSharding(mesh, PartitionSpec()))
        lowered = jax.jit(function).lower(*args).as_text()
        assert "CustomSPMDPartitioning" in lowered
        return re.sub(r'backend_config = "\d+"', "", lowered)

    rows, images = normal(4, 64), normal(2, 4, 4, 64)
    texts = [text(lambda x, w, a=a: panel_product(x, w, act=a), rows, weight) for a in ACTS]
    texts += [text(lambda x, w, a=a: panel_conv(x, w, ONE, act=a), images, kernel) for a in ACTS]
    assert len(set(texts)) == len(texts)


ACTS = ("none", "dynamic")


@pytest.mark.parametrize("k", [65, 70])
def test_what_fills_up_an_uneven_split_is_not_summed(k):
    mesh = mesh_of(4)
    lhs, rhs = codes(64, k), codes(k, 64)

    def split(array, axis):
        place = NamedSharding(mesh, PartitionSpec(*[None] * axis, "x"))
        return lax.with_sharding_constraint(array, place)

    def run(lhs, rhs):
        return codes_dot(split(lhs, 1) + jnp.int8(7), split(rhs, 0) + jnp.int8(9), MATMUL)

    placed = jax.device_put((lhs, rhs), NamedSharding(mesh, PartitionSpec()))
    left, right = np.asarray(lhs) + np.int8(7), np.asarray(rhs) + np.int8(9)
    want = left.astype(np.int64) @ right.astype(np.int64)
    np.testing.assert_array_equal(jax.jit(run)(*placed), want)


# --- models --------------------------------------------------------------------------------------


def two_convolutions(params, x):
    def conv(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    return conv(jax.nn.relu(conv(x, params["a"])), params["b"])


PARAMS = {"a": normal(1, 1, 64, 256) / 8, "b": normal(1, 1, 256, 256) / 16}
IMAGES = normal(2, 8, 8, 64)


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.long)])
def test_two_convolutions_split_by_their_output_channels(devices):
    mesh = mesh_of(devices)
    run, whole, plan = quantized_model(two_convolutions, W8A8, PARAMS, IMAGES)
    columns = NamedSharding(mesh, PartitionSpec(None, None, None, "x"))
    split = fewbit.quantize_params(jax.device_put(PARAMS, columns), plan)
    assert {w.array.layout for w in split.values()} == {"panels"}
    want = jax.jit(run)(whole, IMAGES)
    assert relative_error(jax.jit(run)(split, IMAGES), want) < CODE_OF_NEXT_LAYER


def test_packed_weights_on_an_explicit_mesh_are_refused_in_words():
    mesh = mesh_of(2, kind=AxisType.Explicit)
    run, whole, _ = quantized_model(two_convolutions, W8A8, PARAMS, IMAGES)
    split = jax.device_put(whole, NamedSharding(mesh, PartitionSpec("x")))
    with pytest.raises(ValueError, match=r"explicit mesh.*jax.device_put\(fewbit.unpack\(params\)"):
        jax.jit(run)(split, jax.device_put(IMAGES, NamedSharding(mesh, PartitionSpec())))
