"""Commands and flags of `penstock`, and the errors for unknown ones. This file imports nothing slow."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any, NoReturn

from penstock.memory.planning.cards import CARDS
from penstock.memory.planning.processors import PROCESSORS
from penstock.model.known_shapes import SHAPES
from penstock_server.settings.sources import add_flags
from penstock_server.settings.values import parse_bytes

#: Tokens of a calibration text. More tokens improve the rounding little.
CALIBRATION_TOKENS = 8192
#: Where `doctor --card` writes what it found.
CARD_REPORT = Path("penstock-card.json")

_DESCRIPTION = """Penstock serves language models that are larger than the memory they run in.

Every setting is also an environment variable and a key of the file that --config names: --max-num-seqs is
PENSTOCK_MAX_NUM_SEQS and max-num-seqs. A flag wins over the variable, the variable over the file."""


class _Parser(argparse.ArgumentParser):
    """A parser whose help begins with what the command does, and whose errors say what is wrong and where to
    look, in place of a screen of usage.

    Flags can't be abbreviated: a later version may have another flag with the same beginning, and a settings
    file does not take abbreviations either.
    """

    #: The flags in --help; None: all. --help-all shows the others, too.
    usual_flags: frozenset[str] | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        for group in self._action_groups:
            if actions := [action for action in group._group_actions if self._is_shown(action)]:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(actions)
                formatter.end_section()
        return formatter.format_help()

    def _is_shown(self, action: argparse.Action) -> bool:
        names = action.option_strings or [action.dest]
        return self.usual_flags is None or not self.usual_flags.isdisjoint(names)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"penstock: {message}\n`{self.prog} --help` lists what there is\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown arguments here, in the command's own parser: the parser above would not know the
        command."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            similar = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.8)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options, unknown


class _HelpAll(argparse.Action):
    """--help-all: the help with every flag."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, _Parser)
        parser.usual_flags = None
        parser.print_help()
        parser.exit()


class _Version(argparse.Action):
    """--version: looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from penstock_server import __version__

        print(f"penstock {__version__}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. `command` in its result is the command's name."""
    parser = _Parser(prog="penstock", description=_DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        default=argparse.SUPPRESS,
        help="show program's version number and exit",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, add_arguments) in _COMMANDS.items():
        add_arguments(_add_command(commands, name, text))
    return parser


def _add_command(commands: Any, name: str, text: str) -> _Parser:
    example = _EXAMPLES.get(name)
    description = f"{text[0].upper()}{text[1:]}." + (
        f"\n\nFor example:\n{indent(example, '  ')}" if example else ""
    )
    command: _Parser = commands.add_parser(
        name,
        help=text,
        description=description,
        usage=f"penstock {name} {_ARGUMENTS.get(name, 'MODEL')} [flags]",
        formatter_class=_HelpFormatter,
    )
    if name in _TALKING:
        command.usual_flags = _USUAL
        command.add_argument("--help-all", action=_HelpAll, nargs=0, help="all flags, and exit")
    return command


class _HelpFormatter(argparse.HelpFormatter):
    """Keeps the lines of a description, and breaks those of flags."""

    def _fill_text(self, text: str, width: int, beginning: str) -> str:
        return "\n".join(beginning + line for line in text.splitlines())


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "serve")


def _add_worker(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "worker")


def _add_batch(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "batch")
    parser.add_argument("source", type=Path, metavar="IN", help="requests, a JSON object per line")
    parser.add_argument(
        "target", type=Path, metavar="OUT", help="answers; requests that have one are skipped"
    )


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", help="text to continue; without it: standard input")
    _add_sampling(parser)
    add_flags(parser, "generate")


def _add_fill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", help="text with blanks: <span> or ____; without this flag: standard input")
    parser.add_argument(
        "--blank", metavar="TEXT", help="what a blank looks like, in place of <span> and ____"
    )
    parser.add_argument(
        "--max-tokens-per-blank", type=int, metavar="N", help="longest text of a blank in tokens"
    )
    _add_sampling(parser)
    _add_json(parser, "print the texts of the blanks as JSON")
    add_flags(parser, "fill")


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    _add_sampling(parser)
    add_flags(parser, "chat")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument_group(
        "sampling", "The defaults are those of the model's generation_config.json."
    )
    section.add_argument("--max-tokens", type=int, metavar="N", help="longest answer in tokens")
    section.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    section.add_argument("--top-p", type=float, metavar="P", help="the likeliest tokens that sum up to P")
    section.add_argument("--top-k", type=int, metavar="K", help="the K likeliest tokens")
    section.add_argument(
        "--min-p", type=float, metavar="P", help="tokens with at least P of the likeliest token's probability"
    )
    section.add_argument("--repetition-penalty", type=float, metavar="R", help="1 is none")
    section.add_argument(
        "--no-repeat-ngram-size", type=int, metavar="N", help="no sequence of N tokens occurs twice; 0 is off"
    )
    section.add_argument("--seed", type=int, metavar="N", help="same seed, same answer")
    section.add_argument(
        "--stop", action="append", metavar="TEXT", help="the answer ends before TEXT; may be repeated"
    )
    _add_beams(parser)


def _add_beams(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument_group("beam search", "The answer is printed when the search has ended.")
    section.add_argument("--num-beams", type=int, metavar="N", help="search for the best answer with N beams")
    section.add_argument(
        "--length-penalty", type=float, metavar="P", help="above 0: favour long answers; default: 1"
    )
    section.add_argument(
        "--early-stopping", choices=("false", "true", "never"),
        help="true: end with N whole answers; never: go on while a better one is possible; default: false",
    )  # fmt: skip


def _add_convert(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "convert")
    parser.add_argument("target", nargs="?", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--verify", action="store_true", help="compare the checksums of a converted MODEL")
    parser.add_argument(
        "--calibrate", type=Path, metavar="FILE", default=argparse.SUPPRESS,
        help="compensate rounding errors by this text (GPTQ): slower, and closer to the original",
    )  # fmt: skip
    parser.add_argument(
        "--calibration-tokens", type=int, metavar="N", default=argparse.SUPPRESS,
        help=f"tokens of the text that are used (default: {CALIBRATION_TOKENS})",
    )  # fmt: skip
    _add_budget(parser)


def _add_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fit", type=parse_bytes, metavar="SIZE",
        help="choose the format of each matrix (2, 3, 4 or 8 bits), so that all weights fit and lose least",
    )  # fmt: skip
    parser.add_argument(
        "--bits",
        type=float,
        metavar="N",
        help="the same for so many bits, on average, for each weight of the layers",
    )


def _add_pull(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "pull")
    parser.add_argument(
        "--convert", action="store_true",
        help="convert the model when it is here (--weights, --group-size); its name then means the converted "
        "copy",
    )  # fmt: skip
    parser.add_argument(
        "--delete-original", action="store_true", help="with --convert: keep the converted copy alone"
    )


def _add_list(parser: argparse.ArgumentParser) -> None:
    _add_json(parser)
    add_flags(parser, "list")


def _add_rm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="a model as `penstock list` shows it")
    add_flags(parser, "rm")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_budget(parser)
    _add_shape(parser, "a well-known model in place of MODEL")
    cards = ", ".join(card.name for card in CARDS)
    parser.add_argument(
        "--card", metavar="NAME", help=f"a well-known card in place of this machine's: {cards}"
    )
    processors = ", ".join(processor.name for processor in PROCESSORS)
    parser.add_argument(
        "--processor", metavar="NAME",
        help="a well-known processor in place of this machine's, and its RAM (another size may follow the "
        f"name, as in 'M2 Pro 16GB'): {processors}",
    )  # fmt: skip
    parser.add_argument(
        "--price-per-hour", type=_price, metavar="PRICE",
        help="what an hour of the machine costs: the plan then tells the price of a million tokens",
    )  # fmt: skip
    parser.add_argument(
        "--table",
        action="store_true",
        help="a table of well-known models on some ordinary machines, in Markdown",
    )
    parser.add_argument(
        "--architectures",
        action="store_true",
        help="a table of every causal architecture that transformers knows, and who computes it",
    )
    _add_json(parser)
    add_flags(parser, "plan")


def _size(text: str) -> int:
    """Bytes. Raises ArgumentTypeError."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _price(text: str) -> float:
    """A number above 0. Raises ArgumentTypeError."""
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 < price < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no price: give a number above 0")
    return price


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser, "measured")
    parser.add_argument(
        "--remeasure",
        action="store_true",
        help="measure again; the new rates replace earlier ones, with a warning if other work disturbed them",
    )
    _add_json(parser)
    add_flags(parser, "hardware")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_shape(parser, "random weights of a well-known shape in place of MODEL")
    parser.add_argument(
        "--sequences",
        type=int,
        nargs="+",
        default=[1, 8, 32],
        metavar="N",
        help="decode N sequences at a time",
    )
    parser.add_argument(
        "--prompt", action=argparse.BooleanOptionalAction, default=True, help="time a prompt of 512 tokens"
    )
    parser.add_argument(
        "--drafts",
        action="store_true",
        help="also measure what speculative decoding gives: answers that the requests predict, with one "
        "token in ten wrong",
    )
    parser.add_argument(
        "--expert-popularity",
        choices=("usual", "uniform", "own"),
        help="how tokens choose experts: by a popularity like that of trained models, all alike (the worst "
        "case), or as the routers choose; default: usual for random weights, own for MODEL",
    )
    _add_json(parser, "print the JSON line alone")
    add_flags(parser, "bench")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser, "looked at")
    parser.add_argument(
        "--card", action="store_true",
        help="try a GPU instead (--device; else the first one): each kernel against plain arithmetic, rates "
        "of memory and link, a small model",
    )  # fmt: skip
    parser.add_argument(
        "--report", type=Path, metavar="FILE",
        help=f"with --card: where the findings are written, to be sent in (default: {CARD_REPORT})",
    )  # fmt: skip
    add_flags(parser, "doctor")


def _add_kv(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=("list", "verify", "prune"),
        help="list: what lies there, by model; verify: read all blocks, and remove those that are damaged; "
        "prune: remove what was used least recently, until --keep is left",
    )  # fmt: skip
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of --kv-disk")
    parser.add_argument(
        "--keep", type=_size, metavar="SIZE", help="with prune: how much stays, such as 10GiB, or 0"
    )
    _add_json(parser)


def _add_report(parser: argparse.ArgumentParser) -> None:
    _add_json(parser)
    add_flags(parser, "report")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="text that is predicted")
    parser.add_argument(
        "--against", metavar="REF", help="the unquantized model; default: MODEL, unless MODEL is quantized"
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens of a window; default: 512, at most the model's context",
    )
    parser.add_argument(
        "--stride", type=int, metavar="N", help="tokens from window to window; default: no overlap"
    )
    _add_json(parser)
    add_flags(parser, "eval")


def _add_shape(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--shape", metavar="NAME", help=f"{text}: {', '.join(SHAPES)}")


def _add_folder(parser: argparse.ArgumentParser, what_is_done: str) -> None:
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path.cwd(), metavar="FOLDER",
        help=f"where models lie: its disk is {what_is_done}; default: this folder",
    )  # fmt: skip


def _add_json(parser: argparse.ArgumentParser, text: str = "print JSON") -> None:
    parser.add_argument("--json", action="store_true", help=text)


#: The commands whose --help has the flags that people use.
_TALKING = ("generate", "fill", "chat")
_USUAL = frozenset({
    "model", "--help", "--help-all", "--prompt", "--text", "--blank", "--json", "--system", "--max-tokens",
    "--temperature", "--top-p", "--top-k", "--seed", "--stop", "--host-memory", "--device-memory", "--device",
    "--offline", "--max-model-len", "--draft-model",
})  # fmt: skip
#: What stands after a command's name, where this is not a model alone.
_ARGUMENTS = {
    "serve": "MODEL [MODEL ...]",
    "list": "",
    "worker": "[MODEL] --rank N --leader HOST:PORT",
    "rm": "NAME [NAME ...]",
    "kv": "ACTION FOLDER",
    "batch": "MODEL IN OUT",
    "convert": "MODEL OUT",
    "plan": "[MODEL]",
    "bench": "[MODEL]",
    "hardware": "[FOLDER]",
    "doctor": "[FOLDER]",
}
_EXAMPLES = {
    "serve": "penstock serve owner/name --host-memory 6GiB",
    "worker": "penstock worker --rank 1 --leader 10.0.0.1",
    "batch": "penstock batch owner/name requests.jsonl answers.jsonl",
    "generate": 'penstock generate demo --prompt "Once upon a time" --max-tokens 100',
    "fill": 'penstock fill owner/name --text "The wheel is turned by ____."',
    "chat": "penstock chat demo",
    "pull": "penstock pull owner/name --convert",
    "list": "penstock list",
    "rm": "penstock rm owner/name",
    "kv": "penstock kv list /fast-disk/kv",
    "convert": "penstock convert owner/name name-int8",
    "plan": "penstock plan owner/name \npenstock plan --shape solar-10.7b --card 'GTX 1060'",
    "hardware": "penstock hardware /models",
    "bench": "penstock bench --shape solar-10.7b --host-memory 6GiB",
    "doctor": "penstock doctor /models",
    "report": "penstock report owner/name",
    "eval": "penstock eval owner/name --text held-out.txt",
}
#: The commands in the order of --help: what a command does, and the function that adds its arguments.
_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "serve": ("answer HTTP requests as OpenAI's API does", _add_serve),
    "worker": ("compute some layers of a model that another machine serves", _add_worker),
    "batch": ("answer a file of requests, in OpenAI's batch format", _add_batch),
    "generate": ("continue a text in the terminal", _add_generate),
    "fill": ("fill in the blanks of a text in the terminal", _add_fill),
    "chat": ("talk to a model in the terminal", _add_chat),
    "pull": ("fetch a model from the hub, to be served without a network", _add_pull),
    "list": ("list the models that were fetched, with their sizes", _add_list),
    "rm": ("delete models that were fetched", _add_rm),
    "convert": ("write a model as INT8 or INT4, laid out to be streamed", _add_convert),
    "plan": ("tell what would lie in which memory, and how fast a step would be", _add_plan),
    "hardware": ("measure this machine: memory, disk, arithmetic, GPU", _add_hardware),
    "bench": ("time steps of a model, or of random weights of a shape", _add_bench),
    "doctor": ("tell what slows this machine down, and what to do", _add_doctor),
    "report": ("tell what quantization costs, tensor by tensor", _add_report),
    "eval": ("measure perplexity, and the distance from the unquantized model", _add_eval),
    "kv": ("list, verify and prune keys and values on disk (--kv-disk)", _add_kv),
}
