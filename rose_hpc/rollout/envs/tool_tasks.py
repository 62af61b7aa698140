"""Tasks for the tool-use environment: what is asked, what the store holds, and what counts as solved. Pure; drawn from a seed.

sum      an expression in the question                                   calculator
lookup   a bill over prices that only the store knows                    kv_get, calculator
update   change an entry by a rule, and say what it is then              kv_get, calculator, kv_set: the store is looked at, too
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from fractions import Fraction

from rose_hpc.config import ToolsConfig
from rose_hpc.rollout.envs.arithmetic import calculate, same_number

GOODS = ("apple", "bread", "cheese", "date", "egg", "fig", "grape", "honey", "jam", "kale", "leek", "melon", "nut", "olive", "pear", "rice")


@dataclass(frozen=True)
class Task:
    """question: for the policy. store: what the store holds first. answer: the number to say. stored: what the store must hold then."""

    question: str
    store: dict[str, Fraction]
    answer: Fraction
    stored: dict[str, Fraction] = field(default_factory=dict)

    def is_solved(self, said: str, store: dict[str, Fraction]) -> bool:
        """Whether this final answer, with this content of the store, solves the task."""
        return same_number(said, self.answer) and all(store.get(key) == value for key, value in self.stored.items())


def make_task(config: ToolsConfig, seed: int) -> Task:
    """The seed's task, the same for the same configuration."""
    draw = random.Random(seed)
    kind = draw.choice(config.tasks)
    store = {key: Fraction(draw.randint(1, config.largest)) for key in draw.sample(GOODS, config.entries)}
    return {"sum": _sum, "lookup": _lookup, "update": _update}[kind](draw, config.largest, store)


def _sum(draw: random.Random, largest: int, store: dict[str, Fraction]) -> Task:
    a, b, c, d = (draw.randint(1, largest) for _ in range(4))
    expression = f"{a} * {b} {draw.choice('+-')} {c} * {d}"
    return Task(f"What is {expression}?", store, calculate(expression))


def _lookup(draw: random.Random, largest: int, store: dict[str, Fraction]) -> Task:
    bought = {key: draw.randint(2, 12) for key in draw.sample(sorted(store), 3)}
    items = ", ".join(f"{count} of {key}" for key, count in bought.items())
    total = sum((count * store[key] for key, count in bought.items()), Fraction(0))
    return Task(f"The store holds the price of one of each good, under its name. What do these cost together: {items}?", store, total)


def _update(draw: random.Random, largest: int, store: dict[str, Fraction]) -> Task:
    key, factor, more = draw.choice(sorted(store)), draw.randint(2, 9), draw.randint(1, largest)
    value = store[key] * factor + more
    question = f"Multiply the number that the store holds under {key!r} by {factor}, add {more}, put it back, and say what it is now."
    return Task(question, store, value, stored={key: value})
