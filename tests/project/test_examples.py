"""Every example runs as a user runs it: a fresh process, its printed result checked."""

from __future__ import annotations

import pathlib
import re

import data
import pytest
from scripts import run

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Relative error of the outputs against float: the largest each small model may show.
LARGEST_ERROR = {
    "handwritten": 0.16,  # int4 hidden layers
    "equinox_mlp": 0.03,
    "haiku_mlp": 0.08,  # fp8 has three bits of mantissa
    "linen_mlp": 0.03,
    "nnx_mlp": 0.19,  # int4 throughout
}


@pytest.mark.parametrize("name", sorted(LARGEST_ERROR))
def test_small_example_prints_its_plan_and_stays_close_to_float(name):
    library = {"equinox_mlp": "equinox", "haiku_mlp": "haiku"}.get(name)
    if library:
        pytest.importorskip(library)
    out = run(f"examples/{name}.py")
    error = float(re.search(r"relative error: ([\d.]+)", out)[1])
    assert 0 < error <= LARGEST_ERROR[name]
    assert len(out.splitlines()) > 5, "the plan was not printed"


def demo_rows(out: str) -> dict[tuple[str, str], tuple[int, float, float, float]]:
    """The table of the demo: (model, format) -> bytes, bits per weight, accuracy, agreement."""
    pattern = (
        r"^(ConvNet|Transformer) +(\w+(?: static)?) +([\d,]+) +([\d.]+) +([\d.]+)% +([\d.]+)%$"
    )
    return {
        (model, name): (int(size.replace(",", "")), float(bits), float(accuracy), float(agreement))
        for model, name, size, bits, accuracy, agreement in re.findall(pattern, out, re.MULTILINE)
    }


MODELS = ("ConvNet", "Transformer")


def check_demo(out: str, *, float_accuracy: float, models: tuple[str, ...] = MODELS) -> None:
    rows = demo_rows(out)
    assert {model for model, _ in rows} == set(models)
    for model in models:
        float_bytes, float_bits, accuracy, agreement = rows[model, "float32"]
        assert float_bits == 32 and agreement == 100
        assert accuracy >= float_accuracy
        for name, most_bits, least_agreement in (
            ("int8", 9.5, 98), ("int8 static", 9.5, 97), ("fp8", 9.5, 97),
            ("int4", 6, 96), ("int3", 5, 90),
        ):  # fmt: skip
            size, bits, quantized_accuracy, agreement = rows[model, name]
            points = {"int8": 0.5, "int8 static": 0.5, "int4": 1.5}.get(name, 100)
            assert quantized_accuracy >= accuracy - points, (model, name)
            assert size < float_bytes and bits <= most_bits, (model, name)
            assert agreement >= least_agreement, (model, name)


@pytest.mark.parametrize("model", MODELS)
def test_demo_quantizes_a_model_in_five_ways(model):
    out = run("demo/digits.py", "--quick", "--only", model)
    check_demo(out, float_accuracy=93, models=(model,))


@pytest.mark.long
def test_full_demo_reaches_97_percent_in_float_and_writes_its_page():
    report = ROOT / "demo" / "report.html"
    report.unlink(missing_ok=True)
    check_demo(run("demo/digits.py", timeout=600), float_accuracy=97)
    assert "int8 static" in report.read_text()


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_llama_tells_a_story(quantize):
    folder = data.fetch("stories15m")
    checkpoint, tokenizer = str(folder / "stories15M.bin"), str(folder / "tokenizer.bin")
    out = run("examples/llama.py", checkpoint, tokenizer, "--tokens", "60", "--quantize", quantize)
    story = out[: out.rindex(" tokens in ")].rstrip("0123456789")
    words = re.findall(r"[a-z]+", story.split("\n\n")[-2 if story.endswith("\n\n") else -1].lower())
    common = {"a", "and", "the", "was", "to", "she", "he", "they", "it", "in", "with", "her"}
    assert len(words) > 30
    assert sum(word in common for word in words) > len(words) / 6, story


def loss_rows(out: str) -> dict[str, tuple[float, float, float]]:
    """The table of the loss benchmark: name -> change of loss, its standard error, its bar."""
    number = r" +([+-]?[\d.]+)"
    rows = re.findall(rf"^(\S.*?) {{2,}}[\d.]+{number * 3}{number * 2}$", out, re.MULTILINE)
    return {
        name: (float(change), float(noise), float(bar)) for name, change, noise, bar, *_ in rows
    }


BARS = {"W8A8": 0.01, "int4 g32 absmax": 0.15, "int4 g32 mse": 0.12}


def test_stories15m_keeps_its_loss_on_two_thousand_tokens():
    data.fetch("stories15m")
    rows = loss_rows(run("bench/stories15m_loss.py", "--tokens", "2000", "--only", *BARS))
    assert {name: bar for name, (_, _, bar) in rows.items()} == BARS
    # A small sample strays from the bar by chance; the whole one below is held to it exactly.
    above = {name: row for name, row in rows.items() if row[0] > row[2] + 2 * row[1]}
    assert not above


@pytest.mark.long
def test_stories15m_keeps_its_loss_in_every_format():
    data.fetch("stories15m")
    rows = loss_rows(run("bench/stories15m_loss.py", timeout=1800))
    assert {name: rows[name][2] for name in BARS} == BARS
    above = {name: row for name, row in rows.items() if row[0] > row[2]}
    assert not above and len(rows) == 8
