"""Regular expressions out of files: what `re` says, in bounded time, or an error."""

import pathlib
import random
import re
import signal
import subprocess
import sys
import textwrap
import warnings

import pytest

import fewbit
from fewbit._util._patterns import MOST_LENGTH, PatternError, compile_pattern
from fewbit.rules._text import rules_from_list

ROOT = pathlib.Path(__file__).resolve().parents[2]
A = "a" * 80 + "!"

CLASSICAL = [
    *("(a+)+$", "(a|a)*b", "(.*)*x", "(a|aa)+$", r"(\w+\s?)*$", "(a{1,50}){1,50}", "(a*)*b"),
    *("(x+x+)+y|(a+a+)+y", "((a?){30})a{30}b", "(?=(a+)+$)a*b", "(?:a|a|a)+b", ".*.*.*.*.*.*.*.*x"),
    *("(?:a?a?a?a?){40}b", "(a|b|ab|ba|aab)*c", "((a*)*)*b", "(?<=a)(a+)+b|(?<!b)(a|a)+b"),
    *(
        "(?i)(A+)+b",
        r"^(([a-z])+.)+[A-Z]([a-z])+$",
        "(?:(?=a)(?:a|a))*b",
        "(.+?)+?b",
        "(a{2,}){9,}b",
    ),
]
ORDINARY = {
    ".*": ("", "layers/0/up"),
    r"layers/(\d+)/(up|down)": ("layers/12/up", "layers/12/up/x"),
    ".*(attn|mlp).*": ("h/attn/q", "h/norm"),
    r".*self_attn\.(q|k|v)_proj": ("model.layers.0.self_attn.q_proj", "model.self_attn.o_proj"),
    "(?!.*lm_head).*": ("model/up", "model/lm_head"),
    r"(\w+/)*attn": ("a/b/c/attn", "a/b/c/mlp"),
    ".*layers.*attn.*q.*kernel.*": ("model/layers/0/attn/q/kernel", "model/layers/0/attn/k/bias"),
    "(?i)MLP/.*": ("mlp/up", "attn/up"),
    "(?P<kind>up|down)_proj(?:/kernel)?": ("up_proj/kernel", "left_proj"),
    r"layers/[0-9]{1,3}/.*(?<!bias)": ("layers/10/kernel", "layers/10/bias"),
    "net/up(/.*)?": ("net/up", "net/upper"),
    r"[^/]+/[^/]+/w\d*": ("a/b/w0", "a/b/c/w0"),
    "|".join(f"layers/{i}/attn" for i in range(2000)): ("layers/1999/attn", "layers/2000/attn"),
}


def test_patterns_that_run_away_in_re_do_not_here():
    """In a child that may use five seconds for each: an endless one would end it."""
    child = run_child(
        f"""
        for pattern in {CLASSICAL!r}:
            allow(5)
            assert not compile_pattern(pattern).matches({A!r}), pattern
            try:
                compile_pattern(pattern).matches({("a" * 900 + "!")!r})
            except PatternError as error:
                assert "takes too many steps for a name of 901 characters" in str(error), error
        """
    )
    assert child.returncode == 0, child.stderr


@pytest.mark.parametrize("pattern", ORDINARY, ids=lambda pattern: pattern[:24])
def test_ordinary_patterns_do_what_they_always_did(pattern):
    yes, no = ORDINARY[pattern]
    rule = fewbit.QuantizationRule(module_path=pattern, weight_qtype="int8")
    assert rule.matches(yes, "dot_general") and re.fullmatch(pattern, yes)
    if no != yes and pattern != ".*":
        assert not rule.matches(no, "dot_general") and not re.fullmatch(pattern, no)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(a+)\1", r"it refers back to what a group has read (\1)"),
        ("(?P<x>a)(?P=x)", "it refers back to what a group has read ((?P=x)), for"),
        ("(a)?(?(1)b|c)", "it refers back to what a group has read"),
        ("(?>a+)b", "it has '(?>', which never goes back; leave out the '?>'"),
        ("a*+b", "it has '*+', which never goes back; leave out the '+'"),
        ("(?x) a b", "it has the flag 'x'; write it in one line"),
        ("(a{1,99}){1,999}", "its repetitions come to more than 10000 parts when"),
        ("((a{1,999}){1,999}){1,999}", "its repetitions come to more than 10000 parts when"),
        ("a" * (MOST_LENGTH + 1), f"it is longer than {MOST_LENGTH} characters"),
        ("(" * 100 + ")" * 100, "its groups are more than 60 deep"),
        ("(" * 5000 + ")" * 5000, "it is nested too deeply"),
        (r"[\x00-\uffff]" * 50, "it has more than 20 ranges of characters beyond Latin-1"),
        ("a{99999999999999999999}", "the repetition number is too large"),
    ],
    ids=range(13),
)
def test_what_has_no_bound_is_refused_when_the_rule_is_made(pattern, why):
    with pytest.raises(ValueError, match="QuantizationRule: module_path: the pattern .*") as caught:
        fewbit.QuantizationRule(module_path=pattern)
    text = str(caught.value)
    assert f"cannot be matched within a bound: {why}" in text and len(text) < 300
    with pytest.raises(ValueError, match="cannot be matched within a bound"):
        rules_from_list([{"module_path": pattern}])


def test_a_name_that_is_too_long_for_its_pattern():
    rule = fewbit.QuantizationRule(module_path="(a|aa)+b", weight_qtype="int8")
    with pytest.raises(PatternError, match="too many steps for a name of 200000 characters"):
        rule.matches("a" * 200_000, "dot_general")


# --- against re itself ----------------------------------------------------------------------------

ATOMS = [
    *(
        "a",
        "b",
        "ab",
        ".",
        r"\w",
        r"\d",
        "[ab]",
        "[^a]",
        "/",
        r"\.",
        "(?i:A)",
        "^",
        "$",
        r"\b",
        r"\B",
    ),
    *("1", r"\s", "[]a]", "a{", r"\x61", r"\Aa", "(?#c)", r"\141", "[a\\]]", "(?s:.)", "{}"),
]
TIMES = ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{,2}", "{2,}?", "{0}", "{1,40}"]


def random_pattern(dice, depth):
    kind = dice.random()
    inner = lambda: random_pattern(dice, depth - 1)  # noqa: E731
    if depth <= 0 or kind < 0.3:
        return dice.choice(ATOMS)
    if kind < 0.5:
        return inner() + inner()
    if kind < 0.62:
        return f"({inner()}|{inner()})"
    if kind < 0.68:
        return f"(?:{inner()}|{inner()}|)"
    if kind < 0.74:
        return f"({dice.choice(['?=', '?!'])}{inner()})"
    if kind < 0.78:
        return f"({dice.choice(['?<=', '?<!'])}{dice.choice(['a', 'ab', '[ab].', 'a|b'])})"
    return f"({inner()}){dice.choice(TIMES)}"


def is_pattern(text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return re.compile(text)
        except (re.error, OverflowError):
            return None


def same_as_re(count, seed):
    """The machine, not `re` behind it, against `re`, on texts so short that nothing runs away."""
    dice, compared = random.Random(seed), 0
    while compared < count:
        pattern = random_pattern(dice, 4)
        wanted = is_pattern(pattern)
        if wanted is None:
            continue
        try:
            found = compile_pattern(pattern)
        except PatternError:
            continue
        for _ in range(4):
            text = "".join(dice.choice("aab/1. A") for _ in range(dice.randrange(8)))
            for where, method in {
                "whole": "fullmatch",
                "start": "match",
                "anywhere": "search",
            }.items():
                match = getattr(wanted, method)(text) is not None
                assert (found._machine(text).run(where) is not None) == match, (
                    pattern,
                    text,
                    where,
                )
        compared += 1


def test_the_machine_agrees_with_re():
    same_as_re(1500, seed=1)


@pytest.mark.long
def test_the_machine_agrees_with_re_on_many():
    same_as_re(60_000, seed=2)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"model\.(.*)\.(.*)\.(.*)\.(\w+)", "model." + "a.b." * 30 + "c"),
        (r"(?P<a>(x+)+?)(y|x)*(z)?(?P<b>.*)", "x" * 60 + "tail"),
        (r"(a|ab)(c|bcd)(d*)((.+)(.))+(e|f)?", "abcd" + "e" * 18),
    ],
)
def test_groups_are_those_of_re(pattern, text):
    wanted, found = re.fullmatch(pattern, text), compile_pattern(pattern)
    assert not found._cheap(text, "whole")
    match = found.fullmatch(text)
    assert match.groups() == wanted.groups() and match.groupdict() == wanted.groupdict()
    assert match.expand(r"\1-\g<2>\n") == wanted.expand(r"\1-\g<2>\n")


def test_groups_that_may_be_empty_have_no_bound():
    with pytest.raises(PatternError, match="a group stands in a look-ahead, or in a repetition of"):
        compile_pattern("(a*)*(.*)(.*)(.*)(.*)").fullmatch("a" * 80)


# --- random patterns, in a child whose time is limited --------------------------------------------

CHILD = """
import resource, sys, time
sys.path[:0] = {paths!r}
from fewbit._util._patterns import PatternError, compile_pattern

def allow(seconds):
    # A limit of processor time: too slow a machine does not reach it, an endless match does.
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1 + seconds, resource.RLIM_INFINITY))

"""


def run_child(code):
    text = CHILD.format(paths=[str(ROOT), str(ROOT / "tests" / "util")]) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT)


def random_patterns_end(count, seed):
    child = run_child(
        f"""
        import random
        from test_patterns import is_pattern, random_pattern

        paths = ["a" * 120 + "!", "ab" * 60, "layers/0/attn/q_proj", "a" * 700, "a.a/" * 50, ""]
        dice, refused, matched = random.Random({seed}), 0, 0
        while refused + matched < {count}:
            pattern = random_pattern(dice, dice.choice([3, 4, 5, 6]))
            if is_pattern(pattern) is None:
                continue
            print(pattern, file=sys.stderr)
            allow(8)
            try:
                for path in paths:
                    for where in ("whole", "start", "anywhere"):
                        compile_pattern(pattern).matches(path, where)
                matched += 1
            except PatternError as error:
                refused += 1
        print(refused, matched)
        """
    )
    last = child.stderr.strip().rpartition("\n")[2]
    assert child.returncode != -signal.SIGXCPU, f"{last} does not end"
    assert child.returncode == 0, child.stderr[-2000:]
    refused, matched = map(int, child.stdout.split())
    assert refused + matched == count and matched > count // 2, (refused, matched)


def test_random_patterns_are_refused_or_end():
    random_patterns_end(150, seed=1)


@pytest.mark.long
def test_many_random_patterns_are_refused_or_end():
    random_patterns_end(5000, seed=2)


def test_the_limit_of_the_child_ends_what_is_endless():
    child = run_child("import re; allow(0); re.fullmatch('(a|a)*b', 'a' * 60)")
    assert child.returncode == -signal.SIGXCPU
