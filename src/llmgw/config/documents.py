"""YAML text to plain data that remembers on which line each value stands.

The scalars are those of YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema), not PyYAML's 1.1: `no`
and `on` are text, `12:30` is text, `010` is text, so a label or a time never turns into something else unseen.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from attrs import field, frozen

from llmgw.errors import ConfigError

Keys = tuple[str | int, ...]

_MAX_BYTES = 1 << 20
_MAX_NODES = 50_000
_SECRET = re.compile(r"(://[^\s/@:]*:)[^\s/@]+@")
_TAG = "tag:yaml.org,2002:"


@frozen
class Problem:
    """One thing that is wrong.

    Args:
        path: keys and list positions from the top, such as `("fabrics", 0, "name")`.
        words: what is wrong and what may stand there.
        quotable: quotes around the value would repair it, so the value is shown in quotes.
    """

    path: Keys
    words: str
    quotable: bool = False


@frozen
class Document:
    """One YAML document as plain data.

    Args:
        source: file name for messages, "" for data that came without one.
        data: dicts, lists, str, int, float, bool and None.
        lines: path -> line, counted from 1.
        texts: path -> a scalar as it was written.
        problems: what was wrong with it as YAML.
    """

    source: str
    data: Any
    lines: dict[Keys, int] = field(factory=dict)
    texts: dict[Keys, str] = field(factory=dict)
    problems: tuple[Problem, ...] = ()

    def render(self, problem: Problem) -> str:
        """`file:line: path: words`, without the parts there are none of."""
        words = problem.words
        text = self.texts.get(problem.path)
        if problem.quotable and text is not None:
            words += f', write it in quotes: `"{text}"`'
        parts = [dotted(problem.path), words] if problem.path else [words]
        if self.source:
            line = self.line(problem.path)
            parts.insert(0, f"{self.source}:{line}" if line else self.source)
        return ": ".join(parts)

    def line(self, path: Keys) -> int | None:
        """The line of a value, or of the nearest value around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


class _Loader(yaml.SafeLoader):
    """Pure Python (it shows a snippet in syntax errors), with the scalars of YAML 1.2."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+", list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _tag, re.compile(f"^(?:{_pattern})$"), _first)


def dotted(path: Keys) -> str:
    """`("fabrics", 0, "name")` as `fabrics[0].name`."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def read_file(path: Path) -> str:
    """The text of a configuration file.

    Raises:
        ConfigError: it is missing, not readable, too big or not UTF-8.
    """
    try:
        with path.open("rb") as handle:
            data = handle.read(_MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"`{path}` does not exist", hint="name an existing file with `-c FILE`") from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot read `{path}`: {reason}", hint="check its path and permissions") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"`{path}` is larger than 1 MiB", hint="this is not a configuration file of llmgw")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise failed(str(path), [f"{path}:{line}: not UTF-8 text"]) from error


def failed(source: str, problems: list[str]) -> ConfigError:
    """The error that carries all problems of one file, or of data without a file (`source` "")."""
    count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError(f"`{source}` has {count}" if source else f"what was sent has {count}", problems)


def parse(text: str, source: str) -> list[Document]:
    """All YAML documents of `text`; an empty text is one document without data.

    Raises:
        ConfigError: it is not YAML; with the line and a snippet.
    """
    _refuse_unprintable(text, source)
    loader = _Loader(text)
    documents = []
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                documents.append(_Builder(source).document(node))
    except yaml.MarkedYAMLError as error:
        raise failed(source, [_syntax(error, source)]) from error
    finally:
        loader.dispose()
    return documents or [Document(source, None, {(): 1})]


def _refuse_unprintable(text: str, source: str) -> None:
    match = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if match:
        line = text.count("\n", 0, match.start()) + 1
        raise failed(source, [f"{source}:{line}: holds the unprintable character U+{ord(match[0]):04X}"])


def _syntax(error: yaml.MarkedYAMLError, source: str) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{source}:{mark.line + 1}" if mark else source
    said = ", ".join(part for part in (error.context, error.problem) if part)
    snippet = mark.get_snippet(indent=4, max_length=100) if mark else None
    return _SECRET.sub(r"\1***@", f"{where}: not valid YAML: {said}" + (f"\n{snippet}" if snippet else ""))


class _Builder:
    """Walks the nodes of one document."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lines: dict[Keys, int] = {}
        self._texts: dict[Keys, str] = {}
        self._problems: list[Problem] = []
        self._around: list[yaml.Node] = []
        self._count = 0

    def document(self, node: yaml.Node) -> Document:
        data = self._value(node, ())
        return Document(self._source, data, self._lines, self._texts, tuple(self._problems))

    def _value(self, node: yaml.Node, path: Keys) -> Any:
        self._lines.setdefault(path, node.start_mark.line + 1)
        self._count += 1
        # an alias may repeat a value a billion times, or hold itself
        if self._count > _MAX_NODES or any(node is outer for outer in self._around):
            if self._count <= _MAX_NODES + 1:
                self._problems.append(Problem(path, "an alias that repeats without end"))
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self._around.append(node)
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
            return self._mapping(node, path)
        finally:
            self._around.pop()

    def _mapping(self, node: yaml.Node, path: Keys) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._problems.append(Problem(path, f"line {line}: a key must be plain text"))
                continue
            key = str(key_node.value)
            here = (*path, key)
            if key_node.tag == _TAG + "merge":
                self._lines[here] = line
                self._problems.append(Problem(here, "merging maps is not supported, write the keys out"))
            elif key in made:
                self._problems.append(Problem(here, f"given again on line {line}, remove one of the two"))
            else:
                self._lines[here] = line
                made[key] = self._value(value_node, here)
        return made

    def _scalar(self, node: yaml.ScalarNode, path: Keys) -> Any:
        self._texts[path] = str(node.value)
        kind, text = node.tag.removeprefix(_TAG), str(node.value)
        if kind == "str":
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        try:
            if kind == "int":
                return int(text)
            if kind == "float":
                return float(text)
        except ValueError:
            pass
        self._problems.append(Problem(path, f"the tag `{node.tag[:60]}` is not supported, remove it"))
        return text
