"""`mcp`: the other commands as tools of a Model Context Protocol server, for agents.

The arguments of a tool are those of the command, and a call runs the command line that a person would type, with `--json`.
"""

import inspect
import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from itertools import takewhile
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, get_args

from hooked_lm.cli.command import EXAMPLES, Parameter, app, clean_errors, parameters
from hooked_lm.cli.output import to_stderr
from hooked_lm.extras import require_extra

if TYPE_CHECKING:
    from mcp.server import Server

INSTRUCTIONS = (
    "Interpretability of transformer language models. The model 'demo' is bundled; others are hub ids, local folders and "
    "short names such as gpt2. Files are written to the folder in which the server runs, unless a path says otherwise."
)
JSON_TYPES: dict[object, str] = {
    int: "integer",
    float: "number",
    bool: "boolean",
}  # all others are texts, as on a command line


@app.command("mcp", epilog="Clients start it as:\n\nhooked-lm mcp")
def mcp() -> None:
    """Serve the other commands as tools to an agent.

    The server speaks the Model Context Protocol on stdin and stdout.
    """
    with clean_errors(None, False):
        anyio, stdio = require_extra("anyio", "mcp"), require_extra("mcp.server.stdio", "mcp")

        async def serve() -> None:
            tools = server()
            async with stdio.stdio_server() as (incoming, outgoing):
                await tools.run(incoming, outgoing, tools.create_initialization_options())

        if sys.stdin.isatty():
            to_stderr("waiting for a client on stdin: clients start this command themselves")
        anyio.run(serve)


def server() -> "Server[Any]":
    """The server. Its calls run one after the other, because what a command prints goes to the stdout of the process."""
    from importlib.metadata import version

    import anyio
    from mcp import types
    from mcp.server import Server, ServerRequestContext

    one_call = anyio.Lock()

    async def list_tools(
        _: ServerRequestContext[Any], page: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool(name=name, **describe(name)) for name in EXAMPLES])

    async def call_tool(_: ServerRequestContext[Any], asked: types.CallToolRequestParams) -> types.CallToolResult:
        async with one_call:
            result = await anyio.to_thread.run_sync(call, asked.name, asked.arguments or {})
        text = result["error"]["message"] if "error" in result else json.dumps(result)
        content: list[types.ContentBlock] = [types.TextContent(text=text)]
        return types.CallToolResult(content=content, structured_content=result, is_error="error" in result)

    return Server(
        "hooked-lm",
        version=version("hooked-lm"),
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What `hooked-lm NAME ... --json` prints for these arguments.

    >>> call("sites", {"model": "demo", "match": "z0"})["sites"][0]["shape"]
    ['batch', 'pos', 8, 16]
    >>> call("lens", {"model": "demo"})["error"]["message"]
    "Missing argument 'PROMPT' (see hooked-lm lens --help)"
    """
    with TemporaryFile("w+", encoding="utf-8") as printed:
        with redirect_stdout(printed):
            app(command_line(name, arguments), prog_name="hooked-lm", standalone_mode=False)
        printed.seek(0)
        result: dict[str, Any] = json.load(printed)
    return result


def command_line(name: str, arguments: Mapping[str, Any]) -> list[str]:
    """The words of the command line. An argument that the command lacks is an option, which the command then refuses.

    >>> command_line("lens", {"prompt": "Mary", "model": "demo", "k": 3})
    ['lens', '--k=3', '--json', '--', 'demo', 'Mary']
    """
    params = parameters(name)
    values = {key: value for key, value in arguments.items() if value is not None}
    places = [key for key, param in params.items() if param.param_type_name == "argument"]
    options: list[str] = []
    for key, value in values.items():
        param = params.get(key)
        if key in places:
            continue
        if param is None:
            options.append(f"--{key.replace('_', '-')}={value}")
        elif isinstance(value, bool) and getattr(param, "is_flag", False):
            options += (param.opts if value else param.secondary_opts)[:1]
        else:
            options += [f"{param.opts[0]}={each}" for each in (value if isinstance(value, list) else [value])]
    return [name, *options, "--json", "--", *(str(values[key]) for key in takewhile(values.__contains__, places))]


def describe(name: str) -> dict[str, Any]:
    """The help of a command with its example, and its arguments as a JSON schema.

    >>> describe("models")["input_schema"]["properties"]["missing"]
    {'type': 'boolean', 'description': 'List those of transformers that do not load, and why.', 'default': False}
    """
    [function] = [each.callback for each in app.registered_commands if each.name == name]
    signature, params = inspect.signature(function), parameters(name)  # type: ignore[arg-type]
    return {
        "description": f"{inspect.getdoc(function)}\n\nOn the command line:\n{EXAMPLES[name]}",
        "input_schema": {
            "type": "object",
            "properties": {
                key: _schema(param, signature.parameters[param.name].annotation) for key, param in params.items()
            },
            "required": [key for key, param in params.items() if param.required],
            "additionalProperties": False,
        },
    }


def _schema(param: Parameter, annotation: object) -> dict[str, Any]:
    """One argument: its type, its help, and its default if it has one."""
    one = {"type": JSON_TYPES.get(_innermost(annotation), "string")}
    default = param.default if isinstance(param.default, (bool, int, float)) else str(param.default)
    return {
        **({"type": "array", "items": one} if param.multiple else one),
        "description": param.help,
        **({"default": default} if param.default is not None else {}),
    }


def _innermost(annotation: object) -> object:
    """The type inside of Annotated, a list, and a choice with None."""
    return next((_innermost(inner) for inner in get_args(annotation)), annotation)
