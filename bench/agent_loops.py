"""Do agents run loops of tools against the server, and does every call follow its tool's schema?

A child serves a model. An agent has three tools and one that ends its loop, and must call one of them in each
turn: OpenAI's client in a loop of its own, OpenAI's Agents SDK at /v1/responses, whole and streamed, and
pydantic-ai and smolagents, as far as they are installed. The calls are counted and checked with jsonschema. A
weak model calls at random, and its loops end at a limit.
Exit code 1 if a call does not follow its schema, or a loop fails in another way.

    pip install openai-agents pydantic-ai-slim smolagents
    python bench/agent_loops.py tiny-python-lm --episodes 5
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import jsonschema
import openai
from conditions import script_parser

MOST_TURNS: Final = 8
CITY: Final = {"type": "string", "enum": ["Bonn", "Köln"]}
SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "weather": {"city": CITY},
    "distance": {"start": CITY, "end": CITY},
    "add": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "finish": {"answer": {"type": "boolean"}},
}
RESULTS: Final = {"weather": "sunny", "distance": "27 km", "add": "5", "finish": "done"}
QUESTION: Final = "How far is the sunny city?"


def parameters(name: str) -> dict[str, Any]:
    """Return the schema of a tool's arguments."""
    own = SCHEMAS[name]
    return {"type": "object", "properties": own, "required": list(own), "additionalProperties": False}


def called(counts: Counter[str], name: str, arguments: dict[str, Any]) -> str:
    """Count a call, check it, and return its result."""
    jsonschema.validate(arguments, parameters(name))
    counts[name] += 1
    return RESULTS[name]


def by_client(address: str, model: str, seed: int, counts: Counter[str]) -> None:
    """Run a loop with OpenAI's client."""
    tools: Any = [
        {"type": "function", "function": {"name": name, "description": name, "parameters": parameters(name)}}
        for name in SCHEMAS
    ]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with openai.OpenAI(base_url=address, api_key="-", max_retries=0) as client:
        left = list(SCHEMAS)
        for turn in range(MOST_TURNS):
            # Each tool once, and the last one at the end, in an order that the model chooses.
            allowed = [{"type": "function", "function": {"name": name}} for name in left[:-1] or left]
            choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": allowed}}
            answer = client.chat.completions.create(
                model=model,
                messages=messages,
                tools=tools,
                tool_choice=choice,
                parallel_tool_calls=False,
                seed=seed + turn,
                max_tokens=400,
            )
            if answer.choices[0].finish_reason == "length":
                counts["cut"] += 1
                return
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            for call in answer.choices[0].message.tool_calls or ():
                text = called(counts, call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
                left.remove(call.function.name)
            if not left:
                return
        raise RuntimeError(f"{left} were not called.")


def by_openai_agents(address: str, model: str, seed: int, counts: Counter[str]) -> None:
    """Run a loop with OpenAI's Agents SDK at /v1/responses, streamed at every other seed."""
    from agents import (
        Agent,
        AgentsException,
        FunctionTool,
        MaxTurnsExceeded,
        ModelSettings,
        OpenAIResponsesModel,
        Runner,
        StopAtTools,
        set_tracing_disabled,
    )

    def made(name: str) -> FunctionTool:
        async def call(_context: object, arguments: str) -> str:
            return called(counts, name, json.loads(arguments))

        return FunctionTool(
            name=name, description=name, params_json_schema=parameters(name), on_invoke_tool=call
        )

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=address, api_key="-", max_retries=0) as client:
            agent = Agent(
                name="agent",
                instructions="You call tools.",
                tools=list(map(made, SCHEMAS)),
                model=OpenAIResponsesModel(model, client),
                model_settings=ModelSettings(
                    temperature=1.0, max_tokens=400, tool_choice="required", extra_body={"seed": seed}
                ),
                tool_use_behavior=StopAtTools(stop_at_tool_names=["finish"]),
                reset_tool_choice=False,
            )
            if seed % 200:
                streamed = Runner.run_streamed(agent, QUESTION, max_turns=MOST_TURNS)
                async for _ in streamed.stream_events():
                    pass
            else:
                await Runner.run(agent, QUESTION, max_turns=MOST_TURNS)

    set_tracing_disabled(True)
    try:
        asyncio.run(run())
    except AgentsException as error:
        if not isinstance(error, MaxTurnsExceeded) and "max_output_tokens" not in str(error):
            raise
        counts["cut"] += 1


def by_pydantic_ai(address: str, model: str, seed: int, counts: Counter[str]) -> None:
    """Run a loop with pydantic-ai, whose answer is a tool as well."""
    from pydantic_ai import Agent, Tool, ToolOutput, UsageLimits
    from pydantic_ai.exceptions import AgentRunError
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    tools = [
        Tool.from_schema(
            lambda name=name, **arguments: called(counts, name, arguments), name, name, parameters(name)
        )
        for name in SCHEMAS
        if name != "finish"
    ]
    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=address, api_key="-"))
    agent = Agent(chat, output_type=ToolOutput(bool, name="finish"), tools=tools, retries=0)
    try:
        agent.run_sync(
            QUESTION,
            model_settings={"seed": seed, "max_tokens": 400, "temperature": 1.0},
            usage_limits=UsageLimits(request_limit=MOST_TURNS),
        )
        counts["finish"] += 1
    except AgentRunError as error:
        if not re.search("request_limit|token limit|max_tokens", str(error)):
            raise
        counts["cut"] += 1


def by_smolagents(address: str, model: str, seed: int, counts: Counter[str]) -> None:
    """Run a loop with smolagents, which sends its history as text."""
    from smolagents import OpenAIServerModel, Tool, ToolCallingAgent
    from smolagents.agents import (
        FinalAnswerPromptTemplate,
        ManagedAgentPromptTemplate,
        PlanningPromptTemplate,
        PromptTemplates,
    )

    def made(name: str) -> Tool:
        class Made(Tool):
            description = name
            inputs = {key: {**one, "description": key} for key, one in SCHEMAS[name].items()}  # noqa: RUF012
            output_type = "string"
            skip_forward_signature_validation = True

            def forward(self, **arguments: Any) -> str:  # noqa: ANN401 - any tool's
                return called(counts, name, arguments)

        Made.name = name
        return Made()

    chat = OpenAIServerModel(model, api_base=address, api_key="-", seed=seed, max_tokens=400)
    agent = ToolCallingAgent(
        tools=[made(name) for name in SCHEMAS if name != "finish"],
        model=chat,
        max_steps=MOST_TURNS,
        verbosity_level=0,
        # Its own prompts are longer than the context of a small model.
        prompt_templates=PromptTemplates(
            system_prompt="You call tools.",
            planning=PlanningPromptTemplate(
                initial_plan="", update_plan_pre_messages="", update_plan_post_messages=""
            ),
            managed_agent=ManagedAgentPromptTemplate(task="", report=""),
            final_answer=FinalAnswerPromptTemplate(pre_messages="", post_messages="Answer."),
        ),
    )
    agent.run(QUESTION)
    counts["loops"] += 1


LOOPS: Final[dict[str, Callable[[str, str, int, Counter[str]], None]]] = {
    "openai": by_client,
    "agents": by_openai_agents,
    "pydantic_ai": by_pydantic_ai,
    "smolagents": by_smolagents,
}


@contextlib.contextmanager
def served(model: str) -> Iterator[str]:
    """Serve a model in a child, and give the address."""
    command = [str(Path(sys.executable).with_name("heterollm")), "serve", model, "--port", "0"]
    command += ["--name", "model"]
    with subprocess.Popen(  # noqa: S603 - this environment's own
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        try:
            said = ""
            for line in child.stdout:
                said += line
                if found := re.search(r"http://\S+/v1", line):
                    yield found[0]
                    return
            raise SystemExit(said)
        finally:
            child.terminate()


def main() -> int:
    """Run loops and print counts."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("model")
    parser.add_argument("--episodes", type=int, default=5, help="loops of each client (default: 5)")
    options = parser.parse_args()
    failed = 0
    with served(options.model) as address:
        for name, loop in LOOPS.items():
            if importlib.util.find_spec(name) is None:
                print(f"{name}: not installed")
                continue
            counts: Counter[str] = Counter()
            for episode in range(options.episodes):
                try:
                    loop(address, "model", 100 * episode, counts)
                except Exception as error:  # noqa: BLE001 - counted; the next loop runs
                    failed += 1
                    print(f"{name}: {type(error).__name__}: {error}"[:500])
            print(f"{name}: {options.episodes} loops, " + ", ".join(f"{k} {n}" for k, n in counts.items()))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
