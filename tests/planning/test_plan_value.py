"""The Plan as a value: ids, totals, bytes, JSON, differences, and how it looks at any width."""

import json

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fewbit
from fewbit._util import _text
from fewbit.planning._plan import Plan
from fewbit.planning._rows import LeafPlan, SitePlan, stored_bytes
from fewbit.planning._table import number_ranges
from fewbit.qarray import HowToQuantize, quantize_with
from fewbit.rules import LoraRule, QtRule, QuantizationRule
from fewbit.tracing import ArrayInfo, Site

INT8 = HowToQuantize(qtype="int8", channelwise_axes=(1,))
INT4 = HowToQuantize(qtype="int4", channelwise_axes=(1,), tiled_axes={0: 32}, scale_dtype="float16")
RULES = (
    QuantizationRule(module_path=".*head"),
    QuantizationRule(weight_qtype="int8", act_qtype="int8"),
    QuantizationRule(module_path="nowhere/.*", weight_qtype="int4", tile_size=32),
)


def info(*shape):
    return ArrayInfo(shape, "float32")


def site(path, k=64, n=128, op="dot_general", method="__call__", **kwargs):
    kwargs.setdefault("weight", f"{path}/kernel" if path else "kernel")
    return Site(
        path, op, 0, method, "Dense",
        lhs=info(8, k), rhs=info(k, n), out=info(8, n), macs=8 * k * n,
        weight_side="rhs", spec="bk,kn->bn", **kwargs,
    )  # fmt: skip


def quantized(a_site, notes=()):
    return SitePlan(a_site, 1, "int8", "int8", "dynamic", "per-channel", "native int8", None, notes)


def left_alone(a_site, reason, rule=0):
    return SitePlan(a_site, rule, None, None, None, "", "xla float32", reason)


def leaf(path, shape, how=None, sites=(), rule=None):
    return LeafPlan(
        path, shape, "float32", how,
        stored_bytes(shape, None), stored_bytes(shape, how), sites, rule,
    )  # fmt: skip


def small_plan(layers=6, kind="linen"):
    paths = [f"decoder/layers/{i}/mlp/{name}" for i in range(layers) for name in ("up", "down")]
    sites = [quantized(site(path)) for path in paths]
    head = left_alone(
        site("head", n=1000), "rule 0 switches it off: its weight_qtype is None, which opts out"
    )
    leaves = [
        leaf(f"{path}/kernel", (64, 128), INT8, (planned.site.id,), RULES[1])
        for path, planned in zip(paths, sites, strict=True)
    ]
    leaves += [leaf(f"{path}/bias", (128,)) for path in paths]
    leaves += [leaf("head/kernel", (64, 1000), None, (head.site.id,))]
    notes = ("opaque: pallas_call in decoder/layers/0/attention (flash_attention) stays as it is",)
    return Plan(RULES, (*sites, head), tuple(leaves), notes, (2,), kind)


# --- identity and totals --------------------------------------------------------------------------


def test_sites_are_named_by_method_path_op_and_number():
    assert site("mlp/up").id == "mlp/up:dot_general0"
    assert site("").id == ":dot_general0"
    assert site("mlp", method="encode").id == "encode.mlp:dot_general0"
    assert site("mlp").op_id == "dot_general0"


def test_totals_add_up():
    totals = small_plan(layers=2).totals
    assert (totals.sites, totals.quantized_sites) == (5, 4)
    assert totals.parameters == 4 * 64 * 128 + 4 * 128 + 64_000
    assert totals.quantized_parameters == 4 * 64 * 128
    assert totals.bytes_before == 4 * totals.parameters
    assert totals.bytes_after == 4 * (64 * 128 + 4 * 128) + 4 * (4 * 128 + 64_000)
    assert totals.bits_per_weight == 8 + 32 / 64
    assert totals.share_of_macs == 4 * 128 / (4 * 128 + 1000)


def test_an_empty_plan_has_no_division_by_zero():
    plan = Plan(rules=(), sites=(), leaves=())
    assert plan.totals.bits_per_weight == plan.totals.share_of_macs == 0.0
    assert "no sites" in str(plan) and plan._repr_html_()


def test_plans_are_hashable_values():
    assert small_plan() == small_plan() and hash(small_plan()) == hash(small_plan())
    assert small_plan() != small_plan(kind="nnx")


def test_looking_up_a_parameter():
    plan = small_plan()
    path = "decoder/layers/3/mlp/up/kernel"
    assert plan.how(path) == INT8 and plan.leaf(path).rule == RULES[1]
    assert plan.how("head/kernel") is None
    with pytest.raises(KeyError, match="no parameter 'decoder/layer/3/mlp/up/kernel'.*nearest"):
        plan.how("decoder/layer/3/mlp/up/kernel")


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, how, dtype, expected",
    [
        ((4, 6), None, "bfloat16", 48),
        ((), None, "float32", 4),
        ((64, 128), INT8, "float32", 64 * 128 + 128 * 4),
        ((64, 128), INT8, "bfloat16", 64 * 128 + 128 * 2),
        ((64, 128), INT4, "float32", 64 * 64 + 2 * 128 * 2),
        ((100, 8), INT4, "float32", 100 * 4 + 4 * 8 * 2),
        ((4, 7), HowToQuantize(qtype="int3"), "float32", 4 * 3 + 4),
        ((64, 32), HowToQuantize(qtype="mxfp4", tiled_axes={0: 32}, channelwise_axes=(1,)),
         "float32", 64 * 16 + 2 * 32),
        ((64, 32), HowToQuantize(qtype="nvfp4", tiled_axes={0: 16}, channelwise_axes=(1,)),
         "float32", 64 * 16 + 4 * 32 + 4),
        ((8, 10), HowToQuantize(qtype="int8", channelwise_axes=(1,), calibration_method="minmax"),
         "float32", 80 + 10 * 4 + 10),
        ((8, 10), HowToQuantize(qtype="int4", channelwise_axes=(1,), calibration_method="minmax"),
         "float32", 40 + 10 * 4 + 5),
        ((8, 10), HowToQuantize(qtype="int8", channelwise_axes=(1,), calibration_method="fixed,3"),
         "float32", 80 + 4),
    ],
)  # fmt: skip
def test_stored_bytes_counts_every_part(shape, how, dtype, expected):
    assert stored_bytes(shape, how, dtype) == expected


@pytest.mark.parametrize("how", [INT8, INT4, HowToQuantize(qtype="nf4", tiled_axes={0: 16})])
def test_stored_bytes_is_what_is_stored(how):
    array = jnp.ones((64, 32), jnp.float32)
    assert stored_bytes((64, 32), how) == quantize_with(array, how).nbytes


# --- JSON -----------------------------------------------------------------------------------------

_SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
_ARRAYS = st.builds(ArrayInfo, _SHAPES, st.sampled_from(["float32", "bfloat16"]))
_WORDS = st.text(max_size=6)
_HOWS = st.sampled_from(
    [
        None,
        INT8,
        INT4,
        HowToQuantize(qtype="nvfp4", tiled_axes={0: 16}),
        HowToQuantize(qtype="fp8", tiled_axes={0: 0.25, 1: 1}, calibration_method="rms,7"),
    ]
)
_RULES = st.sampled_from(
    [
        *RULES,
        QtRule(weight_qtype="nf4", tile_size=1.0),
        LoraRule(rank=2, alpha=1.5, lora_a_initializer="normal"),
    ]
)
_SITES = st.builds(
    Site, _WORDS, _WORDS, st.integers(0, 9), _WORDS, _WORDS,
    lhs=_ARRAYS, rhs=_ARRAYS, out=_ARRAYS, macs=st.integers(0, 2**70), trips=st.integers(1, 99),
    weight=st.none() | _WORDS, weight_side=st.sampled_from([None, "lhs", "rhs"]), spec=_WORDS,
)  # fmt: skip
_SITE_PLANS = st.builds(
    SitePlan, _SITES, st.none() | st.integers(0, 3), st.none() | _WORDS, st.none() | _WORDS,
    st.sampled_from([None, "dynamic", "static"]), _WORDS, _WORDS, st.none() | _WORDS,
    st.lists(_WORDS).map(tuple),
)  # fmt: skip
_LEAVES = st.builds(
    LeafPlan, _WORDS, _SHAPES, st.just("float32"), _HOWS, st.integers(0, 99), st.integers(0, 99),
    st.lists(_WORDS).map(tuple), st.none() | _RULES,
)  # fmt: skip
_PLANS = st.builds(
    Plan, st.lists(_RULES, max_size=3).map(tuple), st.lists(_SITE_PLANS, max_size=2).map(tuple),
    st.lists(_LEAVES, max_size=3).map(tuple), st.lists(_WORDS).map(tuple),
    st.lists(st.integers(0, 3)).map(tuple), st.sampled_from(["linen", "keras"]),
    st.lists(_WORDS).map(tuple),
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(_PLANS)
def test_json_keeps_a_plan_exactly(plan):
    text = plan.to_json()
    read = Plan.from_json(text)
    assert read == plan and read.to_json() == text
    assert not plan.diff(read)


@settings(max_examples=50, deadline=None)
@given(_PLANS, st.integers(60, 130))
def test_any_plan_prints_within_any_width(plan, width):
    assert max(map(len, plan.table(width=width).splitlines())) <= width


def broken(change):
    document = json.loads(small_plan(1).to_json())
    change(document)
    with pytest.raises(ValueError) as caught:
        Plan.from_json(json.dumps(document))
    return str(caught.value)


def test_documents_that_are_not_plans_say_what_is_wrong():
    assert "format version 2, but this fewbit reads up to 1" in broken(
        lambda d: d.update(version=2)
    )
    assert "no usable format version: 'x'" in broken(lambda d: d.update(version="x"))
    assert "This JSON is not a plan" in broken(lambda d: d.pop("format"))
    assert "plan lacks 'sites'." in broken(lambda d: d.pop("sites"))
    assert "unknown field 'site'. Did you mean 'sites'?" in broken(lambda d: d.update(site=1))
    assert "plan.sites[0].site lacks 'macs'." in broken(lambda d: d["sites"][0]["site"].pop("macs"))
    text = broken(lambda d: d["sites"][0]["site"].update(macs="many"))
    assert text == "plan.sites[0].site.macs should be int, but is 'many'."
    text = broken(lambda d: d["leaves"][0].update(rule=7))
    assert text == "plan.leaves[0].rule is rule 7, but the plan has 3 rules."
    assert "rules[1]: unknown field 'x'" in broken(lambda d: d["rules"][1].update(x=1))
    assert "should be [axis, size]" in broken(
        lambda d: d["leaves"][0]["how"].update(tiled_axes=[[1, 2, 3]])
    )
    with pytest.raises(ValueError, match="The plan is not JSON: .* at line 1, column 2"):
        Plan.from_json("{")


# --- differences ----------------------------------------------------------------------------------


def test_no_difference_is_false_and_says_so():
    diff = small_plan().diff(small_plan())
    assert not diff and str(diff) == "no difference"


def test_a_difference_names_sites_fields_and_totals():
    before, after = small_plan(layers=2), small_plan(layers=3)
    diff = before.diff(after)
    assert diff and diff.added == (
        "decoder/layers/2/mlp/up:dot_general0",
        "decoder/layers/2/mlp/down:dot_general0",
    )
    assert after.diff(before).removed == diff.added
    assert "+ site decoder/layers/2/mlp/up:dot_general0" in str(diff)
    assert "before: 4 of 5 sites" in str(diff) and "after:  6 of 7 sites" in str(diff)


def test_a_changed_type_is_listed_field_by_field():
    before = small_plan(layers=1)
    changed = SitePlan(before.sites[0].site, 1, "int4", None, None, "tile 32", "native int4", None)
    path = before.leaves[0].path
    new_leaf = leaf(path, (64, 128), INT4, (changed.site.id,), RULES[2])
    after = Plan(
        RULES[1:], (changed, *before.sites[1:]), (new_leaf, *before.leaves[1:]), before.notes, ()
    )
    diff = before.diff(after)
    assert {change.field for change in diff.changed} == {
        "weight_qtype", "act_qtype", "act_mode", "granularity", "runs_on",
    }  # fmt: skip
    assert {change.field for change in diff.leaves} == {"how", "bytes_after", "rule"}
    assert {change.field for change in diff.plan} == {"rules", "unmatched_rules", "kind"}
    text = str(diff)
    assert "~ site decoder/layers/0/mlp/up:dot_general0  weight_qtype: int8 → int4" in text
    assert f"~ parameter {path}  bytes_after: 8.50 KiB → 4.50 KiB" in text


def test_adapters_are_compared_by_the_parameter_they_add_to():
    def run(params, x):
        return jnp.tanh(x @ params["up"]) @ params["down"]

    def made(dtype="float32", **fields):
        params = {"up": jnp.ones((16, 8), dtype), "down": jnp.ones((8, 16), dtype)}
        provider = fewbit.LoraProvider(**(dict(rank=2, alpha=4.0) | fields))
        return fewbit.plan(run, provider, params, jnp.ones((1, 16), dtype))

    before = made()
    assert not before.diff(made())
    text = str(before.diff(made(rank=4, alpha=8.0, dropout=0.1, module_path="up")))
    for line in (
        "~ adapter up  rank: 2 → 4",
        "~ adapter up  alpha: 4.0 → 8.0",
        "~ adapter up  dropout: 0.0 → 0.1",
        "~ adapter up  module_path: .* → up",
        "~ adapter down  adapter: rank 2 → none",
    ):
        assert line in text.splitlines()
    assert "~ adapter down  adapter: none → rank 2" in str(made(module_path="up").diff(before))
    assert "~ adapter up  dtype: float32 → bfloat16" in str(before.diff(made("bfloat16")))
    assert "~ adapter down  weight_qtype: None → nf4" in str(
        before.diff(made(weight_qtype="nf4", tile_size=8))
    )
    diff = before.diff(made(alpha=5.0))  # a difference of adapters alone is one
    assert diff and {change.field for change in diff.adapters} == {"alpha"}


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("fold", [True, False])
def test_no_line_is_wider_than_asked(width, fold):
    lines = small_plan(layers=12).table(width=width, fold=fold).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0] == "Plan of a Linen model: 24 of 25 sites quantized"


def test_narrower_than_sixty_is_sixty():
    assert small_plan().table(width=10) == small_plan().table(width=60)


def test_the_terminal_decides_the_width(monkeypatch):
    for columns in (64, 150):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert str(small_plan()) == small_plan().table(width=columns)


def test_equal_layers_fold_into_one_row():
    lines = small_plan(layers=24).table(width=140).splitlines()
    rows = [line for line in lines if line.startswith("decoder/")]
    assert [row.split("  ")[0] for row in rows] == [
        "decoder/layers/0..23/mlp/up",
        "decoder/layers/0..23/mlp/down",
    ]
    for part in ("x24", "dot_general0", "64x128", "int8 x int8", "per-channel", "native int8"):
        assert part in rows[0]
    assert "768 KiB → 204 KiB" in rows[0]
    unfolded = small_plan(layers=24).table(width=140, fold=False).splitlines()
    assert sum(line.startswith("decoder/") for line in unfolded) == 48


def test_layers_that_differ_stay_apart():
    sites = [quantized(site(f"layers_{i}", n=256 if i == 2 else 128)) for i in range(5)]
    text = Plan((), tuple(sites), ()).table(width=120)
    assert "layers_0..1,3..4  x4" in text and "layers_2 " in text


def test_two_numbers_fold_twice():
    paths = [f"layers/{i}/experts/{j}/up" for i in range(3) for j in range(4)]
    text = Plan((), tuple(quantized(site(path)) for path in paths), ()).table(width=120)
    assert "layers/0..2/experts/0..3/up  x12" in text


def test_number_ranges():
    assert number_ranges([3]) == "3" and number_ranges([0, 2, 4]) == "0,2,4"


def test_left_alone_sites_show_their_reason_whole():
    for width in (60, 100, 140):
        text = small_plan().table(width=width)
        assert "left alone [1]" in text and "\n[1]  rule 0 switches it off: its" in text
        words = " ".join(text.split())
        assert "rule 0 switches it off: its weight_qtype is None, which opts out" in words
    short = Plan((), (left_alone(site("head"), "no rule matches", None),), ())
    assert "-  no rule matches" in short.table(width=100) and "[1]" not in short.table(width=100)


def test_where_a_line_is_too_short_the_path_stands_above():
    lines = small_plan().table(width=100).splitlines()
    at = lines.index("decoder/layers/0..5/mlp/up  x6")
    assert lines[at + 1].split() == (
        "dot_general0 64x128 1 int8 x int8 per-channel 192 KiB → 51.0 KiB native int8".split()
    )


def test_hidden_columns_are_announced():
    narrow, wide = small_plan().table(width=60), small_plan().table(width=140)
    assert "no room here for: weight, scales, bytes;" in narrow
    assert "no room" not in wide and "scales" in wide and "bytes" in wide
    assert "no room" not in small_plan().table(width=100)


def test_what_stands_below_the_table():
    text = small_plan(layers=2).table(width=140)
    assert (
        "4 parameters outside all sites: bias x4; 512 numbers, 2.00 KiB, left as they are" in text
    )
    assert "opaque: pallas_call in decoder/layers/0/attention" in text
    assert "0  QuantizationRule(module_path='.*head'): 1 site" in text
    assert "QuantizationRule(weight_qtype='int8', act_qtype='int8'): 4 sites" in text
    assert "tile_size=32): no site (UNMATCHED)" in text
    assert "4 of 5 quantized, 33.9% of all multiply-adds" in text
    assert "32.8k of 97.3k quantized, 8.50 bits each" in text


def test_long_paths_are_cut_in_the_middle():
    path = "a_very_long_encoder_name/with_many_parts/of_a_module_path/that_ends_in/the_projection"
    text = Plan((), (quantized(site(path)),), ()).table(width=120)
    row = next(line for line in text.splitlines() if line.startswith("a_very"))
    assert "…" in row and "projection  " in row


def test_static_scales_methods_notes_and_weightless_sites_show():
    planned = SitePlan(
        site("scores", method="decode", weight=None), 1, "int8", "int8", "static", "per-tensor",
        "xla int8", None, ("slower than float here",),
    )  # fmt: skip
    text = Plan((), (planned,), (), methods=("decode",)).table(width=140)
    assert "decode.scores" in text and "int8 x int8 static" in text
    assert "xla int8 [1]" in text and "[1]  slower than float here" in text and "(decode)" in text


def test_html_is_a_table_with_escaped_text():
    html = Plan(RULES, (quantized(site("a<b>")),), (), ("x & y",))._repr_html_()
    assert html.startswith("<table>") and "a&lt;b&gt;" in html and "x &amp; y" in html


# --- text helpers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1024**2 - 1, "1.00 MiB"),
     (10 * 1024**2, "10.0 MiB"), (123 * 1024**3, "123 GiB")],
)  # fmt: skip
def test_human_bytes(count, text):
    assert _text.human_bytes(count) == text


def test_human_count():
    assert [_text.human_count(n) for n in (0, 999, 1000, 999_999)] == ["0", "999", "1.00k", "1.00M"]


@given(st.text(max_size=40), st.integers(1, 30), st.sampled_from(["middle", "end"]))
def test_shorten_never_exceeds_its_width(text, width, where):
    short = _text.shorten(text, width, where)
    assert len(short) <= width and (short == text) == (len(text) <= width)


def test_a_table_wraps_sentences_and_refuses_ragged_rows():
    text = _text.table([("a", "one two three four")], ("k", "why"), "lw", 12)
    assert text.splitlines() == ["k  why", "─" * 12, "a  one two", "   three", "   four"]
    with pytest.raises(ValueError, match="every row need as many"):
        _text.table([("a",)], ("k", "why"), "lw", 12)
