"""One sequence from plan to last token, across decode workers if need be.

Theory of operation: a decode worker is chosen, GENERATE is sent, and TOKENS are passed on as
they come. When the worker is lost, GENERATE goes to another one with the prompt and everything
emitted so far; sampling depends on (seed, position) alone, so the stream continues exactly.
Without progress for `resume_timeout_s`, or after `max_resumes` losses, the sequence fails: a
prompt that kills its worker must not kill all of them.

The caller sets the deadline of the request around `run`; cancelling `run` sends ABORT.
"""

import asyncio
from dataclasses import dataclass, field, replace

import structlog

from kvproto.errors import ErrorCode, LocalProtocolError
from kvproto.messages import Accepted, Error, Finished, Generate, PrefillWorker, Tokens
from router_svc.decode_link import SequenceInbox, WorkerLostError
from router_svc.decode_pool import DecodePool
from router_svc.errors import (
    ApiError,
    InternalError,
    RequestTimeoutError,
    UnavailableError,
    UpstreamError,
    from_wire,
)
from router_svc.metrics import RouterMetrics
from router_svc.registry import WorkerRegistry
from router_svc.scheduler import WorkerView, choose_decode, rank_prefill
from router_svc.sequence import EmitTokens, SequenceEnd, SequencePlan

# The worker is healthy but will not take this sequence now: another one may.
_REFUSALS = frozenset({ErrorCode.OVERLOADED, ErrorCode.SHUTTING_DOWN})


class _SequenceRefusedError(Exception):
    """The worker gave the sequence back; `error` is what the client sees if nobody takes it."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """How long and how often to try."""

    first_token_timeout_s: float
    resume_timeout_s: float
    max_resumes: int


@dataclass(slots=True)
class _Progress:
    """One sequence on its way; `stuck_since` is the first failure after the last new token."""

    plan: SequencePlan
    emit: EmitTokens
    deadline_at: float
    emitted: list[int] = field(default_factory=list)
    excluded_ids: set[str] = field(default_factory=set)
    refusal: ApiError | None = None
    num_attempts: int = 0
    num_resumes: int = 0
    stuck_since: float | None = None
    # True while a worker may still be generating for us and has to be told to stop.
    must_cancel: bool = False


class Dispatcher:
    """Runs sequences on the workers of `registry` over the links of `pool`."""

    def __init__(
        self,
        registry: WorkerRegistry,
        pool: DecodePool,
        metrics: RouterMetrics,
        limits: DispatchLimits,
    ) -> None:
        self._registry = registry
        self._pool = pool
        self._metrics = metrics
        self._limits = limits
        self._log = structlog.get_logger("router_svc.dispatch")

    async def run(self, plan: SequencePlan, emit: EmitTokens, *, deadline_at: float) -> SequenceEnd:
        """Generate `plan` and pass its tokens to `emit` in order, each exactly once.

        `deadline_at` is on the event loop's clock; the worker is told what is left of it.
        Raises ApiError: UnavailableError (no worker), RequestTimeoutError (first token),
        UpstreamError (lost and not resumed), or what the worker answered.
        """
        progress = _Progress(plan, emit, deadline_at)
        while True:
            if (end := _already_ended(progress)) is not None:
                return end
            worker = await self._find_worker(progress)
            try:
                end = await self._attempt(worker, progress)
            except WorkerLostError as exc:
                self._note_loss(worker, progress, exc)
            except _SequenceRefusedError as exc:
                self._note_refusal(worker, progress, exc)
            else:
                return replace(end, num_resumes=progress.num_resumes)

    async def _find_worker(self, progress: _Progress) -> WorkerView:
        """Return a worker; a sequence that was lost waits for one, a new one does not."""
        loop = asyncio.get_running_loop()
        while True:
            changed = self._registry.changed
            worker = choose_decode(
                self._registry.views(),
                progress.plan.num_total_tokens,
                excluded_ids=progress.excluded_ids,
            )
            if worker is not None:
                return worker
            if progress.stuck_since is None:
                raise progress.refusal or UnavailableError(
                    "No decode worker can take the request now. Try again shortly."
                )
            give_up_at = progress.stuck_since + self._limits.resume_timeout_s
            try:
                async with asyncio.timeout_at(min(give_up_at, progress.deadline_at)):
                    await changed.wait()
            except TimeoutError:
                raise UpstreamError(
                    "The decode worker was lost and no other one took over within "
                    f"{max(loop.time() - progress.stuck_since, 0.0):.1f} s. Send the request again."
                ) from None
            # A worker that was full or starting a moment ago may have room now.
            progress.excluded_ids.clear()

    async def _attempt(self, worker: WorkerView, progress: _Progress) -> SequenceEnd:
        """Run the sequence, or the rest of it, on one worker."""
        link = self._pool.find(worker.instance_id)
        entry = self._registry.find(worker.instance_id)
        if link is None or entry is None:
            raise WorkerLostError("it went away before the sequence was sent")
        generate = self._generate_message(progress)
        progress.num_attempts += 1
        progress.must_cancel = True
        entry.num_assigned += 1
        try:
            inbox = await link.start(generate)
            return await self._receive(inbox, progress)
        except LocalProtocolError as exc:
            # Every limit was checked when the request came in.
            self._log.exception("cannot send GENERATE", sequence_id=generate.sequence_id)
            raise InternalError("The router could not send the request to a worker.") from exc
        finally:
            entry.num_assigned -= 1
            try:
                if progress.must_cancel:
                    text = "the router needs no more of this sequence"
                    await link.cancel(generate.sequence_id, ErrorCode.CANCELLED, text)
            finally:
                link.forget(generate.sequence_id)

    async def _receive(self, inbox: SequenceInbox, progress: _Progress) -> SequenceEnd:
        """Pass on tokens until the sequence ends at this worker."""
        loop = asyncio.get_running_loop()
        first_token_at = loop.time() + self._limits.first_token_timeout_s
        give_up_at = min(first_token_at, progress.deadline_at)
        while True:
            try:
                async with asyncio.timeout_at(give_up_at):
                    message = await inbox.get()
            except TimeoutError:
                raise RequestTimeoutError(
                    "No token came in time: the workers are busy. Try again, or raise "
                    "first_token_timeout_s or request_timeout_s of the router."
                ) from None
            match message:
                case Tokens():
                    give_up_at = progress.deadline_at
                    if not await _take_tokens(message, progress):
                        return SequenceEnd("stop")
                case Finished() | Error():
                    progress.must_cancel = False
                    return _end_of(message)
                case Accepted():
                    pass

    def _generate_message(self, progress: _Progress) -> Generate:
        """Build GENERATE for the rest of the sequence, with the prefill workers of this moment."""
        plan = progress.plan
        tokens = [*plan.prompt_token_ids, *progress.emitted]
        ranked = rank_prefill(self._registry.views(), len(tokens))
        if ranked and (entry := self._registry.find(ranked[0].instance_id)) is not None:
            entry.num_assigned_tokens += len(tokens)
        # A new name for each attempt: two decode workers must never use the same one at a
        # prefill worker, and a worker may still be busy with the attempt that was lost.
        suffix = f".{progress.num_attempts}" if progress.num_attempts else ""
        remaining_s = progress.deadline_at - asyncio.get_running_loop().time()
        return Generate(
            sequence_id=plan.sequence_id + suffix,
            tokens=tokens,
            num_prompt_tokens=len(plan.prompt_token_ids),
            max_output_tokens=plan.max_output_tokens,
            temperature=plan.temperature,
            top_p=plan.top_p,
            top_k=plan.top_k,
            seed=plan.seed,
            stop_token_ids=list(plan.stop_token_ids),
            ignore_eos=plan.ignore_eos,
            prefill_workers=[
                PrefillWorker(worker.instance_id, worker.host, worker.port) for worker in ranked
            ],
            timeout_s=max(remaining_s, 0.0),
        )

    def _note_loss(self, worker: WorkerView, progress: _Progress, exc: WorkerLostError) -> None:
        progress.num_resumes += 1
        self._metrics.resumes.inc()
        self._log.warning(
            "sequence lost its worker",
            sequence_id=progress.plan.sequence_id,
            worker=worker.instance_id,
            reason=str(exc),
            num_emitted_tokens=len(progress.emitted),
            num_resumes=progress.num_resumes,
        )
        if progress.num_resumes > self._limits.max_resumes:
            raise UpstreamError(
                f"The request lost {progress.num_resumes} decode workers in a row. It is not "
                "tried again; the workers' logs say why they failed."
            ) from exc
        if progress.stuck_since is None:
            progress.stuck_since = asyncio.get_running_loop().time()

    def _note_refusal(
        self, worker: WorkerView, progress: _Progress, exc: _SequenceRefusedError
    ) -> None:
        self._log.info(
            "worker refused a sequence",
            sequence_id=progress.plan.sequence_id,
            worker=worker.instance_id,
            reason=str(exc),
        )
        progress.excluded_ids.add(worker.instance_id)
        progress.refusal = exc.error
        # With tokens already out, giving up would cut the stream: rather wait for room.
        if progress.emitted and progress.stuck_since is None:
            progress.stuck_since = asyncio.get_running_loop().time()


async def _take_tokens(message: Tokens, progress: _Progress) -> bool:
    """Append and emit new tokens; return whether more are wanted.

    Raises WorkerLostError if the worker left a gap, repeated itself or went past the limit.
    """
    plan, emitted = progress.plan, progress.emitted
    if message.first_index != len(emitted):
        raise WorkerLostError(
            f"it sent tokens from index {message.first_index} on where {len(emitted)} is next"
        )
    if len(emitted) + len(message.tokens) > plan.max_output_tokens:
        raise WorkerLostError(f"it sent more than {plan.max_output_tokens} tokens")
    emitted.extend(message.tokens)
    progress.stuck_since = None
    progress.excluded_ids.clear()
    return await progress.emit(message.tokens)


def _end_of(message: Finished | Error) -> SequenceEnd:
    """Return the good end of a sequence, or raise what its bad end means."""
    if isinstance(message, Finished) and message.reason in ("stop", "length"):
        return SequenceEnd(message.reason, message.timings)
    text = message.message or "it gave no reason"
    error = from_wire(message.code, text)
    if message.code in _REFUSALS:
        raise _SequenceRefusedError(error)
    raise error


def _already_ended(progress: _Progress) -> SequenceEnd | None:
    """Return the end of a sequence whose worker was lost between last token and FINISHED."""
    plan, emitted = progress.plan, progress.emitted
    if emitted and not plan.ignore_eos and emitted[-1] in plan.stop_token_ids:
        return SequenceEnd("stop", num_resumes=progress.num_resumes)
    if len(emitted) >= plan.max_output_tokens:
        return SequenceEnd("length", num_resumes=progress.num_resumes)
    return None
