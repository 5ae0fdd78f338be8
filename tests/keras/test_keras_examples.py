"""The Keras examples run offline: small models, and in long tests the real shapes."""

import pathlib
import re
import runpy
import sys

import pytest
from scripts import run

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = "examples/keras"
FLAGS = (
    "--xla_cpu_experimental_onednn_custom_call=true --xla_cpu_use_onednn=false "
    "--xla_cpu_experimental_ynn_fusion_type=invalid --xla_cpu_use_xnnpack=false "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitter"
)
# What libraries that examples use warn about is theirs to mend.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def call(monkeypatch, capsys):
    """Standard output of a script run in this process, which saves importing KerasHub again."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def script(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(ROOT / FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return script


def check_helloworld(out):
    assert "3 of 3 sites quantized" in out
    assert len(re.findall(r"^QStaticDense \.dense\S* a_scale=\[\S+\] w_scale=", out, re.M)) == 3
    assert 0 < float(re.search(r"relative error: ([\d.]+)", out)[1]) < 0.1


def test_helloworld(call):
    check_helloworld(call("helloworld.py"))


def test_saving(call):
    out = call("saving.py")
    plain, small = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes", out))
    assert small < 0.25 * plain
    assert "QDynamicConv2D" in out and "the same outputs to the bit: True" in out


def check_gemma(out, precision):
    number, text = r"\(([\d.]+) MiB, [\d.]+ s with compilation\)", r"(['\"].+['\"])"
    before = re.search(rf"^float {number}: {text}$", out, re.M)
    after = re.search(rf"^{precision} {number}: {text}$", out, re.M)
    assert "What is the capital of France?" in before[2]
    assert "What is the capital of France?" in after[2]
    assert float(after[1]) < 0.4 * float(before[1])


def check_vit(out, precision):
    seen = re.findall(rf"^(float|{precision}): class (\d+): [\d.]+%", out, re.M)
    assert [name for name, _ in seen] == ["float", precision]
    assert "parameter arrays are quantized" in out
    assert 0 < float(re.search(r"relative error: ([\d.]+)", out)[1]) < 0.3


def test_gemma(call):
    check_gemma(call("gemma/quantization.py", "--small", "-p", "int8"), "int8")


@pytest.mark.long
def test_vit(call):
    check_vit(call("vit/quantization.py", "--small", "-p", "int8"), "int8")


def said(out, word):
    return re.search(rf"^{word}: (.+)$", out, re.M)[1]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["int4", "fp8_e4m3"])
def test_a_prepared_gemma_answers_the_same_elsewhere(precision, tmp_path):
    preset = str(tmp_path / "gemma")
    flags = ("-p", precision, "-q", preset, "--small")
    prepared = run(f"{FOLDER}/gemma/prepare_static.py", *flags, timeout=600)
    used = run(f"{FOLDER}/gemma/use_static.py", "-q", preset, timeout=600)
    assert "Gemma3CausalLM in" in used and said(used, "answer") == said(prepared, "answer")


@pytest.mark.long
@pytest.mark.parametrize("precision", ["int8", "fp8_e5m2"])
def test_a_prepared_vit_sees_the_same_elsewhere(precision, tmp_path):
    file = str(tmp_path / "vit.keras")
    flags = ("-p", precision, "-q", file, "--small")
    prepared = run(f"{FOLDER}/vit/prepare_static.py", *flags, timeout=600)
    used = run(f"{FOLDER}/vit/use_static.py", "-q", file, timeout=600)
    assert "ViTImageClassifier" in used and said(used, "sees") == said(prepared, "sees")


@pytest.mark.long
def test_helloworld_runs_under_the_flags_for_fp8_units():
    assert FLAGS in " ".join((ROOT / "docs/keras.md").read_text().split())
    check_helloworld(run(f"{FOLDER}/helloworld.py", XLA_FLAGS=FLAGS))


@pytest.mark.long
def test_gemma_of_the_270m_shape():
    out = run(f"{FOLDER}/gemma/quantization.py", "--random", "-p", "int4", timeout=1800)
    check_gemma(out, "int4")


@pytest.mark.long
def test_vit_of_the_base_shape():
    out = run(f"{FOLDER}/vit/quantization.py", "--random", "-p", "int8", timeout=1800)
    check_vit(out, "int8")
