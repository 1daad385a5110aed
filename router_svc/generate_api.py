"""POST /v1/chat/completions and POST /v1/completions: from body to answer."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from aiohttp import web

from router_svc.admission import Admission
from router_svc.choice_stream import ChoiceStream, Delta
from router_svc.config import RouterConfig
from router_svc.dispatch import Dispatcher
from router_svc.errors import (
    ApiError,
    InternalError,
    NotFoundError,
    RequestTimeoutError,
    UnavailableError,
)
from router_svc.generation import Generation
from router_svc.metrics import RouterMetrics
from router_svc.openai_api import (
    ChatRequest,
    CompletionRequest,
    GenerationOptions,
    parse_chat_request,
    parse_completion_request,
)
from router_svc.openai_response import AnswerShape, Usage
from router_svc.registry import WorkerRegistry
from router_svc.request_body import read_json_object
from router_svc.request_plan import PlanLimits, check_prompt_chars, plan_sequences
from router_svc.scheduler import longest_sequence_tokens
from router_svc.served_model import ServedModel
from router_svc.sse_stream import SseStream
from router_svc.tokenizer import Tokenizer, TokenizerPool


@dataclass(frozen=True, slots=True)
class _Job:
    """One request on its way to an answer."""

    options: GenerationOptions
    shape: AnswerShape
    choices: tuple[ChoiceStream, ...]
    generation: Generation

    def usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=sum(len(prompt) for prompt in self.shape.prompts),
            num_output_tokens=sum(len(choice.token_ids) for choice in self.choices),
        )


class GenerateApi:
    """The two handlers and what they need; one object per router."""

    def __init__(
        self,
        config: RouterConfig,
        model: ServedModel,
        tokenizer: Tokenizer,
        tokenizer_pool: TokenizerPool,
        registry: WorkerRegistry,
        dispatcher: Dispatcher,
        admission: Admission,
        metrics: RouterMetrics,
    ) -> None:
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._tokenizer_pool = tokenizer_pool
        self._registry = registry
        self._dispatcher = dispatcher
        self._admission = admission
        self._metrics = metrics
        self._running: set[Generation] = set()
        self._log = structlog.get_logger("router_svc.generate_api")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/chat/completions."""
        return await self._serve(request, is_chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/completions."""
        return await self._serve(request, is_chat=False)

    def cut_off(self) -> None:
        """End all running answers with an error that says why."""
        for generation in self._running:
            generation.cut_off(
                UnavailableError("The router stops before the answer was complete. Try again.")
            )

    async def _serve(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        arrived_at = time.monotonic()
        deadline_at = asyncio.get_running_loop().time() + self._config.request_timeout_s
        try:
            with self._admission.slot():
                job = await self._make_job(request, arrived_at, deadline_at, is_chat=is_chat)
                self._running.add(job.generation)
                try:
                    if job.options.is_stream:
                        return await self._stream(request, job)
                    return await self._answer(job)
                finally:
                    self._running.discard(job.generation)
        except (asyncio.CancelledError, ConnectionError):
            # The server cancels a handler when its client disconnects.
            self._metrics.disconnects.inc()
            raise

    async def _make_job(
        self, request: web.Request, arrived_at: float, deadline_at: float, *, is_chat: bool
    ) -> _Job:
        """Check everything that can be checked before a worker is asked.

        `arrived_at` is on time.monotonic's clock, `deadline_at` on the event loop's.
        """
        body = await read_json_object(
            request,
            max_nbytes=self._config.max_body_nbytes,
            timeout_s=self._config.body_timeout_s,
        )
        parsed = parse_chat_request(body) if is_chat else parse_completion_request(body)
        self.check_model(parsed.model)
        limits = self._plan_limits()
        self._refuse_hopeless(parsed, limits)
        try:
            async with asyncio.timeout_at(deadline_at):
                prompts = await self._encode(parsed)
        except TimeoutError:
            raise RequestTimeoutError(
                "The prompt was not tokenised in time: the router is busy. Try again."
            ) from None
        request_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        plans = plan_sequences(
            request_id,
            prompts,
            parsed.options,
            limits,
            prompt_param="messages" if is_chat else "prompt",
            random_seed=secrets.randbits(63),
        )
        if self._registry.num_offered("decode") == 0:
            raise UnavailableError("No decode worker is registered. Try again shortly.")
        choices = tuple(
            ChoiceStream(
                index,
                self._tokenizer.detokenize,
                stop=parsed.options.stop,
                hidden_token_ids=plan.stop_token_ids,
                arrived_at=arrived_at,
            )
            for index, plan in enumerate(plans)
        )
        shape = AnswerShape(
            is_chat=is_chat,
            response_id=request_id,
            created_at_unix_s=int(time.time()),
            model=self._model.name,
            prompts=tuple(tuple(prompt) for prompt in prompts),
            num_choices=parsed.options.num_choices,
            has_token_ids=parsed.options.return_token_ids,
        )
        generation = Generation(
            self._dispatcher, self._metrics, plans, choices, deadline_at=deadline_at
        )
        return _Job(parsed.options, shape, choices, generation)

    def check_model(self, name: str) -> None:
        """Raise NotFoundError unless `name` is the model this router serves."""
        if name != self._model.name:
            raise NotFoundError(
                f"The model {name[:100]!r} does not exist here. Use {self._model.name!r}.",
                param="model",
                code="model_not_found",
            )

    def _plan_limits(self) -> PlanLimits:
        return PlanLimits(
            longest_sequence_tokens=longest_sequence_tokens(
                self._registry.views(), self._model.max_model_len
            ),
            default_max_output_tokens=self._config.default_max_tokens,
            vocab_size=self._model.vocab_size,
            eos_token_ids=self._model.eos_token_ids,
        )

    def _refuse_hopeless(self, parsed: ChatRequest | CompletionRequest, limits: PlanLimits) -> None:
        if isinstance(parsed, ChatRequest):
            texts = {"messages": sum(len(message.content) for message in parsed.messages)}
        else:
            texts = {
                "prompt" if len(parsed.prompts) == 1 else f"prompt[{number}]": len(prompt)
                for number, prompt in enumerate(parsed.prompts)
                if isinstance(prompt, str)
            }
        for param, num_chars in texts.items():
            check_prompt_chars(
                num_chars,
                self._tokenizer.max_token_chars,
                limits.longest_sequence_tokens,
                param=param,
            )

    async def _encode(self, parsed: ChatRequest | CompletionRequest) -> list[Sequence[int]]:
        if isinstance(parsed, ChatRequest):
            return [await self._tokenizer_pool.encode_chat(parsed.messages)]
        return [
            await self._tokenizer_pool.encode_text(prompt) if isinstance(prompt, str) else prompt
            for prompt in parsed.prompts
        ]

    async def _answer(self, job: _Job) -> web.Response:
        await job.generation.run(_discard)
        body = job.shape.body(job.choices, job.usage(), has_timings=job.options.include_timings)
        return web.json_response(body, headers=_headers(job))

    async def _stream(self, request: web.Request, job: _Job) -> web.StreamResponse:
        stream = SseStream(request, _headers(job))
        shape, options = job.shape, job.options

        async def sink(delta: Delta) -> None:
            if delta.is_first and shape.is_chat:
                await stream.send(shape.role_chunk(delta.index))
            has_content = bool(delta.text) or (options.return_token_ids and delta.token_ids)
            if has_content or delta.finish_reason is not None:
                await stream.send(shape.delta_chunk(delta))

        try:
            await job.generation.run(sink)
            if not (options.include_usage or options.include_timings):
                return await stream.close()
            usage = job.usage() if options.include_usage else None
            return await stream.close(
                shape.closing_chunk(job.choices, usage, has_timings=options.include_timings)
            )
        except ApiError as exc:
            if not stream.is_started:
                raise
            return await self._fail(stream, job, exc)
        except ConnectionError:
            raise
        except Exception as exc:
            if not stream.is_started:
                raise
            self._log.exception("stream failed", request_id=shape.response_id)
            error = InternalError("The router failed. Its log has the details.")
            error.__cause__ = exc
            return await self._fail(stream, job, error)

    async def _fail(self, stream: SseStream, job: _Job, error: ApiError) -> web.StreamResponse:
        self._metrics.stream_errors.inc()
        self._log.warning(
            "stream ended with an error", request_id=job.shape.response_id, error=error.message
        )
        return await stream.fail(error.body())


async def _discard(_delta: Delta) -> None:
    """Take a delta of an answer that is sent as a whole; the choice keeps the text."""


def _headers(job: _Job) -> dict[str, str]:
    return {"X-Request-Id": job.shape.response_id}
