"""What PEFT makes of adapters that fewbit wrote, and adapters that PEFT writes.

Runs in the environment of the peers:
cd tests && python -m peers.peft_adapters <where to write the .npz> <folder of both sides' adapters>
"""

# ruff: noqa: E402
import pathlib
import sys

# PEFT takes any package of this name for the one with a part for torch; it is here for Keras alone.
sys.modules["neural_compressor"] = None  # type: ignore[assignment]

import numpy as np
import torch
import transformers
from peers import adapters, cases
from peft import LoraConfig, PeftModel, get_peft_model

INPUTS = [torch.from_numpy(x) for x in (adapters.ROWS, adapters.rows(), adapters.image())]


class Small(torch.nn.Module):
    """A table, a linear layer and a convolution, side by side."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(*adapters.SMALL["table"])
        self.up = torch.nn.Linear(8, 12, bias=False)
        self.conv = torch.nn.Conv2d(3, 4, 3, bias=False)
        set_weights(self, adapters.small_weights())

    def forward(self, ids, rows, image):
        return self.table(ids), self.up(rows), self.conv(image)


def decoder():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=adapters.VOCABULARY,
        hidden_size=adapters.WIDTH,
        intermediate_size=adapters.HIDDEN,
        num_hidden_layers=adapters.LAYERS,
        num_attention_heads=adapters.HEADS,
        num_key_value_heads=adapters.HEADS,
        max_position_embeddings=16,
    )
    model = transformers.LlamaForCausalLM(config)
    return set_weights(model, adapters.decoder_weights()).eval()


def set_weights(model, weights):
    with torch.no_grad():
        for name, weight in weights.items():
            model.get_submodule(name).weight.copy_(torch.from_numpy(weight))
    return model


def put(answers, name, tensor):
    answers.put(name, tensor.detach().numpy())


def describe(answers, kind, what, model):
    """The update of every module, and what the model computes with it and after merging."""
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "get_delta_weight"):
            put(answers, f"{kind}/{what}/delta/{name}", module.get_delta_weight("default"))
    put_outputs(answers, kind, f"{what}/out", model)
    put_outputs(answers, kind, f"{what}/merged", model.merge_and_unload())


def put_outputs(answers, kind, name, model):
    with torch.no_grad():
        if kind == "small":
            for k, out in enumerate(model(*INPUTS)):
                put(answers, f"small/{name}/{k}", out)
        else:
            put(answers, f"{kind}/{name}", model(torch.from_numpy(adapters.IDS)).logits)


def randomized(model):
    """As after training: neither factor is zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model.eval()


if __name__ == "__main__":
    answers, folder = cases.Results(), pathlib.Path(sys.argv[2])
    for kind, make in (("decoder", decoder), ("small", Small)):
        put_outputs(answers, kind, "base", make())
        read = PeftModel.from_pretrained(make(), folder / f"fewbit-{kind}").eval()
        describe(answers, kind, "read", read)
        with np.load(folder / f"fewbit-{kind}-merged.npz") as file:
            ours = set_weights(make(), {name: file[name] for name in file.files})
        put_outputs(answers, kind, "ours", ours)
        config = LoraConfig(
            r=adapters.RANK,
            lora_alpha=adapters.ALPHA,
            target_modules=["q_proj", "v_proj", "up_proj", "down_proj", *adapters.SMALL],
            rank_pattern={"down_proj": adapters.OTHER_RANK, "up": adapters.OTHER_RANK},
            alpha_pattern={"down_proj": adapters.OTHER_ALPHA, "up": adapters.OTHER_ALPHA},
        )
        written = randomized(get_peft_model(make(), config))
        written.save_pretrained(folder / f"peft-{kind}")
        describe(answers, kind, "written", written)
    answers.save(sys.argv[1])
