"""Whatever answers, each question ends soon, small, and with a clause that says what was wrong."""

import pytest

from ops.diagnosis import scraper as scraper_module
from ops.diagnosis.scraper import ScrapeFailure, Scraper
from tests.ops.diagnosis.answers import (
    Handler,
    broken_off,
    endless,
    json_of,
    keyed,
    moved,
    never,
    text_of,
)
from tests.ops.diagnosis.conftest import StartService

DECODE = {"state": "serving", "role": "decode", "instance_id": "decode-0"}
METRICS = "# TYPE pd_decode_free_blocks gauge\npd_decode_free_blocks 7.0\n"
KEY = b"0123456789abcdef"


async def test_a_worker(start_service: StartService) -> None:
    url = await start_service({"/healthz": json_of(DECODE), "/metrics": text_of(METRICS)})
    async with Scraper() as scraper:
        snapshot = await scraper.snapshot(url)
        assert await scraper.round_trip_s(url) > 0
    assert (snapshot.role, snapshot.name) == ("decode", "decode-0")
    assert snapshot.metrics.total("pd_decode_free_blocks") == 7.0
    assert snapshot.metrics_problem == ""


async def test_a_version_that_does_not_say_what_it_is(start_service: StartService) -> None:
    url = await start_service(
        {"/healthz": json_of({"state": "serving"}), "/metrics": text_of(METRICS)}
    )
    async with Scraper() as scraper:
        snapshot = await scraper.snapshot(url)
    assert (snapshot.role, snapshot.name) == ("decode", url)


@pytest.mark.parametrize(
    ("handler", "clause"),
    [
        (text_of("<html>"), "not JSON"),
        (text_of(b"\xff\xfe{"), "not JSON"),
        (text_of("[" * 100_000), "not JSON"),
        (json_of([1]), "not that of a service of ours"),
        (json_of({"status": "UP"}), "not that of a service of ours"),
        (json_of(DECODE, status=503), "answered 503"),
        (moved("http://127.0.0.1:9/healthz"), "answered 302"),
        (never(), "did not answer within 0.3 s"),
        (endless(), "larger than"),
    ],
)
async def test_bad_health(start_service: StartService, handler: Handler, clause: str) -> None:
    url = await start_service({"/healthz": handler})
    async with Scraper(timeout_s=0.3 if "within" in clause else 30) as scraper:
        with pytest.raises(ScrapeFailure, match=clause):
            await scraper.snapshot(url)


@pytest.mark.parametrize(
    ("handler", "clause"),
    [
        (text_of("<html>"), "not Prometheus' text format"),
        (text_of("no", status=500), "answered 500"),
        (never(), "did not answer within"),
        (endless(), "larger than"),
    ],
)
async def test_bad_metrics_leave_the_health_answer(
    start_service: StartService, handler: Handler, clause: str
) -> None:
    url = await start_service({"/healthz": json_of(DECODE), "/metrics": handler})
    async with Scraper(timeout_s=1.0 if "within" in clause else 30) as scraper:
        snapshot = await scraper.snapshot(url)
    assert clause in snapshot.metrics_problem
    assert snapshot.metrics.samples == {}
    assert snapshot.name == "decode-0"


async def test_nothing_listens(closed_url: str) -> None:
    async with Scraper() as scraper:
        with pytest.raises(ScrapeFailure, match="nothing is listening there"):
            await scraper.snapshot(closed_url)
        with pytest.raises(ScrapeFailure, match="nothing is listening there"):
            await scraper.round_trip_s(closed_url)


async def test_a_body_that_breaks_off(start_service: StartService) -> None:
    url = await start_service({"/healthz": broken_off()})
    async with Scraper() as scraper:
        with pytest.raises(ScrapeFailure, match="connection failed"):
            await scraper.snapshot(url)


async def test_the_key_goes_to_the_router_alone(start_service: StartService) -> None:
    guarded = keyed(text_of(METRICS), KEY.decode())
    url = await start_service({"/healthz": json_of(DECODE), "/metrics": guarded})
    async with Scraper(KEY) as scraper:
        assert (await scraper.snapshot(url, is_router=True)).metrics_problem == ""
        assert "answered 401" in (await scraper.snapshot(url)).metrics_problem
    async with Scraper(b"\xff" * 16) as scraper:
        snapshot = await scraper.snapshot(url, is_router=True)
        assert "answered 401" in snapshot.metrics_problem


async def test_an_answer_of_the_largest_size_is_read(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraper_module, "MAX_ANSWER_NBYTES", len(METRICS))
    handlers = {"/healthz": json_of({"state": "s"}), "/metrics": text_of(METRICS)}
    url = await start_service(handlers)
    async with Scraper() as scraper:
        assert (await scraper.snapshot(url)).metrics_problem == ""
        monkeypatch.setattr(scraper_module, "MAX_ANSWER_NBYTES", len(METRICS) - 1)
        assert "larger than" in (await scraper.snapshot(url)).metrics_problem
