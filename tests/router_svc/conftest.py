"""A tiny model folder, a router in this process, and fake workers on real sockets."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BackendTokenizer

from kvproto.errors import ErrorCode, KvProtoError
from kvproto.handshake import Identity
from kvproto.messages import (
    Abort,
    AbortAck,
    Accepted,
    Finished,
    Generate,
    Message,
    Register,
    Registered,
    Renew,
    Tokens,
)
from kvproto.tcp import Peer, Server, connect, serve
from router_svc.config import RouterConfig
from router_svc.served_model import ServedModel, load_served_model
from router_svc.service import RouterService
from router_svc.tokenizer import Tokenizer
from svckit.lifecycle import Lifecycle, Step

WAIT_S = 10.0
MAX_MODEL_LEN = 256
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ("the cat sat on the mat, and the dog sat on the log; ", "hello world, good day! ") * 20


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level BPE tokenizer of some 300 tokens and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny-chat"
    folder.mkdir()
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "config.json",
        {
            "model_type": "llama",
            "max_position_embeddings": MAX_MODEL_LEN,
            "vocab_size": backend.get_vocab_size(),
            "eos_token_id": EOS_TOKEN_ID,
        },
    )
    _write_json(folder / "generation_config.json", {"eos_token_id": EOS_TOKEN_ID})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return folder


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture(scope="session")
def model(model_dir: Path) -> ServedModel:
    return load_served_model(model_dir)


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@dataclass
class RunningRouter:
    """A router that serves; `lifecycle.advance(Step.DRAIN)` asks it to stop."""

    service: RouterService
    lifecycle: Lifecycle
    task: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.service.http_port}"


StartRouter = Callable[..., Awaitable[RunningRouter]]


@pytest.fixture
async def start_router(model_dir: Path) -> AsyncIterator[StartRouter]:
    """Start routers with the given settings; all are drained at the end."""
    routers: list[RunningRouter] = []

    async def start(**settings: Any) -> RunningRouter:
        defaults: dict[str, Any] = {
            "model": model_dir,
            "listen_port": 0,
            "control_port": 0,
            "drain_timeout_s": 0.2,
            "threads": 1,
        }
        config = RouterConfig(**(defaults | settings))
        lifecycle = Lifecycle()
        ready = asyncio.Event()
        lifecycle.on_change(lambda _old, _new: ready.set())
        folder = config.model
        service = RouterService(
            config,
            load_served_model(folder, name=config.served_model_name),
            Tokenizer.load(folder),
            lifecycle,
        )
        task = asyncio.create_task(service.run())
        router = RunningRouter(service, lifecycle, task)
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({task, waiting}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            task.result()
        routers.append(router)
        assert lifecycle.is_ready
        return router

    yield start
    for router in routers:
        router.lifecycle.advance(Step.DRAIN)
    for router in routers:
        async with asyncio.timeout(WAIT_S):
            await router.task


@dataclass
class FakeDecode:
    """A decode worker that speaks kvproto and says what the test wants.

    `reply` is the whole output of every sequence; a GENERATE with tokens already emitted gets
    the rest. `die_after` cuts the connection after so many tokens of a GENERATE; `pause_after`
    stops sending there until `resume` is set. `end` is what FINISHED says.
    """

    instance_id: str
    reply: list[int]
    facts: dict[str, str | int]
    die_after: int | None = None
    pause_after: int | None = None
    batch_size: int = 1
    end: Finished = field(default_factory=lambda: Finished("-", "length"))
    max_model_len: int = MAX_MODEL_LEN
    num_blocks: int = 64
    block_size: int = 16
    generates: list[Generate] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)
    num_disconnects: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    server: Server | None = None

    async def listen(self) -> None:
        self.server = await serve(
            "127.0.0.1",
            0,
            identity=Identity(role="decode", instance_id=self.instance_id),
            handler=self.handle,
        )

    async def handle(self, peer: Peer) -> None:
        async with asyncio.TaskGroup() as group:
            tasks: dict[str, asyncio.Task[None]] = {}
            try:
                while True:
                    message = await peer.receive()
                    self._note(message)
                    if isinstance(message, Generate):
                        tasks[message.sequence_id] = group.create_task(
                            self._run(peer, message, self.reply, self.end)
                        )
                    elif isinstance(message, Abort):
                        tasks[message.sequence_id].cancel()
                        await peer.send(AbortAck(message.sequence_id, message.generation))
            except KvProtoError:
                self.num_disconnects += 1
                self.changed.set()
            finally:
                for task in tasks.values():
                    task.cancel()

    async def _run(self, peer: Peer, generate: Generate, reply: list[int], end: Finished) -> None:
        name = generate.sequence_id
        with contextlib.suppress(KvProtoError):
            await peer.send(Accepted(name))
            first = len(generate.tokens) - generate.num_prompt_tokens
            last = min(len(reply), generate.max_output_tokens)
            for num_sent, index in enumerate(range(first, last, self.batch_size)):
                if self.die_after is not None and num_sent >= self.die_after:
                    peer.abort("the test kills this worker")
                    return
                if num_sent == self.pause_after:
                    await self.resume.wait()
                batch = reply[index : min(index + self.batch_size, last)]
                await peer.send(Tokens(name, index, batch))
            timings = {"decode_s": 0.5, "carrier": "local", "num_output_tokens": last}
            await peer.send(Finished(name, end.reason, end.code, end.message, timings))

    def _note(self, message: Message) -> None:
        if isinstance(message, Generate):
            self.generates.append(message)
        elif isinstance(message, Abort):
            self.aborts.append(message)
        self.changed.set()

    async def wait_for(self, is_true: Callable[[], object]) -> None:
        """Wait until something this worker saw makes `is_true` true."""
        async with asyncio.timeout(WAIT_S):
            while not is_true():
                self.changed.clear()
                await self.changed.wait()

    def register_message(self) -> Register:
        assert self.server is not None
        return Register(
            role="decode",
            instance_id=self.instance_id,
            host="127.0.0.1",
            port=self.server.port,
            model="tiny",
            facts=self.facts,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
        )


class ControlClient:
    """The control connection of a fake worker, renewing until it is told to stop."""

    def __init__(self, peer: Peer, register: Register) -> None:
        self.peer = peer
        self.register = register
        self.is_renewing = True
        self.is_draining = False
        self.num_running = 0
        self.num_waiting_tokens = 0
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> Message:
        """Send REGISTER and return the answer; on REGISTERED renewing starts."""
        await self.peer.send(self.register)
        async with asyncio.timeout(WAIT_S):
            answer = await self.peer.receive()
        if isinstance(answer, Registered):
            await self.renew()
            self._task = asyncio.create_task(self._renew_forever(answer.lease_s / 4))
        return answer

    async def renew(self) -> None:
        await self.peer.send(
            Renew(
                instance_id=self.register.instance_id,
                num_running=self.num_running,
                num_waiting=0,
                num_waiting_tokens=self.num_waiting_tokens,
                num_free_blocks=self.register.num_blocks,
                draining=self.is_draining,
            )
        )

    async def _renew_forever(self, interval_s: float) -> None:
        with contextlib.suppress(KvProtoError):
            while True:
                await asyncio.sleep(interval_s)
                if self.is_renewing:
                    await self.renew()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.peer.abort("the test ends")


@dataclass
class Cluster:
    """Fake workers of one test, and the ways to add more."""

    facts: dict[str, str | int]
    reply: list[int]
    controls: list[ControlClient] = field(default_factory=list)
    workers: list[FakeDecode] = field(default_factory=list)

    async def connect_control(self, router: RunningRouter, register: Register) -> ControlClient:
        peer = await connect(
            "127.0.0.1",
            router.service.control_port,
            identity=Identity(role=register.role, instance_id=register.instance_id),
            timeout_s=WAIT_S,
        )
        control = ControlClient(peer, register)
        self.controls.append(control)
        return control

    async def add_decode(
        self, router: RunningRouter, instance_id: str = "decode-1", **settings: Any
    ) -> FakeDecode:
        worker = await self.listen_decode(instance_id, **settings)
        await self.register(router, worker.register_message())
        return worker

    async def listen_decode(self, instance_id: str, **settings: Any) -> FakeDecode:
        values: dict[str, Any] = {"reply": self.reply, "facts": self.facts}
        worker = FakeDecode(instance_id, **(values | settings))
        await worker.listen()
        self.workers.append(worker)
        return worker

    async def add_prefill(
        self, router: RunningRouter, instance_id: str = "prefill-1"
    ) -> ControlClient:
        return await self.register(router, self.prefill_register(instance_id))

    def prefill_register(self, instance_id: str = "prefill-1") -> Register:
        return Register(
            role="prefill",
            instance_id=instance_id,
            host="127.0.0.1",
            port=9,
            model="tiny",
            facts=self.facts,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=64,
            block_size=16,
        )

    async def register(self, router: RunningRouter, register: Register) -> ControlClient:
        control = await self.connect_control(router, register)
        answer = await control.open()
        assert isinstance(answer, Registered), answer
        return control

    def control_of(self, instance_id: str) -> ControlClient:
        return next(c for c in self.controls if c.register.instance_id == instance_id)

    async def close(self) -> None:
        for control in self.controls:
            await control.close()
        for worker in self.workers:
            if worker.server is not None:
                worker.server.abort()
                await worker.server.close()


@pytest.fixture
async def cluster(model: ServedModel, tokenizer: Tokenizer) -> AsyncIterator[Cluster]:
    """No workers yet; their facts agree with the router's model."""
    facts: dict[str, str | int] = {
        "config_digest": model.config_digest,
        "weights_digest": "aa",
        "dtype": "float32",
    }
    reply = tokenizer.encode_text("héllo wörld 🎉, the cat sat.")
    workers = Cluster(facts, reply)
    yield workers
    await workers.close()


@pytest.fixture
async def make_client() -> AsyncIterator[Callable[..., openai.AsyncOpenAI]]:
    """OpenAI's own client for a router; no retries, so that every answer is seen."""
    clients: list[openai.AsyncOpenAI] = []

    def make(router: RunningRouter, api_key: str = "unused") -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(
            base_url=f"{router.url}/v1", api_key=api_key, max_retries=0, timeout=WAIT_S
        )
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
def reply_text(cluster: Cluster, tokenizer: Tokenizer) -> Callable[[Sequence[int] | None], str]:
    """The text of some token ids, by default of the fake workers' whole reply."""

    def text(token_ids: Sequence[int] | None = None) -> str:
        return tokenizer.detokenize(cluster.reply if token_ids is None else token_ids)

    return text


@pytest.fixture
def wait_for_workers() -> Callable[[RunningRouter, dict[str, str]], Awaitable[None]]:
    """Wait until /healthz lists exactly these workers in these states."""

    async def wait(router: RunningRouter, states: dict[str, str]) -> None:
        async with asyncio.timeout(WAIT_S), aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{router.url}/healthz") as response:
                    workers = (await response.json())["workers"]
                if {worker["instance_id"]: worker["state"] for worker in workers} == states:
                    return
                await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def overloaded() -> Finished:
    return Finished("-", "error", ErrorCode.OVERLOADED, "no room")
