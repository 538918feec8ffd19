"""The documentation names every key, command and error code there is, and none that there is not."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import attrs
import click
import pytest

from llmgw import cli
from llmgw.agent.settings import ENGINE_KEYS, AgentSettings
from llmgw.config import Bytes, Seconds, keys_of, load_profile
from llmgw.config.profiles import ProfileFile
from llmgw.ctl.contextfile import CtlFile
from llmgw.server import settings as server
from llmgw.server.settings import EngineEntry, ServerSettings
from llmgw.units import parse_duration, parse_size

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "llmgw"
SECTIONS = {"agent.yaml": AgentSettings, "server.yaml": ServerSettings, "Profiles": ProfileFile, "ctl.yaml": CtlFile}


def section(title: str) -> str:
    text = (ROOT / "docs" / "configuration.md").read_text()
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def table(title: str) -> dict[str, str]:
    """Key -> default, as documented."""
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \| ", section(title), re.MULTILINE)
    assert len(dict(rows)) == len(rows), "a key is documented twice"
    return dict(rows)


def inner_class(kind: Any) -> tuple[Any, str]:
    """The attrs class inside a type, and what stands for its keys or places in a path."""
    if attrs.has(kind) and keys_of_or_none(kind):
        return kind, ""
    marks = {tuple: "[]", Mapping: ".*"}
    for arg in get_args(kind):
        found, mark = inner_class(arg)
        if found is not None:
            return found, marks.get(get_origin(kind), "") + mark
    return None, ""


def keys_of_or_none(kind: Any) -> bool:
    return kind.__module__ != "llmgw.config.values"


def every_key(kind: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for key, field in keys_of(kind).items():
        path = f"{before}{key}"
        inner, mark = inner_class(field.type)
        if inner is None or mark:
            yield path, field
        if inner is not None:
            yield from every_key(inner, f"{path}{mark}.")


@pytest.mark.parametrize("title", SECTIONS)
def test_every_key_is_documented_and_every_documented_key_exists(title: str) -> None:
    have = {path for path, _ in every_key(SECTIONS[title])}
    if title == "agent.yaml":
        have |= {f"engines.{name}.{key}" for name, keys in ENGINE_KEYS.items() for key in keys}
    assert set(table(title)) == have


@pytest.mark.parametrize("title", SECTIONS)
def test_every_documented_default_is_the_real_one(title: str) -> None:
    documented = table(title)
    for path, field in every_key(SECTIONS[title]):
        said = documented[path]
        if field.default is attrs.NOTHING:
            assert said.startswith("required"), path
        elif isinstance(field.default, bool):
            assert said == f"`{str(field.default).lower()}`", path
        elif isinstance(field.default, int | float):
            written = said.strip("`")
            seconds = Seconds in (field.type, *get_args(field.type))
            size = Bytes in (field.type, *get_args(field.type))
            read = parse_duration if seconds else parse_size if size else float
            assert read(written) == field.default, path
        elif isinstance(field.default, str) and field.default:
            assert said == f"`{field.default}`", path
        else:
            assert not said.startswith("required"), path


def test_the_default_engine_is_documented() -> None:
    assert table("server.yaml")["engines"] == f"`llama.cpp: {server.LLAMA_CPP_VERSION}`"
    assert f"`{server.LLAMA_CPP_VERSION}`" in table("server.yaml")["engines.*.version"]
    assert {f.name for f in attrs.fields(EngineEntry)} <= {path.rsplit(".", 1)[-1] for path in table("server.yaml")}


def test_the_examples_are_valid() -> None:
    from llmgw.agent import settings as agent
    from llmgw.config import load_text

    def example(title: str) -> str:
        return section(title).split("```yaml\n", 1)[1].split("```", 1)[0]

    assert agent.loads(example("agent.yaml"), "example").warnings == ()
    assert server.loads(example("server.yaml"), "example").engine_specs[0].sources[-1] == "github"
    assert load_profile(example("Profiles"), "example").replicas == 2
    assert load_text(example("ctl.yaml"), "example", CtlFile).current_context == "lab"


def test_the_files_of_the_quickstart_are_valid_as_they_stand() -> None:
    from llmgw.agent import settings as agent

    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "quickstart.md").read_text(), re.DOTALL)
    on_server, on_node, profile = map(textwrap.dedent, blocks)
    assert server.loads(on_server, "server.yaml").agents.tls is not None
    assert agent.loads(on_node, "agent.yaml").tls is not None
    assert load_profile(profile, "profile.yaml").replicas == 1


OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]+)")


def test_every_option_of_llmgw_up_the_quickstart_names_exists() -> None:
    from llmgw.up.command import command as up

    text = (ROOT / "docs" / "quickstart.md").read_text().split("## Asking it")[0]
    assert set(OPTION.findall(text)) <= {name for option in up.params for name in option.opts}


def every_command(command: click.Command, path: str) -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield path
        return
    if command.invoke_without_command:
        yield path
    with click.Context(command) as context:
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from every_command(inner, f"{path} {name}")


def test_every_command_is_documented_and_every_documented_command_exists() -> None:
    documented = set(re.findall(r"^\| `(llmgw [^`]+)` \|", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE))
    assert documented == {*every_command(cli._group([]), "llmgw"), *(f"llmgw {name}" for name in cli.HIDDEN)}


def test_the_short_help_of_each_command_stands_in_its_table() -> None:
    from llmgw.ctl import app

    with click.Context(app.command) as context:
        for name in app.COMMANDS:
            assert app.command.get_command(context, name) is not None


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    for code in (cli.DONE, cli.FAILED, cli.USAGE, cli.INTERRUPTED):
        assert f"\n| {code} | " in text


POSITIONAL = {"Concern": 0, "NodeWarning": 0, "malformed": 2, "upstream_failed": 2, "_unauthorized": 1}
CODE = re.compile(r"[a-z]+(?:[-_][a-z]+)*")


def codes_of(tree: ast.AST) -> Iterator[str]:
    """Strings a file uses as a code: `code = …` in a class, `code=…` or its place in a call, a parameter's default."""
    for node in ast.walk(tree):
        values: list[ast.expr | None] = []
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
                if any(isinstance(target, ast.Name) and target.id == "code" for target in targets):
                    values.append(getattr(line, "value", None))
        elif isinstance(node, ast.Call):
            values += [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            place = POSITIONAL.get(getattr(node.func, "id", getattr(node.func, "attr", "")))
            values += node.args[place : place + 1] if place is not None else []
        elif isinstance(node, ast.FunctionDef):
            positional = zip(reversed(node.args.args), reversed(node.args.defaults), strict=False)
            named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            values += [default for argument, default in (*positional, *named) if argument.arg == "code"]
        for value in values:
            for part in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and CODE.fullmatch(part.value):
                    yield part.value


def test_every_error_code_is_documented() -> None:
    documented = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert len(set(documented)) == len(documented), "a code is documented twice"
    used = {code: path for path in SRC.rglob("*.py") for code in codes_of(ast.parse(path.read_text()))}
    assert "config-invalid" in used
    assert "model_not_found" in used
    assert "clock-skew" in used
    missing = {code: str(path.relative_to(SRC)) for code, path in used.items() if code not in documented}
    assert missing == {}
