"""The server of `hooked-lm mcp`, called over stdio by the client of the package mcp."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters, stdio_client
from typer.testing import CliRunner

from hooked_lm.cli import EXAMPLES, app
from hooked_lm.cli.mcp import call, command_line, describe, parameters

ROOT = Path(__file__).parents[2]


def from_json(*arguments: str) -> dict[str, Any]:
    shown = CliRunner().invoke(app, [*arguments, "--json"])
    return json.loads(shown.stdout)


@pytest.mark.slow
def test_a_client_lists_calls_and_is_told_errors(tmp_path: Path) -> None:
    started = StdioServerParameters(
        command=sys.executable, args=["-m", "hooked_lm", "mcp"], env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path
    )
    prompt = "The capital of France is"

    async def session(log: Any) -> list[Any]:
        async with Client(stdio_client(started, errlog=log)) as client:
            tools = (await client.list_tools()).tools
            cached = await client.call_tool(
                "cache", {"model": "demo", "prompt": prompt, "site": ["z"], "out": "z.file"}
            )
            wrong = await client.call_tool("sites", {"model": "demo", "match": "nothing*"})
            unknown = await client.call_tool("lens", {"model": "demo", "prompt": prompt, "layerz": 1})
            continued = await client.call_tool("generate", {"model": "demo", "prompt": prompt, "greedy": True})
            return [tools, cached, wrong, unknown, continued]

    with (tmp_path / "log").open("w") as log:
        tools, cached, wrong, unknown, continued = anyio.run(session, log)
    assert {tool.name for tool in tools} == set(EXAMPLES)
    assert all(tool.description and tool.input_schema["type"] == "object" for tool in tools)

    expected = from_json("generate", "demo", prompt, "--greedy")
    assert not continued.is_error
    assert continued.structured_content == json.loads(continued.content[0].text) == expected
    assert not cached.is_error
    assert (tmp_path / "z.file").exists()

    assert wrong.is_error
    assert wrong.structured_content == from_json("sites", "demo", "--match", "nothing*")
    assert wrong.content[0].text.startswith("no hook point 'nothing*'")
    assert unknown.is_error
    assert "No such option: --layerz" in unknown.content[0].text
    assert wrong.content[0].text in (tmp_path / "log").read_text(), "errors are lines on stderr, as of the command"


@pytest.mark.parametrize("name", sorted(EXAMPLES))
@pytest.mark.every_parameter
def test_a_tool_has_the_arguments_of_its_command(name: str) -> None:
    schema, params = describe(name)["input_schema"], parameters(name)
    assert schema["properties"].keys() == params.keys()
    assert not {"as_json", "debug"} & params.keys()
    for key, each in schema["properties"].items():
        assert each["description"] == params[key].help
        assert (each["type"] == "array") == params[key].multiple
        assert key not in schema["required"] or "default" not in each
    json.dumps(schema)


def test_types_are_those_of_the_command() -> None:
    types = {key: each["type"] for key, each in describe("generate")["input_schema"]["properties"].items()}
    expected = {
        "model": "string",
        "max_new_tokens": "integer",
        "greedy": "boolean",
        "top_p": "number",
        "layer": "array",
    }
    assert {key: types[key] for key in expected} == expected
    assert describe("generate")["input_schema"]["properties"]["layer"]["items"] == {"type": "integer"}
    assert describe("generate")["input_schema"]["required"] == ["model", "prompt"]


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        (
            "lens",
            {"prompt": "-1 apple", "model": "demo", "positions": "-1"},
            "lens --positions=-1 --json -- demo|-1 apple",
        ),
        ("lens", {"prompt": "Mary"}, "lens --json --"),  # so that the error names the model
        ("demo", {"open": False}, "demo --no-open --json --"),
        ("models", {"missing": False, "name": None}, "models --json --"),
        ("cache", {"model": "demo", "prompt": "a", "site": ["z", "q"]}, "cache --site=z --site=q --json -- demo|a"),
        ("lens", {"as_json": True, "max_k": 1}, "lens --as-json=True --max-k=1 --json --"),
        ("nothing", {"a": 1}, "nothing --a=1 --json --"),
    ],
)
@pytest.mark.every_parameter
def test_a_call_is_a_command_line(name: str, arguments: dict[str, Any], line: str) -> None:
    before, separator, after = line.partition(" -- ")
    expected = [*before.split(), *(["--", *after.split("|")] if separator else [])]
    assert command_line(name, arguments) == expected


def test_what_is_no_command_line_is_refused() -> None:
    for name, arguments in (("nothing", {}), ("lens", {"help": True}), ("lens", {"": 1}), ("mcp", {})):
        assert call(name, arguments)["ok"] is False, name


def test_without_mcp_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['mcp'] = None; from hooked_lm.__main__ import main; main()"
    shown = subprocess.run([sys.executable, "-c", code, "mcp"], capture_output=True, text=True, cwd=ROOT)
    assert shown.returncode == 1
    assert shown.stderr == "failed: this needs the package mcp: pip install 'hooked-lm[mcp]'\n"
