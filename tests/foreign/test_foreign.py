"""Programs that nobody here wrote, on fewbit and on Qwix: `make test-foreign`.

Each runs in an environment of its own, made by the Makefile from the files beside this one; one
that could not be made is skipped by name. Both runs of a program are of the same environment, which
has Qwix: `python -m fewbit.as_qwix` passes it by.
"""

import ast
import json
import os
import pathlib
import subprocess
import zipfile

import pytest

import fewbit

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = 1800  # seconds; the slowest takes one minute of an idle core


def python_of(name):
    """The interpreter of an environment that was made to its end."""
    folder = ROOT / f".venv-foreign-{name}"
    if not (folder / ".made").exists():
        pytest.skip(f"{folder.name} could not be made: `make .venv-foreign-{name}`")
    return folder / "bin" / "python"


def run(name, *command, cwd, on_fewbit=(), code=0):
    """One program in its environment; on fewbit with these options of ours."""
    # Plain settings: strict promotion and several devices are our own tests' business.
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    kept |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "DECOUPLE_GCLOUD": ""}
    ours = []
    if on_fewbit != ():
        kept |= {"PYTHONPATH": str(ROOT)}
        native = fewbit.kernels.info().path  # compiled against the same JAX
        kept |= {"FEWBIT_NATIVE_LIBRARY": str(native)} if native else {}
        ours = ["-m", "fewbit.as_qwix", *on_fewbit]
    words = [str(python_of(name)), *ours, *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=kept, timeout=LIMIT)
    assert done.returncode == code, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


# --- Tunix ----------------------------------------------------------------------------------------

# The first loss is of a model whose adapters do nothing yet; then adapters that begin otherwise
# learn. Their start is drawn by other keys.
SAME, LEARNED = 1e-5, 0.06
# Its weights are cast before they are multiplied: "astype requires ndarray or scalar arguments, got
# WithAux". The float model stands in.
FAILS_IN_QWIX = {("qwen3", "nf4"), ("qwen3", "int8")}


@pytest.fixture(scope="module")
def tunix(tmp_path_factory):
    folder, known = tmp_path_factory.mktemp("tunix"), {}

    def result(library, family, qtype=None):
        key = library, family, qtype
        if key not in known:
            ours = ("--plan", folder / f"{family}-{qtype}.json") if library == "fewbit" else ()
            words = [HERE / "tunix_lora.py", family, *([qtype] if qtype else [])]
            done = run("tunix", *words, cwd=folder, on_fewbit=ours)
            known[key] = json.loads(done.stdout.splitlines()[-1])
        return known[key]

    result.folder = folder
    return result


@pytest.mark.parametrize("qtype", [None, "nf4", "int8"])
@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma3"])
def test_tunix_trains_adapters(tunix, family, qtype):
    ours = tunix("fewbit", family, qtype)
    assert ours["losses"][-1] < ours["losses"][0] - 0.05
    plan = fewbit.Plan.from_json((tunix.folder / f"{family}-{qtype}.json").read_text())
    assert 2 * len(plan.adapters) == ours["adapters"] > 20
    stored = {leaf.path for leaf in plan.leaves if leaf.how is not None}
    assert stored == ({adapter.leaf for adapter in plan.adapters} if qtype else set())
    reference = (family, None if (family, qtype) in FAILS_IN_QWIX else qtype)
    theirs = tunix("qwix", *reference)
    same = SAME if reference == (family, qtype) else 0.02
    assert ours["losses"][0] == pytest.approx(theirs["losses"][0], rel=same)
    assert ours["losses"][-1] == pytest.approx(theirs["losses"][-1], abs=LEARNED)
    assert ours["adapters"] == theirs["adapters"]


# --- MaxText --------------------------------------------------------------------------------------

SETTINGS = """
decoder_block=llama2 base_emb_dim=128 base_mlp_dim=256 base_num_decoder_layers=2
base_num_query_heads=4 base_num_kv_heads=2 head_dim=32 vocab_size=512 max_target_length=64
per_device_batch_size=2 steps=5 hardware=cpu attention=dot_product dataset_type=synthetic
enable_checkpointing=false jax_cache_dir= dump_hlo_local_dir=dump
skip_jax_distributed_system=true enable_goodput_recording=false enable_tensorboard=false
""".split()
STEPS = 5
# Rounding to int8 alone moves these losses by 2e-3, with either library; in bfloat16 fp8 moves them
# by 1e-2, and in float32, where scales are as exact in Qwix as here, both libraries are the same.
NEAR = {"int8": 6e-3, "fp8_full": 1e-3}
DTYPE = {"fp8_full": ["dtype=float32"]}
DECODER = ("query", "key", "value", "out", "wi_0", "wi_1", "wo")


@pytest.fixture(scope="module")
def maxtext(tmp_path_factory):
    folder, known = tmp_path_factory.mktemp("maxtext"), {}
    (folder / "dump").mkdir()

    def result(library, quantization="", code=0, settings=()):
        key = library, quantization, *settings
        if key in known:
            return known[key]
        name = "-".join([library, quantization or "float", *settings]).replace("=", "-")
        ours = ("--plan", folder / f"{name}.json") if library == "fewbit" else ()
        python = python_of("maxtext")
        found = next(python.parents[1].glob("lib/python*/site-packages/maxtext/configs/base.yml"))
        wanted = [f"run_name={name}", "base_output_directory=out", f"metrics_file={name}.jsonl"]
        if quantization:
            wanted += ["use_qwix_quantization=True", f"quantization={quantization}"]
        train = ["-m", "maxtext.trainers.pre_train.train", found, *SETTINGS, *wanted, *settings]
        done = run("maxtext", *train, cwd=folder, on_fewbit=ours, code=code)
        if code:
            return done.stderr
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        known[key] = [json.loads(line)["learning/loss"] for line in lines]
        assert len(known[key]) == STEPS
        return known[key]

    result.folder = folder
    return result


@pytest.mark.parametrize("quantization", ["int8", "fp8_full"])
def test_maxtext_trains_as_with_qwix(maxtext, quantization):
    near, settings = NEAR[quantization], DTYPE.get(quantization, ())
    ours = maxtext("fewbit", quantization, settings=settings)
    theirs = maxtext("qwix", quantization, settings=settings)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, abs=near)
    plain = maxtext("qwix", settings=settings)
    assert ours != plain and ours[0] == pytest.approx(plain[0], abs=6e-3)


def test_maxtext_quantizes_every_product_of_its_decoder(maxtext):
    maxtext("fewbit", "int8")
    plan = fewbit.Plan.from_json((maxtext.folder / "fewbit-int8.json").read_text())
    layers = [row for row in plan.sites if row.quantized]
    assert {row.site.path.rpartition("/")[2] for row in layers} == set(DECODER)
    assert len(layers) == len(DECODER)  # one body for both layers: they are scanned
    for row in layers:
        assert (row.weight_qtype, row.act_qtype) == ("int8", "int8")
        assert row.dlhs.startswith("int8 x int8") and row.drhs.startswith("int8 x int8")
    left = {row.site.path.rpartition("/")[2] for row in plan.sites if not row.quantized}
    assert any("logits" in name or "embed" in name for name in left)


@pytest.mark.parametrize("quantization", ["fp8_gpu", "fp8_nanoo"])
def test_maxtext_is_told_what_cannot_be_run(maxtext, quantization):
    said = maxtext("fewbit", quantization, code=1)
    assert "flax_util.get_current_module() has no answer in fewbit" in said
    assert "act_calibration_method='delayed,1024'" in said


# --- vLLM on TPUs ---------------------------------------------------------------------------------

RULES = [
    fewbit.QuantizationRule(module_path=".*/router"),
    fewbit.QuantizationRule(module_path="layers/.*", op_names=("einsum",), weight_qtype="int4",
                            tile_size=128, weight_calibration_method="minmax"),
    fewbit.QuantizationRule(weight_qtype="fp8", act_qtype="fp8", act_batch_axes=(0, 1),
                            act_calibration_method="absmax,0.9"),
]  # fmt: skip
PARSER = "tpu_inference/models/jax/utils/qwix/qwix_utils.py"


def parser_of_vllm(qwix):
    """The function of the published wheel that reads rules, taken out of its file."""
    wheels = sorted((ROOT / "build" / "foreign").glob("tpu_inference-*.whl"))
    if not wheels:
        pytest.skip("the wheel of tpu-inference could not be fetched: `make build/foreign`")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        tree = ast.parse(wheel.read(PARSER))
    wanted = "parse_qwix_config_to_rules"
    (function,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == wanted]
    space = {"qwix": qwix, "List": list}
    exec(compile(ast.Module([function], []), PARSER, "exec"), space)
    return space[wanted]


def test_vllm_reads_our_rules():
    fewbit.install_as_qwix()
    import qwix

    assert parser_of_vllm(qwix)(fewbit.rules_to_vllm(RULES)) == RULES


def test_qwix_itself_reads_our_rules(tmp_path):
    code = (
        "import json, sys, qwix\n"
        "for fields in json.loads(sys.argv[1]):\n"
        "    rule = qwix.QuantizationRule(**fields)\n"
        "    print(rule.module_path, list(rule.op_names), rule.weight_qtype)\n"
    )
    words = ["-c", code, json.dumps(fewbit.rules_to_vllm(RULES))]
    found = run("tunix", *words, cwd=tmp_path).stdout.splitlines()
    assert found == [
        ".*/router [] None",
        "layers/.* ['einsum'] int4",
        ".* [] float8_e4m3fn",
    ]
