"""Environments written for the package verifiers, whose own loop is let run: the model that it asks is the policy behind `step`.

    reset ─▶ verifiers' run_rollout ──asks the model──▶ first observation
    step  ─▶ the model's answer ─▶ tools, environment … ──asks again──▶ observation
                                                       └──ends, scores──▶ done, reward

So nothing here knows how an environment takes its turns; only where verifiers asks a model (Client) and what a rollout
gives (reward, error). Made for the environments that have a `load_environment`, and tested with verifiers 0.3.1: 0.4 dropped them, and
its harnesses speak to an OpenAI-compatible endpoint instead.

    observation   what the environment said since the last turn, one message after the other; its tools, where it has some, once
    action        any text; tool calls in it (tool_calls.py) reach the environment's tools

The seed takes a row of the dataset. A rollout that has had max_turns is ended, and scored as it stands. The reward is verifiers' weighted
sum; a task counts as solved from success_reward on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import verifiers as vf
from verifiers.clients import Client
from verifiers.errors import OverlongPromptError
from verifiers.types import Response, ResponseMessage
from verifiers.types import ToolCall as NativeCall

from rose_hpc.config import EnvConfig, VerifiersConfig
from rose_hpc.errors import ConfigError
from rose_hpc.rollout.envs.base import EnvFault, StepResult, outside_an_episode
from rose_hpc.rollout.envs.tool_calls import ToolCall, response, tool_calls

MODEL = "policy"
TOOLS = 'You may call these tools, each with <tool_call>{"name": "...", "arguments": {...}}</tool_call>:\n'


class Policy(Client):  # type: ignore[misc]
    """The model that verifiers asks. asked: what it is told, as text; each is to be answered by `say`, in order.

    What verifiers calls native, what goes to a model and comes back, is its own messages and the policy's text.
    """

    def __init__(self, max_turns: int) -> None:
        super().__init__(None)
        self.asked: asyncio.Queue[str] = asyncio.Queue()
        self._said: asyncio.Queue[str] = asyncio.Queue()
        self._told, self._turns, self._max_turns = 0, 0, max_turns

    def say(self, text: str) -> None:
        """The answer to what was asked last."""
        self._said.put_nowait(text)

    async def get_native_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> str:
        """See verifiers' Client. Raises OverlongPromptError, which ends a rollout in good order, when the turns are used up."""
        if self._turns == self._max_turns:
            raise OverlongPromptError(f"{self._max_turns} turns are over")
        self._turns += 1
        new = [text for message in prompt[self._told :] if (text := message_text(message))]
        if self._told == 0 and tools:
            new.insert(0, TOOLS + "\n".join(json.dumps(tool.model_dump(exclude_none=True)) for tool in tools))
        self._told = len(prompt) + 1  # the answer to come is ours
        self.asked.put_nowait("\n\n".join(new))
        return await self._said.get()

    async def from_native_response(self, response: str) -> Response:
        """The policy's text as verifiers has it: the text, and the tool calls in it."""
        calls = [call for call in tool_calls(response) if isinstance(call, ToolCall)]
        native = [NativeCall(id=f"call-{self._turns}-{i}", name=c.name, arguments=json.dumps(c.arguments)) for i, c in enumerate(calls)]
        message = ResponseMessage(
            content=response, tool_calls=native or None, finish_reason="tool_calls" if native else "stop", is_truncated=False
        )
        return Response(id=f"turn-{self._turns}", created=int(time.time()), model=MODEL, message=message)

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return messages, {}

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def raise_from_native_response(self, response: str) -> None:
        """Every text is an answer."""

    def setup_client(self, config: Any) -> None:
        """There is nothing to connect to."""

    async def close(self) -> None:
        """There is nothing to close."""


def message_text(message: Any) -> str:
    """A message as the policy reads it: a tool's answer in its tags, others as they are; pictures are left out."""
    content = message.content
    if not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, dict) else getattr(part, "text", None) for part in content or []]
        content = "\n".join(part for part in parts if part)
    return response({"result": content}) if message.role == "tool" else content


class VerifiersEnv:
    """`Env` over one environment of verifiers; one rollout at a time."""

    def __init__(self, config: EnvConfig) -> None:
        """Raises ConfigError: there is no such environment, or it cannot be made with these arguments."""
        assert config.verifiers is not None  # EnvConfig sees to it
        self._max_turns, self._settings = config.max_turns, config.verifiers
        self._env = _load(config.verifiers)
        self._rows = self._env.get_dataset()
        self._policy = Policy(self._max_turns)
        self._rollout: asyncio.Task[Any] | None = None

    async def reset(self, seed: int) -> str:
        """See Env.reset; seed >= 0. Raises EnvFault: the rollout ended before the policy was asked."""
        await self.close()
        row = dict(self._rows[seed % len(self._rows)])
        self._policy = Policy(self._max_turns)
        self._rollout = asyncio.create_task(self._env.run_rollout(row, self._policy, MODEL, {}))
        asked = await self._next_question(self._rollout)
        if asked is None:
            await self._output()
            raise EnvFault("a rollout ended before the policy was asked")
        return asked

    async def step(self, action: str) -> StepResult:
        """See Env.step."""
        if self._rollout is None:
            raise outside_an_episode("an environment of verifiers")
        self._policy.say(action)
        asked = await self._next_question(self._rollout)
        if asked is not None:
            return StepResult(asked, 0.0, done=False, success=False)
        reward = float((await self._output())["reward"])
        return StepResult("The task is over.", reward, done=True, success=reward >= self._settings.success_reward)

    async def close(self) -> None:
        """See Env.close. A rollout that is not over is given up."""
        rollout, self._rollout = self._rollout, None
        if rollout is not None:
            rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await rollout

    async def _next_question(self, rollout: asyncio.Task[Any]) -> str | None:
        """What the policy is asked next; None when the rollout has ended."""
        question = asyncio.create_task(self._policy.asked.get())
        await asyncio.wait((question, rollout), return_when=asyncio.FIRST_COMPLETED)
        if question.done():
            return question.result()
        question.cancel()
        return None

    async def _output(self) -> Any:
        """What the rollout that has ended gave. Raises EnvFault: an error."""
        rollout, self._rollout = self._rollout, None
        assert rollout is not None
        output = await rollout
        if output.get("error") is not None:
            raise EnvFault("an environment of verifiers failed", got=str(output["error"])[:300])
        return output


def _load(settings: VerifiersConfig) -> Any:
    try:
        return vf.load_environment(settings.environment, **settings.arguments)
    except (ImportError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        raise ConfigError(
            "verifiers cannot load the environment",
            got=f"env.verifiers.environment = {settings.environment!r}, arguments {settings.arguments}: {error}",
            expected="the id of an environment installed beside verifiers, whose load_environment takes these arguments",
        ) from error
