"""OpenVINO on weights compressed by NNCF: int8 per channel, int4 in groups of 32 and 128.

Activations are quantized at run time in groups as OpenVINO likes it best: 128 for int8 (one scale
per row falls back to float speed), the weight's own groups for int4.
"""

from __future__ import annotations

import logging

import nncf
import numpy as np
import openvino
from _serve import Kernels, Shape, main, threads
from openvino import opset13

nncf.set_log_level(logging.ERROR)
CORE = openvino.Core()


def model(shape: Shape, table: np.ndarray) -> openvino.Model:
    """x times the transpose of a table [n, k], the form in which models reach OpenVINO."""
    x = opset13.parameter([shape.rows, shape.k], np.float32)
    return openvino.Model([opset13.matmul(x, opset13.constant(table), False, True)], [x])


def request(network: openvino.Model, x: np.ndarray, group: int):
    settings = {
        "INFERENCE_NUM_THREADS": threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
    }
    running = CORE.compile_model(network, "CPU", settings).create_infer_request()
    running.set_input_tensor(openvino.Tensor(np.ascontiguousarray(x)))

    def call() -> np.ndarray:
        running.infer()
        return running.get_output_tensor().data

    return call


def kernels(shape: Shape, weight: np.ndarray, x: np.ndarray) -> Kernels:
    modes = nncf.CompressWeightsMode
    size = weight.size
    table = weight if shape.tied else np.ascontiguousarray(weight.T)
    found: Kernels = {
        "OpenVINO float32": (request(model(shape, table), x, 0), 4 * size),
    }
    int8 = nncf.compress_weights(model(shape, table), mode=modes.INT8_SYM)
    found["OpenVINO int8"] = (request(int8, x, 128), size + 2 * shape.n)
    for group in (32, 128):
        int4 = nncf.compress_weights(
            model(shape, table), mode=modes.INT4_SYM, group_size=group, ratio=1.0, all_layers=True
        )
        found[f"OpenVINO int4 g{group}"] = (
            request(int4, x, group),
            size // 2 + 2 * size // group,
        )
    return found


if __name__ == "__main__":
    main(kernels, "OpenVINO float32", "openvino", "nncf")
