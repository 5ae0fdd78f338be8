"""A character model trained in few bits: the bars at a small size, and the script behind them."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import char_lm  # noqa: E402
import train_char_lm  # noqa: E402

SMALL = char_lm.Size(
    layers=1, width=64, heads=2, context=32, batch=16, steps=200, learning_rate=1e-2
)
BLOCKS = 70
WORDS = "the king queen shall come to rome and speak of war peace my lord good night".split()


def small_text() -> char_lm.Text:
    """Forty sentences over and over: a small model soon knows them, and rounding shows."""
    random = np.random.default_rng(0)
    sentences = [" ".join(random.choice(WORDS, 7)) + ". " for _ in range(40)]
    return char_lm.text_of("forty sentences", "".join(random.choice(sentences, 1500)))


@pytest.fixture(autouse=True)
def loose_promotion():
    """optax adds counters to floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def options(size: char_lm.Size) -> list[str]:
    pairs = size._asdict().items()
    return [word for k, v in pairs for word in ("--" + k.replace("_", "-"), str(v))]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("char-lm")
    where = folder / "results.json", folder / "keep"
    return train_char_lm.Lab(small_text(), SMALL, *where, BLOCKS)


def loss_of(lab, name: str, seed: int = 0) -> float:
    """Trained once for the whole file."""
    if seed not in train_char_lm.losses(lab).get(name, {}):
        train_char_lm.add_record(lab, train_char_lm.run(lab, name, seed))
    return train_char_lm.losses(lab)[name][seed]["loss"]


def test_without_a_file_the_text_is_pythons_own_manual(monkeypatch, tmp_path):
    monkeypatch.setenv("FEWBIT_DATA", str(tmp_path))
    monkeypatch.setattr(char_lm, "ROOT", tmp_path / "project")
    assert char_lm.find_text().name == "the manual in pydoc_data"
    (tmp_path / "tinyshakespeare.txt").write_text("to be or not to be\n", encoding="utf-8")
    text = char_lm.find_text()
    assert text.name == "tinyshakespeare" and text.characters == "\n benort"
    assert len(text.train) == 17 and len(text.validation) == 2
    (tmp_path / "own.txt").write_text("abcabcabcabc", encoding="utf-8")
    assert char_lm.find_text(tmp_path / "own.txt").name == "own.txt"


def test_every_configuration_of_a_seed_sees_the_same_batches(lab):
    first, again, other = (
        [np.asarray(ids) for ids in char_lm.batches(lab.text, SMALL, seed)] for seed in (0, 0, 1)
    )
    assert len(first) == SMALL.steps and first[0].shape == (SMALL.batch, SMALL.context + 1)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert not any((a == b).all() for a, b in zip(first, other, strict=True))


def test_the_model_does_not_look_ahead(lab):
    variables = jax.jit(lab.model.init)(jax.random.key(0), lab.example)
    changed = lab.example.copy()
    changed[0, 20] = (changed[0, 20] + 1) % len(lab.text.characters)
    apply = jax.jit(lab.model.apply)
    a, b = (np.asarray(apply(variables, ids)) for ids in (lab.example, changed))
    np.testing.assert_array_equal(a[:, :20], b[:, :20])
    assert (a[:, 20:] != b[:, 20:]).any(axis=-1).all()


def test_the_model_has_about_a_million_parameters():
    model = char_lm.Decoder(65, char_lm.Size())
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 128), np.int32))
    assert 0.9e6 < sum(x.size for x in jax.tree.leaves(shapes)) < 1.1e6


def test_validation_loss_is_the_mean_over_all_characters(lab):
    """The reference has no groups and no filling up: one block at a time, in float64."""
    variables = jax.jit(lab.model.init)(jax.random.key(3), lab.example)
    apply, total, span = jax.jit(lab.model.apply), [], SMALL.context
    for i in range(BLOCKS):
        ids = lab.text.validation[i * span : (i + 1) * span + 1]
        logits = np.asarray(apply(variables, ids[None, :-1])[0], np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        total += [-log_p[t, ids[t + 1]] for t in range(span)]
    assert BLOCKS % 64, "the last group must be one that is filled up"
    assert lab.judge(lab.model, variables) == pytest.approx(np.mean(total), abs=1e-5)


@pytest.mark.parametrize(("name", "most"), [("int8", 0.03), ("fp8", 0.06)])
def test_training_in_eight_bits_reaches_the_loss_of_float32(lab, name, most):
    reached = loss_of(lab, "float32")
    assert reached < 0.7, "float32 learns: it begins at 3"
    assert abs(loss_of(lab, name) - reached) < most


def test_int4_training_beats_rounding_to_int4_and_converts_without_a_difference(lab):
    assert loss_of(lab, "int4-qat") < loss_of(lab, "int4-ptq")
    record = train_char_lm.losses(lab)["int4-qat"][0]
    # Packed weights may be summed in another order; plain ones give the same bits.
    assert record["loss"] == pytest.approx(record["before_conversion"], abs=1e-5)


def test_two_bit_training_is_far_below_the_best_rounding_to_two_bits(lab, monkeypatch):
    fewer = train_char_lm.CONFIGS["int2-ptq"]._replace(methods=("absmax", "mse"))
    monkeypatch.setitem(train_char_lm.CONFIGS, "int2-ptq", fewer)
    assert loss_of(lab, "int2-qat") < loss_of(lab, "int2-ptq") - 0.03
    record = train_char_lm.losses(lab)["int2-ptq"][0]
    assert set(record["of_method"]) == {"absmax", "mse"}
    assert record["loss"] == min(record["of_method"].values())


def test_a_finished_run_is_not_trained_again(lab, tmp_path, monkeypatch):
    loss = loss_of(lab, "float32")
    monkeypatch.setattr(char_lm, "train", lambda *a, **k: pytest.fail("trained again"))
    again = lab._replace(results=tmp_path / "new.json")  # parameters are there, losses are not
    record = train_char_lm.run(again, "float32", 0)
    assert record["seconds"] is None and record["loss"] == loss
    train_char_lm.add_record(again, record)
    longer = again._replace(size=SMALL._replace(steps=61))
    assert train_char_lm.losses(longer) == {}, "other settings are other results"
    assert list(train_char_lm.losses(again)) == ["float32"]


def made_up(lab, path, losses: dict[str, float]):
    lab = lab._replace(results=path)
    for name, loss in losses.items():
        train_char_lm.add_record(lab, {"config": name, "seed": 0, "loss": loss})
    return lab


def test_the_table_says_which_bars_are_met(lab, tmp_path):
    good = {"float32": 1.5, "int8": 1.51, "int4-qat": 1.54, "int4-ptq": 1.6}
    bad = {"float32": 1.5, "int8": 1.53, "int4-qat": 1.54, "int4-ptq": 1.53}
    text = train_char_lm.table(made_up(lab, tmp_path / "good.json", good))
    assert re.search(
        r"^int8 everywhere +1.5100 +1.5100 +\+0.0100 +float32 \+0.02 +yes$", text, re.M
    )
    assert re.search(r"float32 \+0.05; below int4-ptq +yes; yes$", text, re.M)
    text = train_char_lm.table(made_up(lab, tmp_path / "bad.json", bad), markdown=True)
    assert "| int8 everywhere | 1.5300 | 1.5300 | +0.0300 | float32 +0.02 | NO |" in text
    assert "| float32 +0.05; below int4-ptq | yes; NO |" in text
    assert "steps on forty sentences" in text


def test_the_table_goes_between_the_marks_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- table: char-lm -->\nold\n<!-- end of table -->\nAfter.\n")
    train_char_lm.put(page, "| new |")
    marks = "<!-- table: char-lm -->\n\n| new |\n\n<!-- end of table -->"
    assert page.read_text() == f"Before.\n{marks}\nAfter.\n"
    page.write_text("No marks.\n")
    with pytest.raises(SystemExit, match="has no place for the table: write <!-- table: char-lm"):
        train_char_lm.put(page, "| new |")
    assert page.read_text() == "No marks.\n"


def example(script: str, *arguments: str, timeout: float = 300) -> str:
    """Standard output of an example in a new process, with one device, as a user has."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    flags = environment.get("XLA_FLAGS", "").split()
    environment["XLA_FLAGS"] = " ".join(flag for flag in flags if "device_count" not in flag)
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, f"{script} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_script_trains_writes_and_goes_on(tmp_path):
    text = tmp_path / "words.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400, encoding="utf-8")
    size = SMALL._replace(width=32, steps=3)
    common = [*options(size), "--text", str(text), "--seeds", "0", "--keep", str(tmp_path / "keep")]
    common += ["--results", str(tmp_path / "results.json")]
    out = example("train_char_lm.py", *common, "--configs", "float32")
    assert re.findall(r"^([\w-]+), seed 0: \d\.\d{4}$", out, re.M) == ["float32"]
    assert "after 3 steps on words.txt" in out
    records = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [r["config"] for r in records] == ["float32"]
    out = example("train_char_lm.py", *common, "--configs", "float32", "int4-ptq", "--markdown")
    assert re.findall(r"^([\w-]+), seed 0: ", out, re.M) == ["int4-ptq"]
    assert re.search(r"^\| int4 PTQ \| [\d.]+ \| [\d.]+ \| [+-][\d.]+ \|", out, re.M)


@pytest.mark.long
def test_distillation_brings_two_bits_closer_to_the_float_model():
    out = example("distill_qat.py", "--steps", "40")
    far = dict(re.findall(r"^2-bit (\w+): ([\d.]+) nats", out, re.M))
    assert 0 < float(far["distilled"]) < 0.7 * float(far["rounded"])


@pytest.mark.long
def test_the_whole_table_meets_every_bar(tmp_path):
    """1,000 steps, 3 seeds, every configuration: most of an hour."""
    where = ["--results", str(tmp_path / "results.json"), "--keep", str(tmp_path / "keep")]
    out = example("train_char_lm.py", *where, timeout=4 * 3600)
    assert len(re.findall(r"yes", out)) == 5 and "NO" not in out, out
