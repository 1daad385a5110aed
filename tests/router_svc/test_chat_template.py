"""Templates render as their authors expect, and cannot do harm."""

from pathlib import Path

import pytest

from router_svc.chat_template import ChatTemplate
from router_svc.errors import InvalidRequestError
from router_svc.openai_api import ChatMessage
from router_svc.tokenizer import Tokenizer
from svckit.errors import ServiceError

TURNS = (ChatMessage("system", "be <b>brief</b>"), ChatMessage("user", "héllo", "eve"))


def render(source: str, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(TURNS)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        # Block tags eat their own line: trim_blocks and lstrip_blocks.
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}",
         "system\nuser\n"),
        ("{{ messages[0].content | tojson }}", '"be <b>brief</b>"'),
        ("{{ messages[1] | tojson }}", '{"role": "user", "content": "héllo", "name": "eve"}'),
        ("{{ bos_token }}{{ messages | length }}", "<s>2"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{% generation %}y{% endgeneration %}", "y"),
        ("{{ add_generation_prompt }} {{ tools }} {{ documents }}", "True None None"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ missing }}z", "z"),
    ],
)  # fmt: skip
def test_rendering(source: str, text: str) -> None:
    assert render(source, bos_token="<s>") == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 + 'a' }}",
        "{{ messages[0]['content'] % 5 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_refused_conversation(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template") as info:
        render(source)
    assert info.value.param == "messages"


def test_reason_of_the_template_is_shown() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_broken_template() -> None:
    with pytest.raises(ServiceError, match="does not compile"):
        ChatTemplate("{% for %}", {})


@pytest.mark.model
def test_same_as_transformers(default_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(default_model_dir, local_files_only=True)
    ours = Tokenizer.load(default_model_dir)
    for messages in (
        (ChatMessage("user", "Hi there, wörld 🎉!"),),
        (ChatMessage("system", "Be brief."), ChatMessage("user", "a\n\n  b")),
        (ChatMessage("user", "a"), ChatMessage("assistant", ""), ChatMessage("user", "<|im_end|>")),
    ):
        turns = [{"role": m.role, "content": m.content} for m in messages]
        expected = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(messages) == expected
