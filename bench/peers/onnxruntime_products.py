"""ONNX Runtime: int8 with dynamic activations, and its 4-bit product with int8 arithmetic.

The int8 model is `DynamicQuantizeLinear`, `MatMulInteger` and two factors, as `quantize_dynamic`
writes it; weights stay within 7 bits where the CPU's instructions saturate (its `reduce_range`).
The 4-bit product is `MatMulNBits` with `accuracy_level=4`.
"""

from __future__ import annotations

import numpy as np
import onnxruntime
from _serve import Kernels, Shape, machine, main, threads
from onnx import TensorProto, helper, numpy_helper

EXACT = any(word in machine()["has"] for word in ("avx512_vnni", "avx_vnni"))


def session(nodes, constants: dict[str, np.ndarray], shape: Shape, x: np.ndarray):
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [shape.rows, shape.k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [shape.rows, shape.n])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads()
    options.inter_op_num_threads = 1
    running = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: running.run(None, {"x": x})[0]


def int8_constants(matrix: np.ndarray) -> dict[str, np.ndarray]:
    top = 127 if EXACT else 63
    scale = np.abs(matrix).max(axis=0) / top
    codes = np.rint(matrix / scale).astype(np.int8)
    return {"w": codes, "w_zero": np.zeros(matrix.shape[1], np.int8), "w_scale": scale}


def int8_nodes():
    node = helper.make_node
    return [
        node("DynamicQuantizeLinear", ["x"], ["xq", "x_scale", "x_zero"]),
        node("MatMulInteger", ["xq", "w", "x_zero", "w_zero"], ["sums"]),
        node("Cast", ["sums"], ["floats"], to=TensorProto.FLOAT),
        node("Mul", ["x_scale", "w_scale"], ["scale"]),
        node("Mul", ["floats", "scale"], ["y"]),
    ]


def int4(shape: Shape, matrix: np.ndarray, x: np.ndarray, group: int):
    groups = np.ascontiguousarray(matrix.T).reshape(shape.n, shape.k // group, group)
    scale = np.abs(groups).max(axis=2, keepdims=True) / 7
    codes = (np.rint(groups / scale) + 8).astype(np.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "w_scale"], ["y"], domain="com.microsoft",
        K=shape.k, N=shape.n, bits=4, block_size=group, accuracy_level=4,
    )  # fmt: skip
    constants = {"w": packed, "w_scale": scale.reshape(-1)}
    return session([node], constants, shape, x), packed.nbytes + scale.nbytes


def kernels(shape: Shape, weight: np.ndarray, x: np.ndarray) -> Kernels:
    matrix = np.ascontiguousarray(weight.T) if shape.tied else weight
    plain = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    found: Kernels = {
        "ONNX Runtime float32": (session(plain, {"w": matrix}, shape, x), matrix.nbytes),
    }
    constants = int8_constants(matrix)
    size = sum(value.nbytes for value in constants.values())
    found["ONNX Runtime int8"] = (session(int8_nodes(), constants, shape, x), size)
    for group in (32, 128):
        found[f"ONNX Runtime int4 g{group}"] = int4(shape, matrix, x, group)
    return found


if __name__ == "__main__":
    main(kernels, "ONNX Runtime float32", "onnxruntime", "onnx")
