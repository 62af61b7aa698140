"""Structured tool calls in a policy's text, in the form that Qwen's and Hermes' chat templates teach. Pure.

    <tool_call>{"name": "calculator", "arguments": {"expression": "3 * 4"}}</tool_call>      →  ToolCall | BadCall, in order
    <tool_response>{"result": "12"}</tool_response>                                          ←  response(…)

A call that cannot be read is answered like any other, with what is wrong, so that the policy can put it right.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rose_hpc.rollout.envs.text import spoken, tagged

MAX_CALL_CHARS = 4000
_DECODER = json.JSONDecoder(parse_constant=lambda name: name)  # NaN and Infinity are no JSON; they stay words


@dataclass(frozen=True)
class ToolCall:
    """One call. arguments: as JSON gives them; whoever is called checks them."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class BadCall:
    """A call that cannot be read, and why."""

    problem: str


def tool_calls(text: str) -> list[ToolCall | BadCall]:
    """All calls that the policy makes after its thoughts."""
    return [_call(found) for found in tagged(spoken(text), "tool_call")]


def response(content: dict[str, Any]) -> str:
    """What a tool answered, as the policy reads it."""
    return f"<tool_response>{json.dumps(content)}</tool_response>"


def _call(text: str) -> ToolCall | BadCall:
    if len(text) > MAX_CALL_CHARS:
        return BadCall(f"a tool call may have {MAX_CALL_CHARS} characters at most")
    try:
        tree = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return BadCall("a tool call must be JSON")
    if not isinstance(tree, dict) or not isinstance(tree.get("name"), str) or not isinstance(tree.get("arguments"), dict):
        return BadCall('a tool call must be of the form {"name": "...", "arguments": {...}}')
    return ToolCall(tree["name"], tree["arguments"])
