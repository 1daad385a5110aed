"""Tokenising from a local folder, without torch."""

import asyncio
import json
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from router_svc.errors import InvalidRequestError
from router_svc.openai_api import ChatMessage
from router_svc.tokenizer import Tokenizer, TokenizerPool
from svckit.errors import ServiceError

HELLO = (ChatMessage("user", "hello"),)
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def folder(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "copy"))


@pytest.mark.parametrize("text", ["hello world", "héllo 🎉", "a\n\n b\t", "\x00"])
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.detokenize(tokenizer.encode_text(text)) == text


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_text("a<|im_end|>b")
    assert 2 in ids
    assert tokenizer.detokenize(ids) == "ab"


@pytest.mark.parametrize("text", ["a" * 500, " " * 500, "the cat sat on the mat " * 30, "🎉" * 40])
def test_no_token_stands_for_more_than_the_longest(tokenizer: Tokenizer, text: str) -> None:
    assert len(tokenizer.encode_text(text)) >= len(text) / tokenizer.max_token_chars


def test_saved_truncation_is_not_applied(folder: Path) -> None:
    path = folder / "tokenizer.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    value["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(value), encoding="utf-8")
    assert len(Tokenizer.load(folder).encode_text("hello world " * 10)) > 2


async def test_pool_gives_the_same_tokens(tokenizer: Tokenizer) -> None:
    with ThreadPoolExecutor(2) as executor:
        pool = TokenizerPool(tokenizer, executor)
        text = "hello world " * 50
        several = await asyncio.gather(*(pool.encode_text(text) for _ in range(8)))
        assert all(ids == tokenizer.encode_text(text) for ids in several)
        assert await pool.encode_chat(HELLO) == tokenizer.encode_chat(HELLO)


def test_template_in_the_config_file(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    special = {"content": "<|im_start|>", "lstrip": False}
    config = {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": special}
    path.write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode_chat(HELLO) == tokenizer.encode_text("<|im_start|>hello")


def test_no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequestError, match="/v1/completions") as info:
        Tokenizer.load(folder).encode_chat(HELLO)
    assert info.value.param == "messages"


def test_no_tokenizer_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer.load(folder).encode_chat(HELLO)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "nonsense"),
        ("tokenizer_config.json", "nonsense"),
        ("chat_template.jinja", "{% for %}"),
    ],
)
def test_broken_folder(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(ServiceError):
        Tokenizer.load(folder)


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="--model"):
        Tokenizer.load(tmp_path)


def test_several_templates_are_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    config = {"chat_template": [{"name": "default", "template": "x"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ServiceError, match="several chat templates"):
        Tokenizer.load(folder)


def test_router_works_where_torch_cannot_be_imported(model_dir: Path) -> None:
    script = f"""
        import importlib, pathlib, pkgutil, sys
        sys.modules["torch"] = None
        sys.modules["kvengine"] = None
        import router_svc
        for module in pkgutil.iter_modules(router_svc.__path__):
            importlib.import_module("router_svc." + module.name)
        from router_svc.openai_api import ChatMessage
        from router_svc.tokenizer import Tokenizer
        tokenizer = Tokenizer.load(pathlib.Path({str(model_dir)!r}))
        print(len(tokenizer.encode_chat((ChatMessage("user", "hello"),))))
        assert sys.modules["torch"] is None
        assert not any(name.startswith(("torch.", "transformers")) for name in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(Tokenizer.load(model_dir).encode_chat(HELLO))
