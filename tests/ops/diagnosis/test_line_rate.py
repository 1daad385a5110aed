from ops.diagnosis.line_rate import LineRate, named_line_rate, read_line_rate
from ops.node.facts import RecordedFacts

NET = "/sys/class/net"


def card(name: str, speed: str) -> dict[str, str]:
    return {f"{NET}/{name}/device/vendor": "0x15b3\n", f"{NET}/{name}/speed": speed}


def test_the_fastest_card_counts() -> None:
    facts = RecordedFacts(files={**card("eth0", "10000\n"), **card("eth1", "100000\n")})
    assert read_line_rate(facts) == LineRate(12.5e9, f"{NET}/eth1/speed")


def test_what_is_no_card_or_has_no_link_is_left_out() -> None:
    files = {f"{NET}/veth0/speed": "10000\n", f"{NET}/lo/operstate": "unknown\n"}
    assert read_line_rate(RecordedFacts(files={**files, **card("eth0", "-1\n")})) is None
    assert read_line_rate(RecordedFacts(files=card("eth0", "fast"))) is None
    assert read_line_rate(RecordedFacts(files={**card("eth0", "0"), **files})) is None


def test_nothing_to_see() -> None:
    assert read_line_rate(RecordedFacts()) is None


def test_a_named_one() -> None:
    assert named_line_rate(25).bytes_per_s == 3.125e9
