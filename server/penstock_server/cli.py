"""The command line: `penstock serve | worker | batch | generate | fill | chat | pull | list | rm | plan |
hardware | doctor | bench | convert | report | eval | kv`.

Exit codes: 0 done, 1 failed (one line on stderr says why), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from penstock.errors import ConfigError, PenstockError
from penstock.goes_with import Feature, check_together
from penstock_server.commands.command_line import CALIBRATION_TOKENS, CARD_REPORT, build_parser
from penstock_server.facade.source_checksums import begin_checksums
from penstock_server.serving.listener import bind
from penstock_server.settings.settings import Settings
from penstock_server.settings.sources import make_settings

#: What a full disk behind stdout says.
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    for stream in (sys.stdin, sys.stdout):  # characters that the terminal lacks, bytes that are no text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    options = build_parser().parse_args(arguments)
    try:
        _check_system()
        _check_contradictions(options)
        _check_table(options)
        settings = make_settings(vars(options), os.environ, _needs_model(options))
        code = _run(options, settings)
        if sys.stdout is not None:
            sys.stdout.flush()  # the last lines reach nobody, or a full disk, as well as the first ones
        return code
    except ConfigError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has closed the pipe. Python's last flush goes to /dev/null instead.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None and error.errno not in _OUTPUT_ERRORS:
            raise
        what = "the output can't be written" if error.filename is None else error.filename
        print(f"penstock: {what}: {error.strerror}", file=sys.stderr)
        return 1


def _check_system() -> None:
    """Raises ConfigError where weights can't be read as they are here."""
    if sys.platform != "linux":
        raise ConfigError(
            f"Penstock runs on Linux, and this is {sys.platform}: use WSL2 on Windows, or a Linux "
            "container or virtual machine"
        )


def _needs_model(options: argparse.Namespace) -> bool:
    has_others = getattr(options, "shape", None) is not None or _wants_table(options)
    return options.command not in ("hardware", "doctor", "list", "rm", "kv", "worker") and not has_others


def _check_contradictions(options: argparse.Namespace) -> None:
    """Raises ConfigError for flags that would have no effect beside other flags."""
    given = vars(options)  # has a setting only if the setting is on the command line
    has_shape = getattr(options, "shape", None) is not None
    if "calibration_tokens" in given and "calibrate" not in given:
        raise ConfigError("--calibration-tokens needs a text: add --calibrate FILE")
    if (num_tokens := given.get("calibration_tokens", 1)) < 1:
        raise ConfigError(f"--calibration-tokens is {num_tokens}; it must be at least 1")
    if options.command == "doctor":
        if given["report"] is not None and not options.card:
            raise ConfigError("--report is written with --card: add --card, or leave --report out")
        if options.card and options.folder != Path.cwd():
            raise ConfigError("--card tries a GPU and looks at no folder: leave FOLDER or --card out")
    if has_shape and (
        idle := given.keys() & {"model", "revision", "offline", "ignore_unexpected_tensors", "allow_pickle"}
    ):
        raise ConfigError(
            f"--shape is a model by itself: leave out {' and '.join(sorted(idle)).replace('model', 'MODEL')}"
        )
    asked = {name for name, value in given.items() if value is not None}
    if getattr(options, "verify", False) and asked - {"command", "model", "verify"}:
        raise ConfigError("--verify takes the folder that was converted, and nothing else")


def _check_table(options: argparse.Namespace) -> None:
    """Raises ConfigError for flags that name a model or a machine beside a table."""
    names = ("model", "revision", "shape", "card", "price_per_hour", "json")
    others = [name for name in names if getattr(options, name, None)]
    if _wants_table(options) and others:
        flags = ["MODEL" if name == "model" else f"--{name.replace('_', '-')}" for name in others]
        raise ConfigError(f"the tables show known models and machines: leave out {' and '.join(flags)}")


def _wants_table(options: argparse.Namespace) -> bool:
    """Whether a command prints a table that no model has a part in."""
    return getattr(options, "table", False) or getattr(options, "architectures", False)


def _run(options: argparse.Namespace, settings: Settings) -> int:
    return _COMMANDS[options.command](options, settings)


# Commands are imported late: torch takes seconds to import, and --help and wrong settings shall not wait.


def _serve(options: argparse.Namespace, settings: Settings) -> int:
    settings.engine_config()  # raises ConfigError before anything starts
    if settings.leader_config(settings.model) is not None and settings.models:
        check_together({Feature.NODES, Feature.SEVERAL_MODELS})
    listener = bind(settings.host, settings.port)
    for number in (signal.SIGINT, signal.SIGTERM):  # until serve() has handlers of its own
        signal.signal(number, lambda *_: os._exit(0))
    from penstock_server.serving.serve import serve

    return serve(settings, listener)


def _worker(options: argparse.Namespace, settings: Settings) -> int:
    settings.engine_config()
    settings.worker_config()
    from penstock_server.commands.worker import run_worker

    return run_worker(settings)


def _batch(options: argparse.Namespace, settings: Settings) -> int:
    settings.engine_config()
    from penstock_server.commands.batch import run_batch

    return run_batch(settings, options.source, options.target)


def _report(options: argparse.Namespace, settings: Settings) -> int:
    from penstock_server.commands.report import report

    return report(settings, options.json)


def _eval(options: argparse.Namespace, settings: Settings) -> int:
    from penstock_server.commands.evaluating import run_eval

    return run_eval(settings, options.text, options.against, options.context, options.stride, options.json)


def _pull(options: argparse.Namespace, settings: Settings) -> int:
    from penstock_server.commands.pulling import run_pull

    return run_pull(settings, options.convert, options.delete_original)


def _list(options: argparse.Namespace, settings: Settings) -> int:
    from penstock_server.commands.stored_models import run_list

    return run_list(settings.cache_dir, options.json)


def _rm(options: argparse.Namespace, settings: Settings) -> int:
    from penstock_server.commands.stored_models import run_rm

    return run_rm(settings.cache_dir, options.names)


def _plan(options: argparse.Namespace, settings: Settings) -> int:
    from penstock_server.commands.budget import budget_of
    from penstock_server.commands.planning import architecture_table, model_table, plan_report
    from penstock_server.commands.planning.other_machine import OtherMachine

    if options.architectures:
        return architecture_table.run_architectures(settings)
    if options.table:
        return model_table.run_table(settings)
    other = OtherMachine.of(options.card, options.processor)
    budget = budget_of(settings, options.fit, options.bits)
    return plan_report.run_plan(settings, options.shape, other, options.price_per_hour, options.json, budget)


def _hardware(options: argparse.Namespace, settings: Settings) -> int:
    from penstock_server.commands.planning.plan_report import run_hardware

    return run_hardware(settings, options.folder, options.json, options.remeasure)


def _doctor(options: argparse.Namespace, settings: Settings) -> int:
    if options.card:
        from penstock_server.commands.card_doctor import run_card_doctor

        return run_card_doctor(settings.cache_dir, options.report or CARD_REPORT, device=settings.device)
    from penstock_server.commands.doctor import run_doctor

    return run_doctor(options.folder, settings.cache_dir, settings.device)


def _bench(options: argparse.Namespace, settings: Settings) -> int:
    from penstock_server.commands.benchmark import run_bench

    sequences, popularity = tuple(options.sequences), options.expert_popularity
    return run_bench(
        settings, options.shape, sequences, options.prompt, options.json, popularity, options.drafts
    )


def _convert(options: argparse.Namespace, settings: Settings) -> int:
    if options.verify:
        from penstock_server.commands import converting

        return converting.run_verify(Path(settings.model))
    if options.target is None:
        raise ConfigError("convert needs the folder to write: penstock convert MODEL OUT")
    text, num_tokens = (vars(options).get(name) for name in ("calibrate", "calibration_tokens"))
    num_tokens = CALIBRATION_TOKENS if num_tokens is None else num_tokens
    with closing(begin_checksums(settings)) as checksums:
        from penstock_server.commands import converting
        from penstock_server.commands.budget import budget_of

        budget = budget_of(settings, options.fit, options.bits)
        return converting.run_convert(settings, options.target, text, num_tokens, checksums, budget)


def _fill(options: argparse.Namespace, settings: Settings) -> int:
    from penstock_server.commands.filling import fill

    return fill(settings, options)


def _kv(options: argparse.Namespace, settings: Settings) -> int:
    from penstock_server.commands.kv import run_kv

    return run_kv(options.action, options.folder, options.keep, options.json)


def _generate(options: argparse.Namespace, settings: Settings) -> int:
    from penstock_server.commands.terminal import generate

    return generate(settings, options)


def _chat(options: argparse.Namespace, settings: Settings) -> int:
    from penstock_server.commands.terminal import chat

    return chat(settings, options)


_COMMANDS = {
    "serve": _serve,
    "worker": _worker,
    "batch": _batch,
    "report": _report,
    "eval": _eval,
    "pull": _pull,
    "list": _list,
    "rm": _rm,
    "plan": _plan,
    "hardware": _hardware,
    "doctor": _doctor,
    "bench": _bench,
    "convert": _convert,
    "fill": _fill,
    "generate": _generate,
    "chat": _chat,
    "kv": _kv,
}
