"""`import qwix` after `install_as_qwix`: what is found, and what is said where nothing is."""

import importlib
import importlib.util
import inspect
import pkgutil
import sys
import types
import warnings

import jax.numpy as jnp
import pytest
from helpers import says
from qwix_away import is_ours
from qwix_away import qwix as qwix
from qwix_away import without_qwix as without_qwix

import fewbit


def test_installing_twice_is_installing_once(qwix):
    before = list(sys.meta_path)
    fewbit.install_as_qwix()
    assert sys.meta_path == before and importlib.import_module("qwix") is qwix
    assert sum(is_ours(finder) for finder in before) == 1


def test_qwix_itself_was_imported_first(without_qwix, monkeypatch):
    real = types.ModuleType("qwix")
    real.__file__ = "/site-packages/qwix/__init__.py"
    monkeypatch.setitem(sys.modules, "qwix", real)
    with says(
        ImportError,
        "Qwix itself has been imported already (from /site-packages/qwix/__init__.py)",
        "Call fewbit.install_as_qwix() before the first `import qwix`",
        "python -m fewbit.as_qwix SCRIPT.py ARGS",
    ):
        fewbit.install_as_qwix()
    assert not any(is_ours(finder) for finder in sys.meta_path)


def test_a_submodule_of_qwix_itself_was_imported_first(without_qwix, monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix.pallas", types.ModuleType("qwix.pallas"))
    with says(ImportError, "Qwix itself has been imported already,"):
        fewbit.install_as_qwix()


def test_installed_qwix_is_passed_by(without_qwix, tmp_path, monkeypatch):
    (tmp_path / "qwix").mkdir()
    (tmp_path / "qwix" / "__init__.py").write_text("raise SystemExit('the other one')")
    (tmp_path / "qwix" / "extra.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    fewbit.install_as_qwix()
    import qwix

    assert qwix.QArray is fewbit.QArray
    with pytest.raises(ModuleNotFoundError, match="has no 'extra' in qwix"):
        importlib.import_module("qwix.extra")


@pytest.mark.parametrize(
    ("line", "sentences"),
    [
        ("from qwix import quantise_model", ["no 'quantise_model' in qwix.", "'quantize_model'?"]),
        ("from qwix import HowToQuantize", ["It is in qwix._src.core.qarray."]),
        ("import qwix._src.core.qaray", ["no 'qaray' in qwix._src.core. Did you mean 'qarray'?"]),
        ("import qwix._src.corr.qarray", ["no 'corr' in qwix._src. Did you mean 'core'?"]),
        ("from qwix.pallas import pallas_cal", ["Did you mean 'pallas_call'?"]),
        ("import qwix.qarray", ["no 'qarray' in qwix. It is in qwix._src.core."]),
        ("import qwix.dot_general", ["is a name in qwix and no module", "from qwix import dot_g"]),
        ("from qwix._src.core.numerics import xyzzy", ["dir(qwix._src.core.numerics) lists"]),
    ],
)
def test_a_name_that_is_not_there_in_an_import(line, sentences):
    with says(ModuleNotFoundError, *sentences):
        exec(line)


def test_a_name_that_is_not_there_as_an_attribute(qwix):
    with says(AttributeError, "no 'quantise' in qwix. Did you mean 'quantize'?"):
        qwix.quantise  # noqa: B018
    assert not hasattr(qwix, "xyzzy") and not hasattr(qwix, "__wrapped__")
    assert getattr(qwix._src.core.qarray, "nothing", None) is None


def test_programs_may_ask_what_is_there(qwix):
    assert importlib.util.find_spec("qwix.pallas").origin == "fewbit"
    try:
        from qwix._src.utils import flax_util
    except ImportError:
        from qwix._src import flax_util
    assert flax_util.__name__ == "qwix._src.utils.flax_util"


def test_a_name_that_the_program_replaces(qwix):
    from qwix._src.utils import flax_util

    original = flax_util.find_param
    with pytest.warns(UserWarning, match="replaces qwix._src.utils.flax_util.find_param, which no"):
        flax_util.find_param = lambda x, kind=None: original(x, kind)
    with pytest.raises(NotImplementedError, match="a stored weight is a fewbit.QArray"):
        flax_util.find_param(1)
    with pytest.warns(UserWarning, match="It stands for fewbit.quantize"):
        qwix.quantize = print
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qwix.something_of_its_own = 1
    assert fewbit.quantize is not print


def test_what_was_replaced_is_put_back_without_a_word(qwix):
    from qwix._src.utils import flax_util

    original = flax_util.find_param
    with pytest.warns(UserWarning, match="replaces qwix._src.utils.flax_util.find_param"):
        flax_util.find_param = print
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flax_util.find_param = original


def test_refused_names_that_are_asked_for_as_classes(qwix):
    from qwix._src.utils.flax_util import find_param

    for use in (
        lambda: isinstance(1, find_param),
        lambda: issubclass(int, find_param),
        lambda: type("Mine", types.resolve_bases((find_param,)), {}),
    ):
        with says(NotImplementedError, "qwix._src.utils.flax_util.find_param is not in fewbit: "):
            use()


def test_settings_that_have_one_value(qwix):
    from qwix._src.core import qarray

    assert qarray.USE_RECIPROCAL_FOR_QUANTIZATION is False
    qarray.USE_RECIPROCAL_FOR_QUANTIZATION = False
    with says(
        NotImplementedError,
        "qwix._src.core.qarray.USE_RECIPROCAL_FOR_QUANTIZATION is False in fewbit and cannot be "
        "True: fewbit divides by the scale",
    ):
        qarray.USE_RECIPROCAL_FOR_QUANTIZATION = True
    assert qarray.USE_RECIPROCAL_FOR_QUANTIZATION is False and qwix.__version__ == "0.1.8"
    with says(NotImplementedError, "cannot be 3: it is a name for annotations."):
        qarray.ShapeT = 3


def test_modules_are_reloaded_and_gone_through_as_others_are(qwix):
    found = qwix.QArray
    assert importlib.reload(qwix) is qwix and qwix.QArray is found
    inner = importlib.import_module("qwix._src.core.qarray")
    assert importlib.reload(inner) is inner and inner.QArray is found
    space = {}
    exec("import qwix._src.core\nfound = qwix._src.core.qarray.QArray", space)
    assert space["found"] is found
    assert "class QArray" in inspect.getsource(found)
    assert inspect.getmodule(found).__name__.startswith("fewbit.")
    assert not list(pkgutil.walk_packages(qwix.__path__, "qwix."))


def test_quantized_values_are_pickled_by_names_of_fewbit(qwix):
    import pickle

    from qwix.contrib.gptq import GptqRule

    assert pickle.loads(pickle.dumps(GptqRule)) is GptqRule
    x = qwix.quantize(jnp.ones((2, 8)), "int8")
    assert (pickle.loads(pickle.dumps(x)).qvalue == x.qvalue).all()
    assert b"qwix" not in pickle.dumps(x)
    rule = qwix.QtRule(weight_qtype="int8")
    assert b"qwix" not in pickle.dumps(rule) and pickle.loads(pickle.dumps(rule)) == rule
