"""What ``pdctl kv`` does. Every failure is a ServiceError; numpy is needed here."""

import asyncio
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import click

from kvproto.client import DecodeClient, KvFile, PrefillClient
from kvproto.errors import KvProtoError
from kvproto.fields import MAX_U32
from kvproto.messages import MAX_TOKENS
from kvproto.rdma.settings import RdmaSettings
from ops.byte_progress import ByteProgress, megabytes
from ops.kv_report import kv_file_facts, kv_file_lines
from svckit.errors import ServiceError
from svckit.secret import read_secret
from svckit.tls import load_tls

# A token id has at most 10 digits; a comma and a space stand between two.
_MAX_TOKENS_FILE_NBYTES: Final = 12 * MAX_TOKENS


def save(
    file: Path,
    *,
    prefill: tuple[str, int],
    tokens: Path | None,
    prompt: str | None,
    model: Path | None,
    dtype: str,
    carrier: str,
    rdma_device: str,
    timeout_s: float,
    **security_files: Path | None,
) -> None:
    """Fetch the KV of a prompt into ``file`` and say what was fetched.

    ServiceError, in this order: secret and TLS files, tokens, and what the transfer raises.
    """
    security = _security(**security_files)
    prompt_tokens = (
        _read_tokens(tokens) if tokens else _token_text().tokenize(prompt or "", model or Path())
    )
    if len(prompt_tokens) < 2:
        raise ServiceError(
            f"The prompt has {len(prompt_tokens)} tokens; KV is kept of all but the last, so it "
            "needs at least 2."
        )
    began_at = time.monotonic()

    async def fetch() -> None:
        async with PrefillClient(
            *prefill,
            dtype=dtype,
            timeout_s=timeout_s,
            carrier=carrier,
            rdma=RdmaSettings(device=rdma_device),
            **security,
        ) as client:
            with closing(ByteProgress("receiving", sys.stderr)) as progress:
                await client.prefill_to_file(
                    file,
                    prompt_tokens[:-1],
                    next_tokens=prompt_tokens[-1:],
                    on_progress=progress,
                )

    with _one_sentence():
        asyncio.run(fetch())
        duration_s = time.monotonic() - began_at
        with KvFile.open(file) as saved:
            cache = saved.cache
            lost = f"; relative RMS error {cache.wire_error:.3%}" if cache.wire_error else ""
            click.echo(
                f"{file}: KV of {cache.num_tokens} tokens of {cache.model or 'a model'}, "
                f"{megabytes(saved.nbytes)} of {cache.geometry.dtype} in {duration_s:.2f} s{lost}"
            )


def load(
    file: Path,
    *,
    decode: tuple[str, int],
    max_output_tokens: int,
    temperature: float,
    model: Path | None,
    carrier: str,
    rdma_device: str,
    timeout_s: float,
    **security_files: Path | None,
) -> None:
    """Print the output of a decode worker that got the KV in ``file``, as it comes.

    ServiceError, in this order: secret and TLS files, tokenizer, file, and what the generation
    raises.
    """
    security = _security(**security_files)
    text_of = _token_text().TokenText(model) if model else _TokenNumbers()

    async def run(opened: KvFile) -> None:
        async with DecodeClient(
            *decode, carrier=carrier, rdma=RdmaSettings(device=rdma_device), **security
        ) as client:
            with closing(ByteProgress("sending", sys.stderr)) as progress:
                generation = client.generate(
                    opened.cache,
                    max_output_tokens=max_output_tokens,
                    temperature=temperature,
                    timeout_s=timeout_s,
                    on_progress=progress,
                )
                num_tokens = 0
                async for token in generation:
                    progress.close()
                    sys.stdout.write(text_of(token))
                    sys.stdout.flush()
                    num_tokens += 1
        sys.stdout.write("\n")
        click.echo(f"{generation.finish_reason} after {num_tokens} tokens", err=True)

    with _one_sentence(), KvFile.open(file) as opened:
        asyncio.run(run(opened))


def inspect(file: Path, *, is_json: bool) -> str:
    """What the file says about itself. ServiceError: it cannot be opened."""
    with _one_sentence(), KvFile.open(file) as opened:
        if is_json:
            return json.dumps(kv_file_facts(opened), indent=1)
        return "\n".join(kv_file_lines(opened))


def verify(file: Path) -> str:
    """One sentence if the file is intact. ServiceError: it is not."""
    with _one_sentence(), KvFile.open(file) as opened:
        opened.verify()
        num_regions = opened.cache.geometry.num_regions
        return f"{file}: all {num_regions} regions are intact, {megabytes(opened.nbytes)}."


def _security(
    *,
    secret_file: Path | None,
    tls_cert_file: Path | None,
    tls_key_file: Path | None,
    tls_ca_file: Path | None,
) -> dict[str, Any]:
    """``secret`` and ``tls`` of a client. ServiceError as ``read_secret`` and ``load_tls``."""
    secret = read_secret(secret_file, os.environ)
    return {"secret": secret, "tls": load_tls(tls_cert_file, tls_key_file, tls_ca_file).client}


@contextmanager
def _one_sentence() -> Iterator[None]:
    try:
        yield
    except KvProtoError as exc:
        text = str(exc)
        raise ServiceError(f"{text[:1].upper()}{text[1:]}.") from exc


def _read_tokens(path: Path) -> list[int]:
    """Token ids out of a JSON array, or of numbers between white space."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_TOKENS_FILE_NBYTES + 1)
    except OSError as exc:
        raise ServiceError(f"Cannot read {path}: {exc.strerror}.") from exc
    if len(raw) > _MAX_TOKENS_FILE_NBYTES:
        raise ServiceError(f"{path} is too large: a prompt has at most {MAX_TOKENS} tokens.")
    try:
        text = raw.decode("utf-8").strip()
        values: Any = json.loads(text) if text.startswith("[") else [*map(int, text.split())]
    except ValueError as exc:
        raise ServiceError(f"{path} is no list of token ids: {exc}.") from exc
    if not all(type(value) is int and 0 <= value <= MAX_U32 for value in values):
        raise ServiceError(f"{path} is no list of token ids: one is no number from 0 to {MAX_U32}.")
    return list(values)


class _TokenNumbers:
    """Token ids as they are, a space between two."""

    def __init__(self) -> None:
        self._space = ""

    def __call__(self, token: int) -> str:
        space, self._space = self._space, " "
        return f"{space}{token}"


def _token_text() -> Any:
    """The module that needs the tokenizers library, which only text needs."""
    try:
        return importlib.import_module("ops.token_text")
    except ModuleNotFoundError as exc:
        raise ServiceError(
            f"Text needs the Python package {exc.name}; install pdserve[router], or work with "
            "token ids."
        ) from exc
