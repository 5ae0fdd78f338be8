"""torchao on a torch Linear, compiled: int8 with dynamic activations, int8 and int4 weight-only."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import torch
from _serve import Kernels, Shape, main, threads
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

warnings.filterwarnings("ignore")
torch.set_num_threads(threads())
torch._inductor.config.freezing = True  # weights become constants that it may repack


def running(module: torch.nn.Module, x: torch.Tensor):
    compiled = torch.compile(module)

    def call() -> np.ndarray:
        with torch.inference_mode():
            return compiled(x).float().numpy()

    return call


def kernels(shape: Shape, weight: np.ndarray, x: np.ndarray) -> Kernels:
    torch._dynamo.reset()
    table = weight if shape.tied else np.ascontiguousarray(weight.T)
    linear = torch.nn.Linear(shape.k, shape.n, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(torch.from_numpy(table), requires_grad=False)
    linear.eval()
    rows = torch.from_numpy(x)
    size = table.size
    int8 = size + 4 * shape.n
    found: Kernels = {"torch float32": (running(linear, rows), 4 * size)}
    int4 = size // 2 + 2 * 2 * size // 32  # its groups have a scale and a zero point
    full, half = torch.float32, torch.bfloat16  # torch's int4 product is fast in bfloat16 alone
    for name, config, dtype, stored in (
        ("torchao int8 W8A8", Int8DynamicActivationInt8WeightConfig(), full, int8),
        ("torchao int8 weight-only", Int8WeightOnlyConfig(), full, int8),
        ("torchao int4 g32 weight-only", PrototypeInt4WeightOnlyConfig(group_size=32), half, int4),
    ):
        module = torch.nn.Sequential(copy.deepcopy(linear)).to(dtype)
        quantize_(module, config)
        found[name] = (running(module, rows.to(dtype)), stored)
    return found


if __name__ == "__main__":
    main(kernels, "torch float32", "torch", "torchao")
