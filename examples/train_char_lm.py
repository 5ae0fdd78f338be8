"""Trains one character model in float32 and in few bits, and prints what the bits cost in loss.

    python examples/train_char_lm.py                                # everything: 15 trainings
    python examples/train_char_lm.py --configs float32 int8 --seeds 0 --steps 200

Every configuration of a seed starts from the same parameters and sees the same batches. The text is
tinyshakespeare (`--text FILE`, `$FEWBIT_DATA/tinyshakespeare.txt` or ../shared/data/); without it,
the manual that Python ships; the table says which. What is trained is written at once, so that a
run that was stopped goes on where it was: losses to `--results`, parameters to `--keep`.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import char_lm
import jax
import numpy as np
from char_lm import ROOT, Size, Text

import fewbit
from fewbit._util._atomic import write_atomically
from fewbit._util._text import Progress

RESULTS = ROOT / "bench" / "results" / "char-lm.json"
KEEP = ROOT / "build" / "char-lm"
MARKS = "<!-- table: char-lm -->", "<!-- end of table -->"
PTQ_METHODS = ("absmax", "mse", "percentile,99", "minmax")

# Weights of the layers inside the blocks; the products inside attention belong to `block_<n>`.
INSIDE = r"block_\d+/\w+"

NOTES = """\
int8 and fp8: every product, those of attention and the head included, forward and both gradients;
fp8 is e4m3 forward and e5m2 for gradients. int4 and 2-bit: weights of the blocks' linear layers;
the head has int8 weights, attention and all gradients are float32. int4 has one scale per output
channel and int8 activations, 2-bit has groups of 64 and float32 activations. The embedding, a
look-up, is float32 everywhere. QAT rows are float32 for the first half of the steps and quantized
for the second; they are converted with `to_ptq` and judged as the PTQ models that they became.
2-bit PTQ is the best, seed by seed, of the calibration methods {methods}."""


class Config(NamedTuple):
    """One row: how it is trained, how it is converted, what it is held to."""

    title: str
    training: Callable[[], Sequence[fewbit.QtRule]] | None = None
    ptq: Callable[[str], Sequence[fewbit.QuantizationRule]] | None = None  # of the float model,
    methods: Sequence[str] = ()  # by the best of these calibrations
    converted: bool = False  # QAT: float32 for half of the steps, then quantized; then PTQ
    bar: tuple[str, float] | None = None  # (row, the most that the loss may exceed its)


def head() -> fewbit.QtRule:
    return fewbit.QtRule(module_path="head", weight_qtype="int8")


def int4(method: str) -> list[fewbit.QtRule]:
    fields = {"weight_qtype": "int4", "act_qtype": "int8", "weight_calibration_method": method}
    return [head(), fewbit.QtRule(module_path=INSIDE, **fields)]


def int2(method: str) -> list[fewbit.QtRule]:
    fields = {"weight_qtype": "int2", "tile_size": 64, "weight_calibration_method": method}
    return [head(), fewbit.QtRule(module_path=INSIDE, **fields)]


def everywhere(qtype: str, gradients: str) -> list[fewbit.QtRule]:
    return [fewbit.QtRule(weight_qtype=qtype, act_qtype=qtype, bwd_qtype=gradients)]


CONFIGS = {
    "float32": Config("float32"),
    "int8": Config("int8 everywhere", lambda: everywhere("int8", "int8"), bar=("float32", 0.02)),
    "fp8": Config(
        "fp8, e4m3 and e5m2",
        lambda: everywhere("float8_e4m3fn", "float8_e5m2"),
        bar=("float32", 0.02),
    ),
    "int4-qat": Config(
        "int4 QAT, converted", lambda: int4("absmax"), converted=True, bar=("float32", 0.05)
    ),
    "int4-ptq": Config("int4 PTQ", ptq=int4, methods=("absmax",)),
    "int2-qat": Config(
        "2-bit QAT, learned, converted",
        lambda: int2("learned"),
        converted=True,
        bar=("int2-ptq", -0.1),
    ),
    "int2-ptq": Config("2-bit PTQ, the best", ptq=int2, methods=PTQ_METHODS),
}
MORE_BARS = {"int4-qat": ("int4-ptq", 0.0)}


class Lab(NamedTuple):
    """The text, the size, and where results and parameters lie."""

    text: Text
    size: Size
    results: pathlib.Path
    keep: pathlib.Path
    blocks: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What a loss depends on besides configuration and seed."""
        content = np.concatenate([self.text.train, self.text.validation]).tobytes()
        digest = hashlib.sha256(self.text.characters.encode() + content).hexdigest()[:16]
        text = {"name": self.text.name, "sha256": digest}
        return {"text": text, "size": self.size._asdict(), "validation_blocks": self.blocks}

    @property
    def model(self) -> char_lm.Decoder:
        return char_lm.Decoder(len(self.text.characters), self.size)

    @property
    def example(self) -> np.ndarray:
        return self.text.train[None, : self.size.context]

    def judge(self, model: Any, variables: Any) -> float:
        return char_lm.validation_loss(model, variables, self.text, self.size, self.blocks)


def records(lab: Lab) -> list[dict[str, Any]]:
    """All that the results file holds, of these settings and of others."""
    return json.loads(lab.results.read_text(encoding="utf-8")) if lab.results.exists() else []


def losses(lab: Lab) -> dict[str, dict[int, dict[str, Any]]]:
    """config -> seed -> record, of these settings."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for record in records(lab):
        if record["settings"] == lab.settings:
            found.setdefault(record["config"], {})[record["seed"]] = record
    return found


def add_record(lab: Lab, record: dict[str, Any]) -> None:
    lab.results.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(r) for r in [*records(lab), {**record, "settings": lab.settings}]]
    text = "[\n" + ",\n".join(lines) + "\n]\n"
    write_atomically(lab.results, lambda file: file.write(text.encode()))


def trained(lab: Lab, name: str, seed: int) -> tuple[Any, Any, float | None]:
    """The model of a configuration, its variables and the seconds of training (None: from file)."""
    config, model = CONFIGS[name], lab.model
    if config.training is not None:
        model = fewbit.quantize_model(model, fewbit.QtProvider(config.training()))
    digest = hashlib.sha256(json.dumps(lab.settings).encode()).hexdigest()[:8]
    path = lab.keep / f"{name}-{seed}-{digest}.npz"
    if path.exists():
        template = jax.eval_shape(model.init, jax.random.key(seed), lab.example)
        return model, read(path, template), None
    start = time.perf_counter()
    with Progress(f"{name}, seed {seed}", lab.size.steps) as bar:
        variables = char_lm.train(
            model, lab.text, lab.size, seed,
            first=lab.model if config.converted else None,
            taken_over=functools.partial(with_scales, lab, config, model),
            told=lambda loss: bar.update(note=f"loss {loss:.3f}"),
        )  # fmt: skip
    seconds = time.perf_counter() - start
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: np.savez(file, **by_path(variables)))
    return model, variables, seconds


def with_scales(lab: Lab, config: Config, model: Any, variables: Any) -> Any:
    """Scales that are learned start from the weights as they are when QAT takes over."""
    learns = any(rule.weight_calibration_method == "learned" for rule in config.training())
    return fewbit.add_learned_scales(model, variables, lab.example) if learns else variables


def by_path(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}


def read(path: pathlib.Path, template: Any) -> Any:
    with np.load(path, allow_pickle=False) as file:
        return jax.tree_util.tree_map_with_path(
            lambda p, _: jax.numpy.asarray(file[jax.tree_util.keystr(p)]), template
        )


def run(lab: Lab, name: str, seed: int) -> dict[str, Any]:
    """One configuration and seed: trained or taken from its file, converted, judged."""
    config = CONFIGS[name]
    if config.ptq is not None:
        _, variables, _ = trained(lab, "float32", seed)
        of_method = {m: ptq_loss(lab, variables, config.ptq(m)) for m in config.methods}
        best = min(of_method, key=lambda m: of_method[m])
        return {"config": name, "seed": seed, "loss": of_method[best], "of_method": of_method}
    model, variables, seconds = trained(lab, name, seed)
    record: dict[str, Any] = {"config": name, "seed": seed, "seconds": seconds}
    if config.converted:
        record["before_conversion"] = lab.judge(model, variables)
        served = fewbit.to_ptq(model, variables["params"], None, lab.example)
        model, variables = served.model, {"params": served.params}
    return record | {"loss": lab.judge(model, variables)}


def ptq_loss(lab: Lab, variables: Any, rules: Sequence[fewbit.QuantizationRule]) -> float:
    """The loss of a float model quantized afterwards."""
    plan = fewbit.plan(lab.model, rules, lab.example)
    model = fewbit.quantize_model(lab.model, fewbit.PtqProvider(rules))
    return lab.judge(model, {"params": fewbit.quantize_params(variables["params"], plan)})


def difference(found: dict[str, dict[int, dict[str, Any]]], name: str, base: str) -> float | None:
    """Mean over the seeds that both have of the loss of one above the other's."""
    seeds = sorted(found.get(name, {}).keys() & found.get(base, {}).keys())
    if not seeds:
        return None
    return float(np.mean([found[name][s]["loss"] - found[base][s]["loss"] for s in seeds]))


def verdicts(found: dict[str, dict[int, dict[str, Any]]], name: str) -> list[tuple[str, bool]]:
    """The bars of a row in words, and whether they are met."""
    out = []
    for base, most in filter(None, (CONFIGS[name].bar, MORE_BARS.get(name))):
        change = difference(found, name, base)
        if change is not None:
            words = f"{base} {most:+.2f}" if most else f"below {base}"
            out.append((words, change <= most if most else change < 0))
    return out


def table(lab: Lab, *, markdown: bool = False) -> str:
    """What has been measured, and the bars."""
    found = losses(lab)
    seeds = sorted({seed for rows in found.values() for seed in rows})
    head = ["", *(f"seed {seed}" for seed in seeds), "mean", "above float32", "at most", "met"]
    rows = [head]
    for name in (name for name in CONFIGS if name in found):
        of_seed = [found[name][seed]["loss"] if seed in found[name] else None for seed in seeds]
        change = difference(found, name, "float32")
        bars = verdicts(found, name)
        rows.append([
            CONFIGS[name].title,
            *("" if loss is None else f"{loss:.4f}" for loss in of_seed),
            f"{np.mean([loss for loss in of_seed if loss is not None]):.4f}",
            "" if change is None or name == "float32" else f"{change:+.4f}",
            "; ".join(words for words, _ in bars),
            "; ".join("yes" if met else "NO" for _, met in bars),
        ])  # fmt: skip
    parameters = sum(x.size for x in jax.tree.leaves(shapes(lab)))
    about = (
        f"Validation loss, nats per character, after {lab.size.steps} steps on {lab.text.name}; "
        f"{parameters:,} parameters."
    )
    notes = NOTES.format(methods=", ".join(PTQ_METHODS))
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        lines.insert(1, "|---" + "|---:" * (len(head) - 3) + "|---|---|")
        return "\n".join([about, "", *lines, "", notes])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([about, "", *(line.rstrip() for line in lines), "", notes])


def put(page: pathlib.Path, text: str) -> None:
    """Replaces what stands between the page's two marks."""
    old = page.read_text(encoding="utf-8")
    begin, end = MARKS
    if not 0 <= old.find(begin) < old.find(end):
        raise SystemExit(f"{page} has no place for the table: write {begin} and {end} there")
    before, after = old[: old.index(begin)], old[old.index(end) :]
    new = f"{before}{begin}\n\n{text}\n\n{after}"
    write_atomically(page, lambda file: file.write(new.encode()))


def shapes(lab: Lab) -> Any:
    return jax.eval_shape(lab.model.init, jax.random.key(0), lab.example)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--text", help="a text to use instead of tinyshakespeare")
    parser.add_argument("--blocks", type=int, help="judge by so many blocks of validation text")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--keep", type=pathlib.Path, default=KEEP, help="trained parameters")
    parser.add_argument("--markdown", action="store_true", help="the table for the docs")
    parser.add_argument("--page", type=pathlib.Path, help="a page to put it into, between marks")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    for field, value in Size()._asdict().items():
        option = "--" + field.replace("_", "-")
        parser.add_argument(option, type=type(value), default=value, metavar="N")
    args = parser.parse_args(argv)
    size = Size(**{field: getattr(args, field) for field in Size._fields})
    lab = Lab(char_lm.find_text(args.text), size, args.results, args.keep, args.blocks)
    for seed in args.seeds if not args.table else ():
        for name in args.configs:
            if seed not in losses(lab).get(name, {}):
                record = run(lab, name, seed)
                add_record(lab, record)
                print(f"{name}, seed {seed}: {record['loss']:.4f}", flush=True)
    print(table(lab, markdown=args.markdown))
    if args.page:
        put(args.page, table(lab, markdown=True))


if __name__ == "__main__":
    main()
