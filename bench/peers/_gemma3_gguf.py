"""A Gemma3 with random weights as a GGUF file, laid out as llama.cpp's own converter does it.

Shapes have KerasHub's names (examples/keras/_shapes.py). The norms are ones: Gemma multiplies by
one plus its weight, and the converter adds the one.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Any

import gguf
import numpy as np

Config = dict[str, Any]


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors, a matrix as [out, in]. The logits use the token table."""
    wide, inner, head = config["hidden_dim"], config["intermediate_dim"], config["head_dim"]
    query, keys = head * config["num_query_heads"], head * config["num_key_value_heads"]
    block = {
        "attn_norm": (wide,),
        "attn_q": (query, wide),
        "attn_k": (keys, wide),
        "attn_v": (keys, wide),
        "attn_q_norm": (head,),
        "attn_k_norm": (head,),
        "attn_output": (wide, query),
        "post_attention_norm": (wide,),
        "ffn_norm": (wide,),
        "ffn_gate": (inner, wide),
        "ffn_up": (inner, wide),
        "ffn_down": (wide, inner),
        "post_ffw_norm": (wide,),
    }
    shapes = {"token_embd.weight": (config["vocabulary_size"], wide), "output_norm.weight": (wide,)}
    for layer in range(config["num_layers"]):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return shapes


def random_tensors(config: Config, seed: int = 0) -> Iterable[tuple[str, np.ndarray]]:
    source = np.random.default_rng(seed)
    for name, shape in tensor_shapes(config).items():
        if name.endswith("norm.weight"):
            yield name, np.ones(shape, np.float32)
        else:
            size = np.float32(shape[-1] ** -0.5)
            yield name, source.standard_normal(shape, np.float32) * size


def write(
    path: pathlib.Path, config: Config, tensors: Iterable[tuple[str, np.ndarray]] | None = None
) -> None:
    """A float32 file; without a tokenizer, since tokens go in and come out as numbers."""
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocabulary_size"])
    writer.add_context_length(32768)
    writer.add_block_count(config["num_layers"])
    writer.add_embedding_length(config["hidden_dim"])
    writer.add_feed_forward_length(config["intermediate_dim"])
    writer.add_head_count(config["num_query_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    if config.get("use_sliding_window_attention"):  # in five layers of six: its default
        writer.add_sliding_window(config["sliding_window_size"])
        writer.add_rope_freq_base_swa(1e4)
    for name, value in tensors or random_tensors(config):
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
