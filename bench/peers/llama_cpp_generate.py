"""llama.cpp generating with a random Gemma3: float32, Q8_0, and Q4_0 with two types of its table.

The files are quantized by llama.cpp. Of a model 640 wide its Q4_0 leaves the table of tokens in
Q8_0, because Q6_K, its choice for tied tables, needs multiples of 256; `Q4_0` has that in Q4_0 too.
A call is one pass over the prompt and one per further token, each followed by its greedy sampler;
contexts have its defaults, but for their length and threads.

    python bench/peers/llama_cpp_generate.py [--rounds 5]    # alone: where its time goes
"""

from __future__ import annotations

import argparse
import ctypes
import pathlib
import sys
import tempfile
import time
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
from _gemma3_gguf import write
from _serve import Kernels, serve, threads, versions_of

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "keras"))

import _shapes

Q4_0, Q8_0 = llama.LLAMA_FTYPE_MOSTLY_Q4_0, llama.LLAMA_FTYPE_MOSTLY_Q8_0
FILES = {  # the type of the file, and of its table
    "llama.cpp F32": None,
    "llama.cpp Q8_0": (Q8_0, llama.GGML_TYPE_Q8_0),
    "llama.cpp Q4_0, Q8_0 table": (Q4_0, llama.GGML_TYPE_Q8_0),
    "llama.cpp Q4_0": (Q4_0, llama.GGML_TYPE_Q4_0),
}
TOLERANCE = 0.8  # of the root mean square: four bits in 18 layers cost 0.4, other logits have 1.4
ERROR = 4  # of ggml_log_level


@llama.llama_log_callback
def log(level: int, text: bytes, _: Any) -> None:
    if level == ERROR:
        sys.stderr.write(text.decode())


class Generator:
    """A loaded file, generating greedily from one prompt."""

    def __init__(self, path: pathlib.Path, prompt: list[int], new: int) -> None:
        model = llama.llama_model_load_from_file(
            str(path).encode(), llama.llama_model_default_params()
        )
        settings = llama.llama_context_default_params()
        settings.n_ctx = len(prompt) + new
        settings.n_threads = settings.n_threads_batch = threads()
        self.context = llama.llama_init_from_model(model, settings)
        self.memory = llama.llama_get_memory(self.context)
        self.sampler = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        llama.llama_sampler_chain_add(self.sampler, llama.llama_sampler_init_greedy())
        self.new = new
        self.bytes = llama.llama_model_size(model)
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        # Batches point at arrays of tokens; that of the next token is written again and again.
        self._tokens = (llama.llama_token * len(prompt))(*prompt)
        self._token = (llama.llama_token * 1)()
        self.prompt = llama.llama_batch_get_one(self._tokens, len(prompt))
        self.next = llama.llama_batch_get_one(self._token, 1)
        self.silent = llama.llama_batch_get_one(self._token, 1)
        self.silent.logits = (ctypes.c_int8 * 1)(0)

    def decode(self, batch: Any) -> None:
        if llama.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")

    def sample(self) -> int:
        self._token[0] = llama.llama_sampler_sample(self.sampler, self.context, -1)
        return self._token[0]

    def start(self) -> None:
        llama.llama_memory_clear(self.memory, False)
        self.decode(self.prompt)

    def __call__(self) -> list[int]:
        self.start()
        tokens = [self.sample()]
        while len(tokens) < self.new:
            self.decode(self.next)
            tokens.append(self.sample())
        return tokens

    def logits(self) -> np.ndarray:
        """After the prompt."""
        self.start()
        found = llama.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(found, (self.vocabulary,)).copy()

    def parts(self) -> list[float]:
        """Milliseconds of the prompt and, per token, of the layers, the logits and the sampler.

        Those of the layers are a pass's that asks for no logits. It spares the last layer's
        feed-forward part too, which is therefore counted with the logits.
        """
        now = time.perf_counter
        begin = now()
        self.start()
        prompt, passes, sampler = now() - begin, 0.0, 0.0
        self.sample()
        for _ in range(self.new - 1):
            begin = now()
            self.decode(self.next)
            middle = now()
            self.sample()
            passes, sampler = passes + middle - begin, sampler + now() - middle
        self.start()
        begin = now()
        for _ in range(self.new - 1):
            self.decode(self.silent)
        layers, each = now() - begin, 1e3 / (self.new - 1)
        return [1e3 * prompt, each * layers, each * (passes - layers), each * sampler]


def generators(task: dict[str, Any]) -> dict[str, Generator]:
    """Every file of one model, loaded, its logits compared with those of float32."""
    found: dict[str, Generator] = {}
    with tempfile.TemporaryDirectory() as folder:  # a mapped file may be deleted
        plain = pathlib.Path(folder, "f32.gguf")
        write(plain, task["config"])
        for name, types in FILES.items():
            path = plain
            if types is not None:
                path = plain.with_name(f"{len(found)}.gguf")
                settings = llama.llama_model_quantize_default_params()
                settings.nthread = threads()
                settings.ftype, settings.token_embedding_type = types
                names = str(plain).encode(), str(path).encode()
                if llama.llama_model_quantize(*names, ctypes.byref(settings)):
                    raise RuntimeError(f"{name} was not quantized")
            found[name] = Generator(path, task["prompt"], task["new"])
    expected = found["llama.cpp F32"].logits()
    for name, generator in found.items():
        error = np.sqrt(np.mean((generator.logits() - expected) ** 2) / np.mean(expected**2))
        if not error < TOLERANCE:
            raise RuntimeError(f"{name} has logits off by {error:.2f} of their size")
    return found


def kernels(task: dict[str, Any]) -> Kernels:
    found = generators(task)
    for generator in found.values():
        generator()
    return {name: (generator, generator.bytes) for name, generator in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--shape", default="270m", choices=_shapes.GEMMA3)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    llama.llama_log_set(log, None)
    llama.llama_backend_init()
    versions = versions_of("llama-cpp-python")
    versions["llama.cpp"] = llama.llama_print_system_info().decode().strip(" |")
    if args.serve:
        serve(kernels, versions)
        return
    config = _shapes.GEMMA3[args.shape]
    prompt = np.random.default_rng(0).integers(1, config["vocabulary_size"], 32).tolist()
    found = generators({"config": config, "prompt": prompt, "new": 128})
    rounds = [[each.parts() for each in found.values()] for _ in range(args.rounds)]
    print(
        versions, f"\n{'milliseconds':28}{'prompt':>10}{'layers':>10}{'logits':>10}{'sampler':>10}"
    )
    for name, numbers in zip(found, np.median(rounds, axis=0), strict=True):
        print(f"{name:28}" + "".join(f"{number:10.2f}" for number in numbers))


if __name__ == "__main__":
    main()
