"""What environments for real language models read out of the policy's text, and how they word what is theirs. Pure."""

from __future__ import annotations

import re

THOUGHT_ENDS = "</think>"


def spoken(text: str) -> str:
    """The text after the policy's thoughts: thinking out loud may mention tags that are not meant."""
    return text.rpartition(THOUGHT_ENDS)[2].strip()


def tagged(text: str, tag: str) -> list[str]:
    """What stands between <tag> and </tag>, in order; the content stripped."""
    return [found.strip() for found in re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)]


def final_answer(text: str) -> str | None:
    """The last <answer>…</answer>; None where there is none."""
    answers = tagged(spoken(text), "answer")
    return answers[-1] if answers else None
