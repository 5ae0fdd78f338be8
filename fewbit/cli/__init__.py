"""The command line: `fewbit plan | quantize | inspect | verify | report | doctor`.

    fewbit plan shop/model.py:encoder --rule weight_qtype=int8,act_qtype=int8
    fewbit quantize shop/model.py:encoder model.safetensors small --rules rules.yaml --dry-run
    fewbit inspect small; fewbit verify small
    fewbit report small -o report.html --model shop/model.py:encoder

Exit codes: 0 all is well, 1 something is wrong with the data or the machine, 2 misuse.
"""

from __future__ import annotations

import io
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

from fewbit._version import __version__
from fewbit.cli import _commands
from fewbit.cli._commands import Misuse

_MODEL = (
    "module:function or file.py:function; the function returns (model, *inputs) as fewbit.plan "
    "takes them, parameters and inputs may be abstract; a Linen module's variables may come before "
    "its inputs"
)
_OPTIONS = {  # what errors say, in the words of the command line
    "Pass strict=False": "Give --no-strict",
    "pass resume=False": "give --restart",
    "Map names to parameters: names=[(pattern, replacement), ...]": (
        "Map names to parameters: --names FILE, a line - [pattern, replacement] for each"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    >>> main(['doctor']) in (0, 1)
    fewbit ...
    True
    """
    args = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without box characters is no reason
            stream.reconfigure(errors="replace")
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `fewbit inspect model | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        if args.traceback:
            raise
        text = str(error)
        for python, option in _OPTIONS.items():
            text = text.replace(python, option)
        print(f"fewbit {args.command}: {text}", file=sys.stderr)
        return 2 if isinstance(error, Misuse) else 1
    except KeyboardInterrupt:
        again = "; the same command goes on from here" if args.command == "quantize" else ""
        print(f"fewbit {args.command}: stopped{again}", file=sys.stderr)
        return 130


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="fewbit",
        description="JAX models with fewer bits.",
        epilog="Exit codes: 0 all is well, 1 something is wrong with data or machine, 2 misuse.",
    )
    parser.add_argument("--version", action="version", version=f"fewbit {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, run: Callable[[Namespace], int], about: str) -> ArgumentParser:
        made = commands.add_parser(name, help=about)
        made.set_defaults(run=run)
        return made

    plan = command("plan", _commands.plan, "what would happen to a model; needs no weights")
    _add_model_and_rules(plan)
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")

    quantize = command("quantize", _commands.quantize, "a checkpoint in, a smaller one out")
    _add_model_and_rules(quantize)
    quantize.add_argument("source", help="a safetensors file or folder, or an Orbax folder")
    quantize.add_argument("target", help="the folder to write")
    quantize.add_argument(
        "--names", metavar="FILE", help="YAML list of [pattern, replacement]: theirs to ours"
    )
    quantize.add_argument(
        "--stats", metavar="FILE", help="ranges for act_static_scale, from Statistics.save"
    )
    quantize.add_argument(
        "--restart", action="store_true", help="drop what an unfinished run left, begin anew"
    )
    quantize.add_argument("--dry-run", action="store_true", help="check everything, write nothing")
    quantize.add_argument("--quiet", action="store_true", help="no progress bar")

    inspect = command("inspect", _commands.inspect, "what a checkpoint holds; reads no data")
    inspect.add_argument("checkpoint")
    inspect.add_argument("--json", action="store_true", help="print it as JSON")

    verify = command("verify", _commands.verify, "compare every tensor with its checksum")
    verify.add_argument("checkpoint")

    report = command("report", _commands.report, "a page about a checkpoint, for a browser")
    report.add_argument("checkpoint")
    report.add_argument("-o", "--output", default="report.html", help="default: %(default)s")
    report.add_argument(
        "--model", help=f"{_MODEL}; with float parameters and a batch, errors are measured"
    )
    report.add_argument("--title", help="heading of the page")

    about = "what this machine has, and why a kernel is not used"
    command("doctor", lambda args: _commands.doctor(), about)
    return parser


def _add_model_and_rules(parser: ArgumentParser) -> None:
    parser.add_argument("model", help=_MODEL)
    parser.add_argument("--rules", metavar="FILE", help="rules as YAML or JSON")
    parser.add_argument(
        "--rule", action="append", default=[], metavar="FIELD=VALUE,...",
        help="one rule, e.g. module_path=layers.*,weight_qtype=int4,tile_size=32; before --rules",
    )  # fmt: skip
    parser.add_argument(
        "--no-strict", action="store_true", help="a rule that matches nothing is only a warning"
    )
