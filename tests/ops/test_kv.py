"""pdctl kv on its command line, against fake workers."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvproto.client.blocking import LoopThread
from kvproto.kv_file import KvFile, save_kv
from ops.pdctl import pdctl
from svckit.errors import ServiceError
from svckit.tls import load_tls
from tests.certificates import Authority
from tests.kvproto.client.fake_workers import PLAIN, FakeDecode, FakePrefill, computed, started
from tests.tiny_models import make_byte_tokenizer

TOKENS = [5, 3, 8, 1, 9, 2, 7]


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[FakePrefill, FakeDecode]]:
    thread = LoopThread("workers")
    pair = FakePrefill(), FakeDecode()
    servers = [thread.call(started(worker)) for worker in pair]
    yield pair
    for server in servers:
        thread.call(server.close())
    thread.close()


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOKENS), encoding="utf-8")
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    cache = computed(PLAIN, TOKENS[:-1])
    cache.next_tokens = (TOKENS[-1],)
    cache.model, cache.facts = "tiny", {"weights_digest": "w"}
    path = tmp_path / "prompt.kv"
    save_kv(path, cache)
    return path


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(pdctl, ["kv", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refusal(*arguments: object) -> str:
    with pytest.raises(ServiceError) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
    return str(caught.value)


def test_save_keeps_the_kv_of_all_tokens_but_the_last(
    workers: tuple[FakePrefill, FakeDecode], tokens_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.kv"
    address = f"127.0.0.1:{workers[0].port}"
    result = run("save", "--prefill", address, "--tokens", tokens_file, path)
    assert result.stdout.startswith(f"{path}: KV of 6 tokens of tiny, ")
    assert " kB of float32 in " in result.stdout
    with KvFile.open(path) as file:
        file.verify()
        assert (list(file.cache.tokens), file.cache.next_tokens) == (TOKENS[:-1], (7,))
    small = run("save", "--prefill", address, "--tokens", tokens_file, "--dtype", "int8", path)
    assert "of int8 in" in small.stdout
    assert "relative RMS error 0." in small.stdout


def test_text_becomes_tokens_and_tokens_text(
    workers: tuple[FakePrefill, FakeDecode], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    make_byte_tokenizer().save_pretrained(model)
    path = tmp_path / "a.kv"
    prefill, decode = (f"127.0.0.1:{worker.port}" for worker in workers)
    run("save", "--prefill", prefill, "--prompt", "grün und blau", "--model", model, path)
    # The fake decode worker answers with the prompt's end.
    loaded = run("load", path, "--decode", decode, "--max-output-tokens", 12, "--model", model)
    assert loaded.stdout == "ün und blau\n"
    assert loaded.stderr == "length after 12 tokens\n"


def test_secret_and_tls_files_open_a_worker_that_demands_them(
    tokens_file: Path, tmp_path: Path
) -> None:
    files = Authority(tmp_path / "ca").issue()
    secret_file = tmp_path / "secret"
    secret_file.write_text("sixteen bytes and more")
    secret_file.chmod(0o600)
    worker = FakePrefill()
    worker.identity = replace(worker.identity, secret=b"sixteen bytes and more")
    thread = LoopThread("workers")
    server = thread.call(started(worker, tls=load_tls(files.cert, files.key, files.ca).server))
    path = tmp_path / "a.kv"
    arguments = ("--prefill", f"127.0.0.1:{server.port}", "--tokens", tokens_file, path)
    tls = (
        *("--tls-cert-file", files.cert, "--tls-key-file", files.key),
        *("--tls-ca-file", files.ca),
    )
    try:
        run("save", "--secret-file", secret_file, *tls, *arguments)
        assert path.is_file()
        assert "uthentication failed" in refusal("save", *tls, *arguments)
        refusal("save", "--secret-file", secret_file, *arguments)
        assert "TLS needs three files" in refusal("save", *tls[:2], *arguments)
    finally:
        thread.call(server.close())
        thread.close()


def test_load_prints_token_ids_without_a_tokenizer(
    workers: tuple[FakePrefill, FakeDecode], tokens_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.kv"
    prefill, decode = (f"127.0.0.1:{worker.port}" for worker in workers)
    run("save", "--prefill", prefill, "--tokens", tokens_file, path)
    loaded = run("load", path, "--decode", decode, "--max-output-tokens", 3)
    assert loaded.stdout == "9 2 7\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("5 3\n8", None),
        ("[5]", "has 1 tokens; KV is kept of all but the last"),
        ("five", "is no list of token ids: invalid literal"),
        ("[1, 2", "is no list of token ids: Expecting"),
        ("[1, -2]", "one is no number from 0"),
        ("[1, true]", "one is no number from 0"),
        ("[1, 4294967296]", "one is no number from 0"),
    ],
)
def test_lists_of_tokens(
    workers: tuple[FakePrefill, FakeDecode], tmp_path: Path, content: str, words: str | None
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(content, encoding="utf-8")
    arguments = (
        *("save", "--prefill", f"127.0.0.1:{workers[0].port}"),
        *("--tokens", tokens, tmp_path / "a.kv"),
    )
    if words is None:
        assert "KV of 2 tokens" in run(*arguments).stdout
    else:
        assert words in refusal(*arguments)


def test_a_list_of_tokens_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("save", "--prefill", "127.0.0.1:1", "--tokens", tmp_path / "no", tmp_path / "a.kv")
    assert "No such file or directory" in refusal(*arguments)
    monkeypatch.setattr("ops.kv_work._MAX_TOKENS_FILE_NBYTES", 3)
    (tmp_path / "no").write_text("1 2 3", encoding="utf-8")
    assert "is too large: a prompt has at most" in refusal(*arguments)


def test_prompts_are_given_in_one_way(tmp_path: Path) -> None:
    save = ("save", "--prefill", "127.0.0.1:1", tmp_path / "a.kv")
    assert "either as --tokens FILE or as --prompt TEXT" in refusal(*save)
    assert "--prompt needs --model" in refusal(*save, "--prompt", "x")
    assert "Cannot read" in refusal(*save, "--prompt", "x", "--model", tmp_path)


@pytest.mark.parametrize("address", ["localhost", ":1", "h:0", "h:65536", "h:x"])
def test_an_address_is_host_and_port(address: str, saved: Path) -> None:
    result = run("load", saved, "--decode", address)
    assert result.exit_code == 2
    assert f"{address!r} is not HOST:PORT" in result.stderr


def test_nobody_listens(saved: Path) -> None:
    text = refusal("load", saved, "--decode", "[::1]:1")
    assert text.startswith("Cannot connect to ::1:1: ")


def test_kv_of_another_model_is_not_sent(
    workers: tuple[FakePrefill, FakeDecode], tmp_path: Path
) -> None:
    cache = computed(PLAIN, TOKENS[:-1])
    cache.next_tokens, cache.facts = (7,), {"weights_digest": "x"}
    save_kv(tmp_path / "a.kv", cache)
    text = refusal("load", tmp_path / "a.kv", "--decode", f"127.0.0.1:{workers[1].port}")
    assert text.startswith("The KV was computed with weights_digest 'x', decode/d-1@")


def test_inspect_says_what_is_in_a_file(saved: Path) -> None:
    lines = run("inspect", saved).stdout.splitlines()
    assert lines[0].startswith(f"file            {saved}, ")
    assert lines[0].endswith(f" kB, {sys.byteorder}-endian")
    assert lines[1:] == [
        "model           tiny",
        "tokens          6, and 1 behind them without KV",
        "dtype           float32",
        "lost            nothing",
        "layers          3",
        "                a .. c: k [6, 2, 8], v [6, 2, 8]; 0.8 kB each",
        "weights_digest  w",
    ]


def test_layers_of_another_shape_have_a_line_of_their_own(tmp_path: Path) -> None:
    cache = computed(FakePrefill().geometry, TOKENS)
    cache.wire_error = 0.00123
    save_kv(tmp_path / "a.kv", cache)
    text = run("inspect", tmp_path / "a.kv").stdout
    assert "  a: k [7, 2, 8], v [7, 2, 8]; 0.9 kB each\n" in text
    assert "  b: k [4, 2, 8], v [4, 2, 8], window 4; 0.5 kB each\n" in text
    assert "  c: state [1, 2, 4]; 0.0 kB each\n" in text
    assert "0.123 % relative RMS" in text.replace("0.123%", "0.123 %")


def test_inspect_for_programs(saved: Path) -> None:
    facts = json.loads(run("inspect", saved, "--json").stdout)
    assert (facts["tokens"], facts["next_tokens"]) == (TOKENS[:-1], [TOKENS[-1]])
    assert (facts["dtype"], facts["facts"], facts["wire_error"]) == (
        "float32",
        {"weights_digest": "w"},
        0.0,
    )
    assert facts["nbytes"] == saved.stat().st_size
    cache = computed(PLAIN, TOKENS[:-1])
    regions = [region for layer in facts["layers"] for region in layer["regions"]]
    assert [int(region["digest"], 16) for region in regions] == cache.digests()
    assert {region["nbytes"] for region in regions} == {6 * 2 * 8 * 4}


def test_verify_reads_everything(saved: Path) -> None:
    assert run("verify", saved).stdout == f"{saved}: all 6 regions are intact, 2.9 kB.\n"
    raw = bytearray(saved.read_bytes())
    raw[-1] ^= 1
    saved.write_bytes(raw)
    assert refusal("verify", saved).startswith(f"KV file {saved}: region v of layer c has digest")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for verb in ("inspect", "verify"):
        assert refusal(verb, tmp_path / "no") == (
            f"KV file {tmp_path / 'no'}: No such file or directory."
        )


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("numpy", "`pdctl kv` needs the Python package numpy; install pdserve[client]."),
        ("tokenizers", "Text needs the Python package tokenizers; install pdserve[router]"),
    ],
)
def test_packages_that_are_missing_are_named(
    module: str, words: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(name: str) -> object:
        if name == {"numpy": "ops.kv_work", "tokenizers": "ops.token_text"}[module]:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return sys.modules[name]

    run("inspect", saved)
    monkeypatch.setattr("importlib.import_module", import_module)
    assert words in refusal("load", saved, "--decode", "127.0.0.1:1", "--model", saved.parent)
