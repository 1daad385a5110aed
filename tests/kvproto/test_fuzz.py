"""No input makes a decoder do anything but return or refuse, nor take more memory than it may.

Ordinary: a fixed series of changed inputs for each decoder. Long (PD_LONG_TESTS=1): ten minutes
(or PD_FUZZ_S seconds), shared by the decoders, guided by coverage where ``atheris`` is installed.
"""

import importlib.util
import os
import random
import subprocess
import sys
import time
import tracemalloc
from itertools import islice
from pathlib import Path

import pytest

from kvproto.header import Kind
from kvproto.messages import MESSAGES
from tests.kvproto.fuzz_targets import EXAMPLES, TARGETS, Finding, Target, mutations

IS_LONG = os.environ.get("PD_LONG_TESTS") == "1"
# A connection costs a hundred times what a decoder does.
NUM_INPUTS = {name: 600 if name == "connection" else 2000 for name in TARGETS}
LONG_S = float(os.environ.get("PD_FUZZ_S", "600"))
ROOT = Path(__file__).parents[2]
# Inputs that once were findings, as (target, bytes).
REGRESSIONS: list[tuple[str, bytes]] = []


def run_one(name: str, target: Target, data: bytes) -> None:
    try:
        target.run(data)
    except Exception as exc:
        raise Finding(f"{name}: {type(exc).__name__}: {exc}; input {data.hex()}") from exc


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_are_accepted(name):
    for seed in TARGETS[name].seeds:
        run_one(name, TARGETS[name], seed)


@pytest.mark.parametrize("name", TARGETS)
def test_changed_inputs_are_refused_or_decoded(name):
    target = TARGETS[name]
    for data in islice(mutations(target.seeds, random.Random(name)), NUM_INPUTS[name]):
        run_one(name, target, data)


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_takes_more_memory_than_the_announced_limit(name):
    target = TARGETS[name]
    tracemalloc.start()
    try:
        for data in islice(
            mutations(target.seeds, random.Random(f"{name} memory")), NUM_INPUTS[name] // 6
        ):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            run_one(name, target, data)
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken < target.max_nbytes, data.hex()
    finally:
        tracemalloc.stop()


def test_former_findings():
    for name, data in REGRESSIONS:
        run_one(name, TARGETS[name], data)


def test_every_message_is_among_the_seeds():
    assert {example.kind for example in EXAMPLES} == set(MESSAGES) == set(Kind) & set(MESSAGES)


def test_a_finding_is_reported_with_its_input():
    def broken(data: bytes) -> None:
        raise KeyError("x")

    with pytest.raises(Finding, match=r"KeyError.*input 616263"):
        run_one("broken", Target(broken, (b"",)), b"abc")


@pytest.mark.long
@pytest.mark.skipif(not IS_LONG, reason="PD_LONG_TESTS is not 1")
@pytest.mark.timeout(LONG_S / len(TARGETS) + 180)
@pytest.mark.parametrize("name", TARGETS)
def test_fuzz_for_long(name, tmp_path):
    duration_s = LONG_S / len(TARGETS)
    target = TARGETS[name]
    if importlib.util.find_spec("atheris") is None:
        until = time.monotonic() + duration_s
        source = random.Random()
        for data in mutations(target.seeds, source):
            run_one(name, target, data)
            if time.monotonic() > until:
                return
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(seed)
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "tests.kvproto.fuzz", name, str(corpus)),
            *(f"-max_total_time={duration_s:.0f}", "-timeout=5", "-max_len=8192"),
            *("-rss_limit_mb=1024", f"-artifact_prefix={tmp_path}/"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=duration_s + 120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
