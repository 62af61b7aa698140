"""The tools of the tool-use environment: a calculator and a key-value store of numbers. Pure, but for the store's content.

Every tool takes text arguments by name and answers {"result": …} or {"error": …}; nothing that a policy writes raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rose_hpc.rollout.envs.arithmetic import NotArithmetic, as_text, calculate
from rose_hpc.rollout.envs.tool_calls import BadCall, ToolCall

MAX_KEYS = 64
MAX_KEY_CHARS = 64

TOOLS = {
    "calculator": ("expression", "The value of an arithmetic expression, for example 3 * (17 - 4)."),
    "kv_get": ("key", "The number that the store holds under a key."),
    "kv_set": ("key, value", "Put a number into the store under a key, in place of what is there."),
    "kv_keys": ("", "All keys of the store."),
}


@dataclass
class ToolBox:
    """The tools of one episode. store: the content; it changes with the calls."""

    store: dict[str, Fraction]

    def use(self, call: ToolCall | BadCall) -> dict[str, Any]:
        """What the tool answers."""
        if isinstance(call, BadCall):
            return {"error": call.problem}
        if call.name not in TOOLS:
            return {"error": f"no tool {call.name[:MAX_KEY_CHARS]!r}; there are {', '.join(TOOLS)}"}
        wanted = [name for name in TOOLS[call.name][0].split(", ") if name]
        given = {name: str(value) for name, value in call.arguments.items() if isinstance(value, str | int | float)}
        if sorted(call.arguments) != sorted(wanted) or len(given) != len(wanted):
            return {"error": f"{call.name} takes {' and '.join(wanted) or 'no arguments'}, as text or numbers"}
        try:
            return {"result": self._tool(call.name)(**given)}
        except NotArithmetic as error:
            return {"error": error.what}

    def _tool(self, name: str) -> Callable[..., str | list[str]]:
        tools: dict[str, Callable[..., str | list[str]]] = {
            "calculator": self._calculate,
            "kv_get": self._get,
            "kv_set": self._set,
            "kv_keys": self._keys,
        }
        return tools[name]

    def _calculate(self, expression: str) -> str:
        return as_text(calculate(expression))

    def _get(self, key: str) -> str:
        if key not in self.store:
            raise NotArithmetic(f"no key {key[:MAX_KEY_CHARS]!r} in the store")
        return as_text(self.store[key])

    def _set(self, key: str, value: str) -> str:
        if len(key) > MAX_KEY_CHARS or (len(self.store) >= MAX_KEYS and key not in self.store):
            raise NotArithmetic("the store is full, or the key too long")
        self.store[key] = calculate(value)
        return as_text(self.store[key])

    def _keys(self) -> list[str]:
        return sorted(self.store)
