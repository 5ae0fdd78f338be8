"""`python -m fewbit.as_qwix`: programs find what they would find under Python itself."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import fewbit

ROOT = pathlib.Path(__file__).resolve().parents[2]

PROBE = """
import atexit, json, sys
import qwix
import helper_of_probe
atexit.register(lambda: print(json.dumps(left_by_the_end)))
left_by_the_end = "still here"
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "main": vars(main) is globals(),
    "file": __file__, "package": __package__, "spec": getattr(__spec__, "name", None),
    "qwix": qwix.quantize.__module__,
}))
if len(sys.argv) > 1 and sys.argv[1] == "raise":
    raise KeyError("mine")
sys.exit(len(sys.argv) - 1)
"""
MODELS = """
import jax, jax.numpy as jnp, qwix
from flax import linen as nn, nnx

x = jnp.ones((2, 8))
rules = [qwix.QuantizationRule(weight_qtype="int8")]
for _ in range(2):  # once more to the same plan
    linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    qwix.quantize_model(linear, qwix.PtqProvider(rules), x)
provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=4.0)
qwix.apply_lora_to_model(linear, provider, x, rngs=nnx.Rngs(1))
dense = qwix.quantize_model(nn.Dense(3), qwix.PtqProvider(rules))
dense.apply(dense.init(jax.random.key(0), x), x)
qwix.quantize_model(nn.Dense(5), qwix.PtqProvider(rules))
"""
ONE = """
import jax.numpy as jnp, qwix
from flax import nnx

model, rules = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), [qwix.QuantizationRule(weight_qtype="int8")]
print(qwix.quantize_model(model, qwix.PtqProvider(rules), jnp.ones((2, 8))).kernel.shape)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "helper_of_probe.py").write_text("")
    (tmp_path / "models.py").write_text(MODELS)
    package = tmp_path / "work" / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import qwix\n")
    (package / "inner.py").write_text(PROBE)
    (tmp_path / "work" / "helper_of_probe.py").write_text("")
    return tmp_path


def run(folder, *arguments, module="fewbit.as_qwix", code=0):
    command = [sys.executable, *(["-m", module] if module else []), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder / "work", timeout=240
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def without_qwix(source):
    """The program under Python itself, where there is no qwix."""
    lines = [line for line in source.splitlines() if "qwix" not in line]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "arguments", [["../probe.py", "--plan", "x"], ["-m", "package.inner", "x"]]
)
def test_a_program_finds_what_python_gives_it(folder, arguments):
    ours = run(folder, *arguments, code=len(arguments) - 1 - ("-m" in arguments)).stdout
    for file in (folder / "probe.py", folder / "work" / "package" / "inner.py"):
        file.write_text(without_qwix(PROBE))
    (folder / "work" / "package" / "__init__.py").write_text("")
    code = len(arguments) - 1 - ("-m" in arguments)
    theirs = run(folder, *arguments, module=None, code=code).stdout
    found, wanted = (json.loads(out.splitlines()[0]) for out in (ours, theirs))
    assert found.pop("qwix").startswith("fewbit.")
    assert found == wanted
    assert ours.splitlines()[1:] == theirs.splitlines()[1:] == ['"still here"']


def test_a_program_that_raises(folder):
    done = run(folder, "../probe.py", "raise", code=1)
    assert done.stderr.rstrip().endswith("KeyError: 'mine'") and "still here" in done.stdout
    shown = r'probe.py", line \d+, in <module>\n    raise KeyError\("mine"\)'
    assert re.search(shown, done.stderr)


@pytest.mark.parametrize(
    ("argument", "code", "said"), [("None", 0, ""), ("4", 4, ""), ("'no more'", 1, "no more\n")]
)
def test_a_program_that_ends_itself(folder, argument, code, said):
    (folder / "work" / "ends.py").write_text(f"import qwix\nraise SystemExit({argument})")
    for words in (["ends.py"], ["-m", "ends"]):
        assert run(folder, *words, code=code).stderr == said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no program to run: name a script, or a module after -m."),
        (["--plam", "f", "x.py"], "unknown option '--plam'. Did you mean '--plan'?"),
        (["--plan"], "--plan needs a FILE after it."),
        (["-m"], "-m needs a MODULE after it."),
        (["nothing.py"], "can't open file 'nothing.py': No such file or directory."),
        (
            ["package.inner"],
            "can't open file 'package.inner': No such file or directory. A module is named after "
            "-m: -m package.inner.",
        ),
        (["--plan", "no/p.json", "../probe.py"], "--plan no/p.json: there is no folder /"),
        (
            ["--plan", ".", "../probe.py"],
            "--plan .: this is a folder. Name a file in it, as ./plan",
        ),
        (["-m", "nothing.at.all"], "no module named 'nothing.at.all'."),
        (["-m", "package"], "'package' is a package without a __main__ and cannot be run."),
    ],
)
def test_what_is_wrong_with_a_command_line(folder, arguments, sentence):
    done = run(folder, *arguments, code=2)
    assert done.stderr.startswith("usage: python -m fewbit.as_qwix [options] SCRIPT.py [ARGS ...]")
    assert f"fewbit.as_qwix: {sentence}" in done.stderr and not done.stdout


def test_help(folder):
    out = run(folder, "--help").stdout
    assert "--plan FILE" in out and "-m MODULE [ARGS ...]" in out
    assert run(folder, "-h").stdout == out


def test_a_folder_is_a_program_too(folder):
    program = folder / "program"
    program.mkdir()
    lines = "import os, sys, qwix\nprint(sys.argv, qwix.__name__, os.getcwd() in sys.path)"
    (program / "__main__.py").write_text(lines)
    assert run(folder, program, "a").stdout == f"['{program}', 'a'] qwix False\n"


def test_a_module_that_cannot_import_something_of_its_own(folder):
    (folder / "work" / "broken.py").write_text("import nowhere_to_be_found")
    done = run(folder, "-m", "broken", code=1)
    assert "No module named 'nowhere_to_be_found'" in done.stderr


@pytest.mark.parametrize("options", [[], ["--plan", "plan.json"]])
def test_a_program_may_set_up_jax_before_it_is_imported(folder, options):
    lines = ["import sys", "import qwix, qwix._src.core.qarray", "print('jax' in sys.modules)"]
    (folder / "first.py").write_text("\n".join(lines))
    assert run(folder, *options, "../first.py").stdout == "False\n"


def test_plans_of_the_models_that_a_program_quantizes(folder):
    done = run(folder, f"--plan={folder / 'plan.json'}", folder / "models.py")
    names = ["plan.json", "plan-2.json", "plan-3.json"]
    assert sorted(path.name for path in folder.glob("plan*")) == sorted(names)
    plans = [fewbit.Plan.from_json((folder / name).read_text()) for name in names]
    assert [plan.kind for plan in plans] == ["nnx", "nnx", "linen"]
    assert [len(plan.adapters) for plan in plans] == [0, 1, 0]
    assert [str(plan.leaf("kernel").how.qtype) for plan in (plans[0], plans[2])] == ["int8", "int8"]
    lines = [line for line in done.stderr.splitlines() if line.startswith("fewbit: ")]
    assert lines[0].startswith("fewbit: plan of Linear: 1 of 1 Sites quantized, written to ")
    assert "Dense was quantized but never called, so its plan is not known" in lines[-1]


def test_a_program_without_a_model_has_no_plan(folder):
    done = run(folder, "--plan", "plan.json", "../probe.py")
    assert "the program quantized no model, so no plan was written" in done.stderr
    assert not (folder / "work" / "plan.json").exists()


def test_a_plan_is_written_where_the_program_was_started(folder):
    (folder / "goes.py").write_text(f"import os\nos.chdir('/'){ONE}")
    run(folder, "--plan", "plan.json", "../goes.py")
    assert (folder / "work" / "plan.json").exists()


def test_a_plan_that_cannot_be_written_is_told_and_the_program_goes_on(folder):
    (folder / "work" / "gone").mkdir()
    (folder / "goes.py").write_text(f"import os\nos.rmdir('gone'){ONE}")
    done = run(folder, "--plan", "gone/plan.json", "../goes.py")
    assert "gone/plan.json: no plan of Linear: FileNotFoundError: " in done.stderr
    assert done.stdout == "(8, 4)\n"


SPAWNS = """
import multiprocessing, threading
import qwix

def work(put):
    import qwix._src.core.qarray as qarray
    put(qarray.QArray.__module__ + " " + qwix.__spec__.origin)

if __name__ == "__main__":
    found = []
    thread = threading.Thread(target=work, args=(found.append,))
    thread.start()
    thread.join()
    assert found == ["fewbit.qarray._type fewbit"], found
    queue = multiprocessing.get_context("fork").SimpleQueue()
    process = multiprocessing.get_context("fork").Process(target=work, args=(queue.put,))
    process.start()
    assert queue.get() == found[0]
    process.join()
    child = multiprocessing.get_context("spawn").Process(target=work, args=(print,))
    child.start()
    child.join()
    print("spawned:", child.exitcode)
"""


def test_threads_and_forks_find_it_and_what_is_spawned_begins_anew(folder):
    """As docs/as-qwix.md says; with the line in the program a spawned process finds it, too."""
    (folder / "spawns.py").write_text(SPAWNS)
    assert run(folder, "../spawns.py").stdout == "spawned: 1\n"
    line = "import fewbit; fewbit.install_as_qwix(); import qwix\n"
    (folder / "spawns.py").write_text(SPAWNS.replace("import qwix\n", line, 1))
    out = run(folder, "../spawns.py", module=None).stdout
    assert out == "fewbit.qarray._type fewbit\nspawned: 0\n"
