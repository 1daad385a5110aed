from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svckit.errors import ConfigError
from svckit.setting import option, parse_cpu_list, parse_nbytes, settings_of


@dataclass(frozen=True, kw_only=True)
class Sample:
    whole: int = option("A number.", default=3, minimum=1, maximum=9)
    ratio: float = option("A ratio.", default=0.5, minimum=0.0)
    is_on: bool = option("A switch.", default=False)
    name: str = option("A name.", default="x", choices=("x", "y"))
    mode: Literal["a", "b"] = option("A mode.", default="a")
    folder: Path | None = option("A folder.", default=None)
    names: tuple[str, ...] = option("Names.", default=())
    cpus: tuple[int, ...] = option("CPUs.", default=(), parse=parse_cpu_list)
    other_flag: int = option("Renamed.", default=0, flag="--renamed")
    needed: str = option("Required.")


SETTINGS = settings_of(Sample)


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("whole", "7", 7),
        ("whole", 7, 7),
        ("ratio", "1.5", 1.5),
        ("ratio", 2, 2.0),
        ("is_on", "Yes", True),
        ("is_on", "0", False),
        ("is_on", True, True),
        ("name", "y", "y"),
        ("mode", "b", "b"),
        ("folder", "/x", Path("/x")),
        ("folder", Path("/x"), Path("/x")),
        ("folder", "", None),
        ("names", "p, q", ("p", "q")),
        ("names", ["p", "q"], ("p", "q")),
        ("names", "", ()),
        ("cpus", "0-2", (0, 1, 2)),
        ("cpus", 1, (1,)),
    ],
)
def test_coerce_accepts(name: str, raw: object, value: object) -> None:
    assert SETTINGS[name].coerce(raw, "here") == value


@pytest.mark.parametrize(
    ("name", "raw", "expected"),
    [
        ("whole", "seven", "a whole number"),
        ("whole", True, "a whole number"),
        ("whole", "1_0", "a whole number"),
        ("whole", "٣", "a whole number"),
        ("whole", 0, "at least 1"),
        ("whole", "10", "at most 9"),
        ("ratio", "nan", "a finite number"),
        ("ratio", False, "a finite number"),
        ("ratio", "x", "a finite number"),
        ("ratio", "-1", "at least 0.0"),
        ("is_on", "maybe", "true or false"),
        ("is_on", 1, "true or false"),
        ("name", "z", "one of x, y"),
        ("name", 1, "text"),
        ("mode", "c", "one of a, b"),
        ("folder", 1, "a path"),
        ("names", [1], "a list of texts"),
        ("cpus", "2-0", "rising ranges"),
        ("cpus", "a", "a CPU list"),
    ],
)
def test_coerce_refuses_naming_field_origin_value_and_limit(
    name: str, raw: object, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        SETTINGS[name].coerce(raw, "--a-flag")
    message = str(caught.value)
    assert message.startswith(f"{name} from --a-flag is {raw!r}, but it must be ")
    assert expected in message


def test_flags_are_kebab_case_or_as_given() -> None:
    assert SETTINGS["is_on"].flag == "--is-on"
    assert SETTINGS["other_flag"].flag == "--renamed"


def test_only_fields_without_default_are_required() -> None:
    assert [name for name, setting in SETTINGS.items() if setting.is_required] == ["needed"]


def test_a_type_that_cannot_be_read_is_a_defect() -> None:
    @dataclass
    class Odd:
        field: dict[str, int]

    with pytest.raises(TypeError, match=r"Odd\.field"):
        settings_of(Odd)


@given(st.frozensets(st.integers(0, 300), max_size=20))
def test_cpu_list_reads_back_what_was_written(cpus: frozenset[int]) -> None:
    text = ",".join(str(cpu) for cpu in cpus)
    assert parse_cpu_list(text) == tuple(sorted(cpus))


@pytest.mark.parametrize("text", ["-1", "1-", "1-x", "4096", "1;2", "0-99999999999"])
def test_cpu_list_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="CPU list"):
        parse_cpu_list(text)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("1KiB", 1024), ("1.5 GiB", 3 << 29), ("512MiB", 512 << 20), ("7B", 7)],
)
def test_nbytes(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "1GB", "-1", "1.2.3MiB", "1KiBKiB", "x"])
def test_nbytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="a size such as"):
        parse_nbytes(text)
