"""Environments for verifiers, as its hub has them: a module with load_environment. For test_verifiers_env.py."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

ROWS = [{"prompt": [{"role": "user", "content": f"Say the word {word}."}], "answer": word} for word in ("alpha", "beta", "gamma")]


def said_it(completion: Any, answer: str) -> float:
    """1 for the word in the last message of the policy."""
    last = [m for m in completion if m["role"] == "assistant"][-1]
    return float(answer in str(last["content"]))


class Patient(vf.MultiTurnEnv):
    """Says "again" until the policy says "done"; breaks when it says "break"."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        last = str(messages[-1]["content"])
        if "break" in last:
            raise vf.Error("it broke")
        if "raise" in last:
            raise RuntimeError("not one of verifiers' own errors")
        if "done" in last:
            state["final_env_response"] = [{"role": "user", "content": "Good."}]
            return state["final_env_response"]
        return [{"role": "user", "content": "Again, please."}]


def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


def load_environment(kind: str = "patient") -> vf.Environment:
    rubric = vf.Rubric(funcs=[said_it])
    dataset = Dataset.from_list(ROWS)
    if kind == "single":
        return vf.SingleTurnEnv(dataset=dataset, rubric=rubric, system_prompt="Be brief.")
    if kind == "tools":
        return vf.ToolEnv(tools=[double], dataset=dataset, rubric=rubric, max_turns=5)
    return Patient(dataset=dataset, rubric=rubric)
