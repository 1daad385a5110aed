import os
import sys

import pytest

from ops.node.change import CommandChange, FileChange
from ops.node.checks import locale
from ops.node.facts import CommandOutput, LiveFacts
from ops.node.finding import Verdict
from tests.ops.node import fact_trees as trees
from tests.ops.node.fact_trees import found, python_asked, said, verdict_of

UTF8 = "utf-8 utf-8 UTF-8"
SYSTEMD = {"/etc/systemd/system.conf": "[Manager]\n"}
SHOW = "systemctl show-environment"


def test_a_good_ubuntu() -> None:
    environment = "LANG=en_US.UTF-8\nPATH=/usr/bin\nPYTHONUTF8=1\n"
    facts = trees.facts(
        {
            "/etc/os-release": trees.UBUNTU_22,
            "/etc/default/locale": "LANG=en_US.UTF-8\n",
            "/etc/ssh/sshd_config": "Include x\nAcceptEnv LANG LC_*\n",
            "/etc/pam.d/sshd": (
                "session required pam_env.so # x\n"
                "session required pam_env.so user_readenv=1 envfile=/etc/default/locale\n"
            ),
            locale.SYSTEMD_DROP_IN: "[Manager]\nDefaultEnvironment=PYTHONUTF8=1\n",
        },
        SYSTEMD,
        commands={
            "locale -a": said(trees.LOCALE_A_UBUNTU),
            SHOW: said(environment),
            **python_asked("LANG=en_US.UTF-8 PYTHONUTF8=1", UTF8),
            **python_asked("LC_ALL=C.UTF-8", UTF8),
        },
        variables={"LC_ALL": "C.UTF-8"},
    )
    findings = locale.check(facts)
    assert {finding.subject: finding.verdict for finding in findings} == dict.fromkeys(
        (
            *("generated", "default", "service", "PYTHONUTF8 in a service"),
            *("python in a service", "ssh HOST COMMAND", "this shell", "python in this shell"),
        ),
        Verdict.OK,
    )
    assert locale.changes(facts) == []


def test_a_chinese_debian_is_given_a_locale_with_utf8() -> None:
    files = {
        "/etc/os-release": trees.DEBIAN_12,
        "/etc/locale.gen": "# en_US ISO-8859-1\n# en_US.UTF-8 UTF-8\nzh_CN.GBK GBK\n",
        "/etc/default/locale": "# kept\nLC_ALL=zh_CN.GBK\nLANG=zh_CN.GBK\nLC_TIME=C\n",
        **SYSTEMD,
    }
    facts = trees.facts(
        files,
        commands={
            "locale -a": said("C\nC.utf8\nPOSIX\nzh_CN.gbk\n"),
            **python_asked("LC_ALL=zh_CN.GBK LANG=zh_CN.GBK", "gbk gbk GBK"),
        },
    )
    findings = locale.check(facts)
    assert verdict_of(findings, "generated") is Verdict.WARN
    assert verdict_of(findings, "default") is Verdict.FAIL
    assert verdict_of(findings, "service") is Verdict.FAIL
    python = found(findings, "python in a service")
    assert python.verdict is Verdict.FAIL
    assert python.measured == "file names gbk, streams gbk, open() GBK"

    generated, command, default, systemd = locale.changes(facts)
    assert isinstance(generated, FileChange)
    assert generated.text == "# en_US ISO-8859-1\nen_US.UTF-8 UTF-8\nzh_CN.GBK GBK\n"
    assert isinstance(command, CommandChange)
    assert command.command == ("locale-gen",)
    assert isinstance(default, FileChange)
    assert default.path == "/etc/default/locale"
    assert default.text == "# kept\nLANG=en_US.UTF-8\nLC_TIME=C\n"
    assert isinstance(systemd, FileChange)
    assert "DefaultEnvironment=PYTHONUTF8=1" in systemd.text
    assert "daemon-reexec" in systemd.needs

    changed = {
        change.path: change.text
        for change in (generated, default, systemd)
        if isinstance(change, FileChange)
    }
    after = trees.facts(files, changed, commands={"locale -a": said(trees.LOCALE_A_UBUNTU)})
    assert locale.changes(after) == []


def test_nothing_can_be_seen() -> None:
    facts = trees.facts()
    findings = locale.check(facts)
    assert verdict_of(findings, "generated") is Verdict.UNKNOWN
    assert verdict_of(findings, "python in a service") is Verdict.UNKNOWN
    assert verdict_of(findings, "default") is Verdict.WARN
    assert not any(finding.verdict is Verdict.FAIL for finding in findings)
    assert locale.changes(facts) == []


@pytest.mark.parametrize(
    ("names", "has_tool", "verdict"),
    [
        (trees.LOCALE_A_DEBIAN_12, False, Verdict.OK),  # all there is
        (trees.LOCALE_A_DEBIAN_12, True, Verdict.WARN),
        (trees.LOCALE_A_CENTOS_7, False, Verdict.OK),
        ("C\nPOSIX\n", True, Verdict.FAIL),
        ("C\nPOSIX\n", False, Verdict.FAIL),
    ],
)
def test_generated(names: str, has_tool: bool, verdict: Verdict) -> None:
    files = {"/etc/locale.gen": "# en_US.UTF-8 UTF-8\n"} if has_tool else {}
    facts = trees.facts(files, commands={"locale -a": said(names)})
    assert verdict_of(locale.check(facts), "generated") is verdict


@pytest.mark.parametrize(
    ("release", "cure"),
    [
        (trees.ROCKY_9, "dnf install glibc-langpack-en"),
        (trees.DEBIAN_12, "apt-get install locales"),
    ],
)
def test_without_a_tool_the_package_is_named(release: str, cure: str) -> None:
    facts = trees.facts({"/etc/os-release": release}, commands={"locale -a": said("C\nPOSIX\n")})
    assert found(locale.check(facts), "generated").cure == cure


def test_a_tree_without_commands_shows_its_locales() -> None:
    minimal = trees.facts({"/usr/lib/locale/C.utf8/LC_CTYPE": ""})
    assert found(locale.check(minimal), "generated").measured == "C.UTF-8"
    archive = {"/usr/lib/locale/locale-archive": ""}
    centos = trees.facts({"/etc/os-release": trees.CENTOS_7}, archive)
    assert found(locale.check(centos), "generated").measured == "en_US.UTF-8"
    assert verdict_of(locale.check(trees.facts(archive)), "generated") is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("release", "path"),
    [
        (trees.DEBIAN_12, "/etc/default/locale"),
        (trees.UBUNTU_24, "/etc/default/locale"),
        (trees.CENTOS_7, "/etc/locale.conf"),
        (trees.RHEL_8, "/etc/locale.conf"),
    ],
)
def test_where_the_default_is_written(release: str, path: str) -> None:
    facts = trees.facts(
        {"/etc/os-release": release}, commands={"locale -a": said(trees.LOCALE_A_UBUNTU)}
    )
    (change,) = locale.changes(facts)
    assert isinstance(change, FileChange)
    assert (change.path, change.text) == (path, "LANG=en_US.UTF-8\n")


def test_the_link_of_newer_debian_is_one_file() -> None:
    facts = trees.facts(
        {
            "/etc/os-release": trees.UBUNTU_24,
            "/etc/locale.conf": "LANG=C\n",
            "/etc/default/locale": "LANG=C\n",
        },
        links={"/etc/default/locale": "../locale.conf"},
        commands={"locale -a": said(trees.LOCALE_A_DEBIAN_12)},
    )
    (change,) = locale.changes(facts)
    assert isinstance(change, FileChange)
    assert (change.path, change.text) == ("/etc/locale.conf", "LANG=C.UTF-8\n")


def test_a_default_that_was_never_generated() -> None:
    facts = trees.facts(
        {"/etc/os-release": trees.DEBIAN_12, "/etc/default/locale": "LANG=de_DE.UTF-8\n"},
        commands={"locale -a": said(trees.LOCALE_A_DEBIAN_12)},
    )
    finding = found(locale.check(facts), "default")
    assert finding.verdict is Verdict.FAIL
    assert "does not exist here" in finding.reason


def test_another_locale_with_utf8_is_left_alone() -> None:
    facts = trees.facts(
        {"/etc/os-release": trees.DEBIAN_12, "/etc/default/locale": 'LANG="de_DE.UTF-8"\n'},
        commands={"locale -a": said("C\nC.utf8\nde_DE.utf8\nen_US.utf8\nPOSIX\n")},
    )
    assert verdict_of(locale.check(facts), "default") is Verdict.OK
    assert locale.changes(facts) == []


def test_what_is_written_counts_only_once_the_manager_has_read_it() -> None:
    files = {locale.SYSTEMD_DROP_IN: "[Manager]\nDefaultEnvironment=PYTHONUTF8=1\n", **SYSTEMD}
    before = locale.check(trees.facts(files, commands={SHOW: said("PATH=/usr/bin\n")}))
    finding = found(before, "PYTHONUTF8 in a service")
    assert (finding.verdict, finding.measured) == (Verdict.WARN, "not set")
    assert finding.cure.startswith("systemctl daemon-reexec")
    after = locale.check(trees.facts(files, commands={SHOW: said("PYTHONUTF8=1\n")}))
    assert verdict_of(after, "PYTHONUTF8 in a service") is Verdict.OK


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("DefaultEnvironment=PYTHONUTF8=1 LANG=C.UTF-8\n", Verdict.OK),
        ('DefaultEnvironment="LANG=C" "PYTHONUTF8=1"\n', Verdict.OK),
        ("DefaultEnvironment=PYTHONUTF8=1\nDefaultEnvironment=\n", Verdict.WARN),
        ("DefaultEnvironment=PYTHONUTF8=0\n", Verdict.FAIL),
        ("#DefaultEnvironment=PYTHONUTF8=1\n", Verdict.WARN),
    ],
)
def test_default_environment(lines: str, expected: Verdict) -> None:
    facts = trees.facts({"/etc/systemd/system.conf.d/10-a.conf": f"[Manager]\n{lines}"})
    assert verdict_of(locale.check(facts), "PYTHONUTF8 in a service") is expected


def test_without_systemctl_the_first_process_tells() -> None:
    facts = trees.facts({"/proc/1/environ": "SECRET=x\0LANG=C.UTF-8\0PYTHONUTF8=1\0"})
    findings = locale.check(facts)
    assert found(findings, "service").measured == "C.UTF-8"
    assert verdict_of(findings, "PYTHONUTF8 in a service") is Verdict.OK


@pytest.mark.parametrize(
    ("files", "measured", "verdict"),
    [
        ({}, "no locale", Verdict.WARN),
        ({"/etc/environment": 'LANG="C.UTF-8"\n'}, "C.UTF-8 from /etc/environment", Verdict.OK),
        ({"/etc/environment": "LANG=C\n"}, "C from /etc/environment", Verdict.WARN),
        (
            {"/etc/ssh/sshd_config.d/a.conf": "SetEnv LANG=C.UTF-8\n"},
            "C.UTF-8 from SetEnv in sshd_config",
            Verdict.OK,
        ),
        (
            {
                "/etc/os-release": trees.ROCKY_9,
                "/etc/profile.d/lang.sh": "# x\n",
                "/etc/locale.conf": "LANG=C.UTF-8\n",
            },
            "C.UTF-8 from /etc/profile.d/lang.sh (bash only)",
            Verdict.OK,
        ),
    ],
)
def test_a_command_over_ssh(files: dict[str, str], measured: str, verdict: Verdict) -> None:
    facts = trees.facts({"/etc/ssh/sshd_config": "Port 22\n"}, files)
    finding = found(locale.check(facts), "ssh HOST COMMAND")
    assert (finding.measured, finding.verdict) == (measured, verdict)


def test_a_client_may_send_a_locale_that_does_not_exist_here() -> None:
    facts = trees.facts(
        {"/etc/ssh/sshd_config": "AcceptEnv LANG LC_*\n"},
        commands={"locale -a": said(trees.LOCALE_A_DEBIAN_12)},
    )
    assert verdict_of(locale.check(facts), "ssh AcceptEnv") is Verdict.WARN


@pytest.mark.parametrize(
    ("value", "words"),
    [("en_US.UTF-8", "does not exist here"), ("C", "C locale"), ("", "C locale")],
)
def test_this_shell(value: str, words: str) -> None:
    facts = trees.facts(
        commands={"locale -a": said(trees.LOCALE_A_DEBIAN_12)}, variables={"LANG": value}
    )
    finding = found(locale.check(facts), "this shell")
    assert finding.verdict is Verdict.WARN
    assert words in finding.reason
    assert finding.cure == "export LC_ALL=C.UTF-8"


def test_odd_answers_do_not_raise() -> None:
    facts = trees.facts(
        {"/etc/default/locale": "\0\n==\n", "/etc/ssh/sshd_config": "\nSetEnv\nAcceptEnv\n"},
        commands={
            "locale -a": CommandOutput(1, "", "x"),
            **python_asked("", "three words are not what was said"),
        },
    )
    assert verdict_of(locale.check(facts), "python in a service") is Verdict.UNKNOWN


@pytest.mark.skipif(sys.platform != "linux", reason="asks the env and python3 of a Linux machine")
@pytest.mark.parametrize(
    ("variables", "verdict"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, Verdict.FAIL),
        ({"LC_ALL": "C", "PYTHONUTF8": "1"}, Verdict.OK),
        ({"LC_ALL": "C.UTF-8"}, Verdict.OK),
    ],
)
def test_python_is_really_asked(
    variables: dict[str, str], verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_folder = os.path.dirname(sys.executable)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ.get('PATH', '')}")
    for name in ("LC_ALL", "LC_CTYPE", "LANG", "PYTHONUTF8", "PYTHONIOENCODING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert verdict_of(locale.check(LiveFacts()), "python in this shell") is verdict
