"""TemplateEnvironment: chat templates in jinja2's sandbox, with the names that transformers gives them. What
they write is Traced: it tells the template's own characters from those of the messages.

Texts that stand in the template are its own, and so are numbers. A value of a message is foreign. No part of
jinja2's sandbox is weaker here: no list or dict can be changed, and no private name be reached."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, do_title, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_environment

from penstock.text.text_process import FOREIGN, OWN
from penstock.text.traced_text import Traced, formatted, has_only_own, joined


class _Code(CodeGenerator):
    """Writes the template's own texts as such."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(f"environment.own({str(value)!r})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(f"environment.own({node.data!r})")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.side_by_side((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")

    def _output_const_repr(self, group: Any) -> str:
        return f"environment.own({''.join(group)!r})"


class _Generation(Extension):
    """{% generation %}: what the model wrote, for training. The text stays as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("write"), [], [], body).set_lineno(line)

    @staticmethod
    def write(caller: Callable[[], str]) -> str:
        return caller()


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = _Code
    concat = staticmethod(joined)

    def __init__(self) -> None:
        # Without the optimizer no constant is computed before the template runs.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_written,
            extensions=[_Generation, loopcontrols],
        )
        self.own = functools.lru_cache(maxsize=4096)(_own)
        self.filters |= {"tojson": _tojson, "indent": _indent, "join": _join, "title": _title}
        self.filters = {name: _traced(function) for name, function in self.filters.items()}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _traced(_strftime_now),
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def side_by_side(self, values: tuple[Any, ...]) -> Traced:
        """The operator ~."""
        return joined(_written(value) for value in values)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        write = super().wrap_str_format(value)
        if write is None or not isinstance(value.__self__, Traced):
            return write
        return functools.update_wrapper(functools.partial(formatted, value.__self__, write), value)


def _written(value: Any) -> Traced:
    """A value as the text that stands for it. Numbers are nobody's text, so that they may be a part of the
    template's own."""
    if isinstance(value, Traced):
        return value
    is_own = value is None or isinstance(value, bool | int | float | Undefined)
    return Traced(str(value), OWN if is_own else FOREIGN)


def _traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose text is the template's own if all texts that it got were."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if type(result) is str:
            return Traced(result, OWN if has_only_own((args, kwargs)) else FOREIGN)
        return result

    return call


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter writes HTML's characters in another way."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _own(text: str) -> Traced:
    return Traced(text, OWN)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if not isinstance(text, Traced):
        return do_indent(text, width, first, blank)
    space, end = _written(width) if isinstance(width, str) else _own(" " * width), _own("\n")
    lines = (text + end).splitlines()
    indented = [lines[0], *(space + line if line or blank else line for line in lines[1:])]
    return joined([*([space] if first else []), end.join(indented)])


@pass_environment
def _join(
    environment: TemplateEnvironment, values: Iterable[Any], between: Any = "", attribute: Any = None
) -> str:
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    text: str = _written(between).join(map(_written, values))
    return text


def _title(text: Any) -> str:
    titled: str = do_title(text)
    return text._changed(titled, str.title) if isinstance(text, Traced) else titled


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Dict:
    """dict, without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace in which no private name can be set."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} is a private name, which no namespace may have")
