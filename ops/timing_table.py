"""Where the time of one answer went, as a small table."""

from collections.abc import Mapping
from typing import Any, Final

_WIDTH: Final = 22


def timing_table(timings: Mapping[str, Any]) -> list[str]:
    """Lines of the table; values the server did not give are left out."""
    rows = (
        ("waiting for prefill", _ms(timings.get("prefill_queue_s"))),
        ("prefill", _prefill(timings)),
        ("handoff", _handoff(timings)),
        ("waiting for decode", _ms(timings.get("decode_queue_s"))),
        ("first decode step", _ms(timings.get("first_step_s"))),
        ("TTFT", _ms(timings.get("ttft_s"))),
        ("ITL", _itl(timings.get("itl_s"))),
        ("output", _output(timings)),
        ("total", _ms(timings.get("e2e_s"))),
    )
    return [f"{name:<{_WIDTH}}{value}" for name, value in rows if value]


def _ms(duration_s: Any) -> str:
    return f"{float(duration_s) * 1e3:>9.1f} ms" if duration_s is not None else ""


def _prefill(timings: Mapping[str, Any]) -> str:
    text, worker = _ms(timings.get("prefill_s")), timings.get("prefill_worker")
    return f"{text}  by {worker}" if text and worker else text


def _handoff(timings: Mapping[str, Any]) -> str:
    if timings.get("carrier") == "local":
        return "     none  (prefilled by the decode worker)"
    text, nbytes = _ms(timings.get("handoff_s")), timings.get("handoff_nbytes")
    if not text or not nbytes:
        return ""
    # No rate: most bytes travel while later layers are computed, and only the rest is waited for.
    return (
        f"{text}  not hidden by prefill; {float(nbytes) / 1e6:.2f} MB by {timings.get('carrier')}"
    )


def _itl(summary: Any) -> str:
    if not isinstance(summary, Mapping) or not summary:
        return ""
    parts = [f"{name} {float(summary[name]) * 1e3:.1f}" for name in ("p50", "p99", "max")]
    return f"{_ms(summary['mean'])}  mean; {', '.join(parts)} ms"


def _output(timings: Mapping[str, Any]) -> str:
    num_tokens, ttft_s, e2e_s = (timings.get(k) for k in ("num_output_tokens", "ttft_s", "e2e_s"))
    if not num_tokens:
        return ""
    text = f"{int(num_tokens):>9d} tokens"
    if ttft_s is not None and e2e_s is not None and e2e_s > ttft_s and num_tokens > 1:
        # - 1: the first token belongs to the TTFT.
        text += f"  {(num_tokens - 1) / (e2e_s - ttft_s):.1f} tokens/s after the first"
    return text
