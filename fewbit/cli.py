"""The command line: `fewbit plan | quantize | inspect | verify | report | doctor`.

    fewbit plan shop/model.py:encoder --rule weight_qtype=int8,act_qtype=int8
    fewbit quantize shop/model.py:encoder model.safetensors small --rules rules.yaml --dry-run
    fewbit inspect small; fewbit verify small
    fewbit report small -o report.html --model shop/model.py:encoder

Exit codes: 0 all is well, 1 something is wrong with the data or the machine, 2 misuse.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from fewbit import _commands
from fewbit._cli_model import Misuse
from fewbit._version import __version__

_MODEL = (
    "module:function or file.py:function; the function returns (model, *inputs) as fewbit.plan "
    "takes them, parameters and inputs may be abstract; a Linen module's variables may come before "
    "its inputs"
)
_OPTIONS = {
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
        print(f"fewbit {args.command}: {_spoken(error)}", file=sys.stderr)
        return 2 if isinstance(error, Misuse) else 1
    except KeyboardInterrupt:
        again = "; the same command goes on from here" if args.command == "quantize" else ""
        print(f"fewbit {args.command}: stopped{again}", file=sys.stderr)
        return 130


def _spoken(error: Exception) -> str:
    """What an error says, in the words of the command line."""
    text = str(error)
    for python, option in _OPTIONS.items():
        text = text.replace(python, option)
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fewbit",
        description="JAX models with fewer bits.",
        epilog="Exit codes: 0 all is well, 1 something is wrong with data or machine, 2 misuse.",
    )
    parser.add_argument("--version", action="version", version=f"fewbit {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    plan = commands.add_parser("plan", help="what would happen to a model; needs no weights")
    _add_model_and_rules(plan)
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.set_defaults(run=_commands.plan)

    quantize = commands.add_parser("quantize", help="a checkpoint in, a smaller one out")
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
    quantize.set_defaults(run=_commands.quantize)

    inspect = commands.add_parser("inspect", help="what a checkpoint holds; reads no data")
    inspect.add_argument("checkpoint")
    inspect.add_argument("--json", action="store_true", help="print it as JSON")
    inspect.set_defaults(run=_commands.inspect)

    verify = commands.add_parser("verify", help="compare every tensor with its checksum")
    verify.add_argument("checkpoint")
    verify.set_defaults(run=_commands.verify)

    report = commands.add_parser("report", help="a page about a checkpoint, for a browser")
    report.add_argument("checkpoint")
    report.add_argument("-o", "--output", default="report.html", help="default: %(default)s")
    report.add_argument(
        "--model", help=f"{_MODEL}; with float parameters and a batch, errors are measured"
    )
    report.add_argument("--title", help="heading of the page")
    report.set_defaults(run=_commands.report)

    doctor = commands.add_parser(
        "doctor", help="what this machine has, and why a kernel is not used"
    )
    doctor.set_defaults(run=lambda args: _commands.doctor())
    return parser


def _add_model_and_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=_MODEL)
    parser.add_argument("--rules", metavar="FILE", help="rules as YAML or JSON")
    parser.add_argument(
        "--rule", action="append", default=[], metavar="FIELD=VALUE,...",
        help="one rule, e.g. module_path=layers.*,weight_qtype=int4,tile_size=32; before --rules",
    )  # fmt: skip
    parser.add_argument(
        "--no-strict", action="store_true", help="a rule that matches nothing is only a warning"
    )


if __name__ == "__main__":
    sys.exit(main())
