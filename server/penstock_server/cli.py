"""The command line: `penstock serve | batch | generate | chat | plan | hardware | doctor | bench |
convert | report | eval`.

Exit codes: 0 done, 1 it failed (one line on stderr says why), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, PenstockError
from penstock_server import __version__
from penstock_server.listener import bind
from penstock_server.setting_sources import add_flags, make_settings
from penstock_server.settings import Settings

#: More of a calibration text tells little more.
CALIBRATION_TOKENS = 8192

_DESCRIPTION = """Penstock serves language models that are larger than the memory they run in.

Every setting is also an environment variable and a key of the file that --config names: --max-num-seqs is
PENSTOCK_MAX_NUM_SEQS and max-num-seqs. A flag wins over the variable, the variable over the file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = build_parser().parse_args(arguments)
    try:
        _check_contradictions(options)
        needs_model = (
            options.command not in ("hardware", "doctor") and getattr(options, "shape", None) is None
        )
        settings = make_settings(vars(options), os.environ, needs_model)
        return _run(options, settings)
    except ConfigError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has enough; nothing can be flushed to it any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _check_contradictions(options: argparse.Namespace) -> None:
    """Raises ConfigError for flags that would have no effect beside others."""
    given = vars(options).keys()  # of settings, those that are on the command line
    has_shape = getattr(options, "shape", None) is not None
    if has_shape and options.command == "bench" and "group_size" in given:
        raise ConfigError("random weights have a scale per output channel: leave out --group-size")
    if "calibration_tokens" in given and "calibrate" not in given:
        raise ConfigError("--calibration-tokens needs the text: --calibrate FILE")
    if has_shape and (idle := given & {"model", "revision", "offline", "ignore_unexpected_tensors"}):
        raise ConfigError(f"--shape is a model by itself: leave out {' and '.join(sorted(idle))}")
    has_more = given - {"command", "model", "verify", "target"} or getattr(options, "target", None)
    if getattr(options, "verify", False) and has_more:
        raise ConfigError("--verify takes the folder that was converted, and nothing else")


def _run(options: argparse.Namespace, settings: Settings) -> int:
    # Imported late: torch takes seconds, and --help and wrong settings shall not wait for it.
    if options.command == "serve":
        settings.engine_config()  # what is wrong with it should be told before anything starts
        listener = bind(settings.host, settings.port)
        for number in (signal.SIGINT, signal.SIGTERM):  # until serve() has handlers of its own
            signal.signal(number, lambda *_: os._exit(0))
        from penstock_server.serve import serve

        return serve(settings, listener)
    if options.command == "batch":
        settings.engine_config()
        from penstock_server.batch import run_batch

        return run_batch(settings, options.source, options.target)
    if options.command == "report":
        from penstock_server.report import report

        return report(settings, options.json)
    if options.command == "eval":
        from penstock_server.evaluating import run_eval

        return run_eval(
            settings, options.text, options.against, options.context, options.stride, options.json
        )
    if options.command in ("plan", "hardware"):
        from penstock_server import plan_report

        if options.command == "plan":
            return plan_report.run_plan(settings, options.shape, options.card, options.json)
        return plan_report.run_hardware(settings, options.folder, options.json, options.remeasure)
    if options.command == "doctor":
        from penstock_server.doctor import run_doctor

        return run_doctor(options.folder)
    if options.command == "bench":
        from penstock_server.benchmark import run_bench

        return run_bench(settings, options.shape, tuple(options.sequences), options.prompt, options.json)
    if options.command == "convert":
        from penstock_server import converting

        if options.verify:
            return converting.run_verify(Path(settings.model))
        if options.target is None:
            raise ConfigError("convert needs the folder to write: penstock convert MODEL OUT")
        text, num_tokens = (vars(options).get(name) for name in ("calibrate", "calibration_tokens"))
        num_tokens = CALIBRATION_TOKENS if num_tokens is None else num_tokens
        return converting.run_convert(settings, options.target, text, num_tokens)
    from penstock_server import terminal

    run = terminal.generate if options.command == "generate" else terminal.chat
    return run(settings, options)


class _ExactParser(argparse.ArgumentParser):
    """Half a flag may be a whole one tomorrow, and a file of settings does not take it either."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock", description=_DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_ExactParser
    )

    serve = commands.add_parser("serve", help="answer HTTP requests as OpenAI's API does")
    add_flags(serve, "serve")

    batch = commands.add_parser("batch", help="answer a file of requests, in OpenAI's batch format")
    batch.add_argument("source", type=Path, metavar="IN", help="requests, a JSON object per line")
    batch.add_argument("target", type=Path, metavar="OUT", help="answers; what it holds is not asked again")
    add_flags(batch, "batch")

    generate = commands.add_parser("generate", help="continue a text in the terminal")
    generate.add_argument("--prompt", help="text to continue; without it: standard input")
    _add_sampling_flags(generate)
    add_flags(generate, "generate")

    chat = commands.add_parser("chat", help="talk to a model in the terminal")
    chat.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    _add_sampling_flags(chat)
    add_flags(chat, "chat")
    convert = commands.add_parser("convert", help="write a model as INT8, laid out to be streamed")
    add_flags(convert, "convert")
    convert.add_argument("target", nargs="?", type=Path, metavar="OUT", help="folder to write")
    convert.add_argument("--verify", action="store_true", help="compare the checksums of a converted MODEL")

    convert.add_argument(
        "--calibrate", type=Path, metavar="FILE", default=argparse.SUPPRESS,
        help="a text by which rounding errors are compensated (GPTQ): slower, and closer to the original",
    )  # fmt: skip
    convert.add_argument(
        "--calibration-tokens", type=int, metavar="N", default=argparse.SUPPRESS,
        help=f"how much of it is looked at (default: {CALIBRATION_TOKENS})",
    )  # fmt: skip

    plan = commands.add_parser("plan", help="what would lie where, and how fast it would be")
    plan.add_argument("--shape", metavar="NAME", help="a well-known model instead of one that is here")
    plan.add_argument("--card", metavar="NAME", help="a well-known card, such as 'GTX 1060 6 GB'")
    plan.add_argument("--json", action="store_true", help="as data")
    add_flags(plan, "plan")

    hardware = commands.add_parser("hardware", help="what this machine has and reaches")
    hardware.add_argument(
        "folder", nargs="?", type=Path, default=Path.cwd(), metavar="FOLDER",
        help="where models lie: its disk is measured; default: this folder",
    )  # fmt: skip
    hardware.add_argument("--remeasure", action="store_true", help="forget what was measured before")
    hardware.add_argument("--json", action="store_true", help="as data")
    add_flags(hardware, "hardware")

    bench = commands.add_parser("bench", help="what this machine reaches with a model, or a shape of one")
    bench.add_argument("--shape", metavar="NAME", help="random weights of a well-known shape")
    bench.add_argument(
        "--sequences", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="decode with N at a time"
    )
    bench.add_argument(
        "--prompt", action=argparse.BooleanOptionalAction, default=True, help="a prompt of 512"
    )
    bench.add_argument("--json", action="store_true", help="the line of data alone")
    add_flags(bench, "bench")

    doctor = commands.add_parser("doctor", help="what keeps this machine from its best, and what to do")
    doctor.add_argument(
        "folder", nargs="?", type=Path, default=Path.cwd(), metavar="FOLDER",
        help="where models lie: its disk is looked at; default: this folder",
    )  # fmt: skip

    report = commands.add_parser("report", help="what INT8 costs, tensor by tensor")
    report.add_argument("--json", action="store_true", help="as data")
    add_flags(report, "report")

    evaluation = commands.add_parser("eval", help="perplexity, and distance from the unquantized model")
    evaluation.add_argument("--text", type=Path, required=True, metavar="FILE", help="what is predicted")
    evaluation.add_argument(
        "--against", metavar="REF", help="the unquantized model; default: MODEL, if it is not INT8 itself"
    )
    evaluation.add_argument(
        "--context", type=int, metavar="N", help="tokens of a window; default: 512, or the model's context"
    )
    evaluation.add_argument(
        "--stride", type=int, metavar="N", help="tokens from window to window; default: no overlap"
    )
    evaluation.add_argument("--json", action="store_true", help="as data")
    add_flags(evaluation, "eval")
    return parser


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument_group(
        "sampling", "Without a flag: what the model's generation_config.json says."
    )
    section.add_argument("--max-tokens", type=int, metavar="N", help="longest answer in tokens")
    section.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    section.add_argument("--top-p", type=float, metavar="P", help="nucleus of this probability")
    section.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    section.add_argument("--min-p", type=float, metavar="P", help="part of the likeliest token's")
    section.add_argument("--repetition-penalty", type=float, metavar="R", help="1 is none")
    section.add_argument("--seed", type=int, metavar="N", help="same seed, same answer")
    section.add_argument(
        "--stop", action="append", metavar="TEXT", help="the answer ends before it; may be repeated"
    )
