"""UTF-8 everywhere: locales that exist, the default, and what a service and an ssh command see.

The variables of a login shell say little: services get systemd's, ``ssh host command`` what sshd
and PAM give. So each is looked at on its own, and Python is asked what it makes of it.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from ops.node.change import Change, CommandChange, FileChange
from ops.node.facts import Facts
from ops.node.finding import Finding, Verdict
from ops.node.formats.locale import (
    is_utf8,
    normalised,
    parse_locale_names,
    parse_variables,
    with_variable,
    without_variable,
)
from ops.node.formats.os_release import DEBIAN, RHEL, read_distribution

CHECK: Final = "locale"
SYSTEMD_DROP_IN: Final = "/etc/systemd/system.conf.d/90-pdserve.conf"

_PREFERRED: Final = "en_US.UTF-8"
_BUILT_IN: Final = "C.UTF-8"
_LOCALE_CONF: Final = "/etc/locale.conf"
_DEBIAN_DEFAULT: Final = "/etc/default/locale"
_LOCALE_GEN: Final = "/etc/locale.gen"
_ARCHIVE: Final = "/usr/lib/locale/locale-archive"
# The first that is set decides, see locale(7).
_VARIABLES: Final = ("LC_ALL", "LC_CTYPE", "LANG")
_PYTHON_VARIABLES: Final = ("PYTHONUTF8", "PYTHONIOENCODING", "PYTHONCOERCECLOCALE")
# File names, standard streams, open() without an encoding.
_ASK_PYTHON: Final = (
    "import locale, sys; print(sys.getfilesystemencoding(), sys.stdout.encoding, "
    "locale.getpreferredencoding(False))"
)
_SYSTEMD_FOLDERS: Final = (
    "/etc/systemd/system.conf.d",
    "/run/systemd/system.conf.d",
    "/usr/lib/systemd/system.conf.d",
)
_RELOAD: Final = "systemctl daemon-reexec, then restart the services"
_SYSTEMD_TEXT: Final = (
    "# Written by pdserve (pdctl node, or ops/runbooks); its rollback takes it back.\n"
    "[Manager]\n"
    "DefaultEnvironment=PYTHONUTF8=1\n"
)


def check(facts: Facts) -> list[Finding]:
    """What exists, the default, a service, Python in a service, ssh, and this process."""
    names = _generated(facts)
    service = _service_variables(facts)
    own = {
        name: value
        for name in (*_VARIABLES, *_PYTHON_VARIABLES)
        if (value := facts.environment(name)) is not None
    }
    return [
        _generated_finding(facts, names),
        _default_finding(facts, names),
        _service_finding(service, _written_variables(facts), names),
        _python_utf8_finding(service, _written_variables(facts)),
        _python_finding(facts, "python in a service", service),
        *_ssh_findings(facts, names),
        _own_finding(own, names),
        _python_finding(facts, "python in this shell", own),
    ]


def changes(facts: Facts) -> list[Change]:
    """Generate the locale where there is a tool for it, make it the default, tell services."""
    names = _generated(facts)
    wanted: list[Change] = []
    if names is not None and _can_generate(facts, names):
        text = facts.text(_LOCALE_GEN) or ""
        if _with_generated(text) != text:
            wanted.append(
                FileChange(
                    _LOCALE_GEN,
                    _with_generated(text),
                    f"locale-gen makes {_PREFERRED} now and after every update of the C library.",
                )
            )
        wanted.append(
            CommandChange(
                ("locale-gen",),
                (_ARCHIVE,),
                f"ssh clients ask for {_PREFERRED}; where there is none, programs fall to ASCII.",
            )
        )
        names = names | {normalised(_PREFERRED)}
    if names is not None:
        wanted.extend(_default_changes(facts, names))
    if _has_systemd(facts) and "PYTHONUTF8" not in _default_environment(facts):
        wanted.append(
            FileChange(
                SYSTEMD_DROP_IN,
                _SYSTEMD_TEXT,
                "Python in every service uses UTF-8 whatever the locale.",
                needs=_RELOAD,
            )
        )
    return wanted


def _generated(facts: Facts) -> frozenset[str] | None:
    """The locales that exist, normalised; None if that cannot be seen."""
    output = facts.run("locale", "-a")
    if output.is_ok:
        return parse_locale_names(output.stdout)
    names = facts.names("/usr/lib/locale")
    if "locale-archive" not in names:
        # glibc looks at nothing else, so folders are the whole truth; without any we saw nothing.
        return parse_locale_names("\n".join(names)) if names else None
    distribution = read_distribution(facts)
    if distribution.family == RHEL and distribution.major == 7:
        # The archive that glibc-common brings has it, also in the smallest image.
        return frozenset({normalised(_PREFERRED)})
    return None


def _can_generate(facts: Facts, names: frozenset[str]) -> bool:
    """Debian's locale-gen is installed, and the preferred locale is not there yet."""
    return normalised(_PREFERRED) not in names and facts.text(_LOCALE_GEN) is not None


def _with_generated(text: str) -> str:
    """locale.gen with the preferred locale's line active."""
    wanted = f"{_PREFERRED} UTF-8"
    lines = text.splitlines()
    if any(line.split() == wanted.split() for line in lines):
        return text
    for index, line in enumerate(lines):
        if line.lstrip("# \t").split() == wanted.split():
            lines[index] = wanted
            return "\n".join(lines) + "\n"
    return "".join(line + "\n" for line in (*lines, wanted))


def _best(names: frozenset[str]) -> str | None:
    return next((name for name in (_PREFERRED, _BUILT_IN) if normalised(name) in names), None)


def _default_files(facts: Facts) -> list[str]:
    """Files that set the default. Newer Debian links the old name to the new one."""
    files = [_LOCALE_CONF] if facts.text(_LOCALE_CONF) is not None else []
    if facts.text(_DEBIAN_DEFAULT) is not None and facts.link(_DEBIAN_DEFAULT) is None:
        files.append(_DEBIAN_DEFAULT)
    return files


def _effective(variables: Mapping[str, str]) -> str:
    return next((variables[name] for name in _VARIABLES if variables.get(name)), "")


def _is_good(name: str, names: frozenset[str] | None) -> bool:
    return is_utf8(name) and (names is None or normalised(name) in names)


def _default_changes(facts: Facts, names: frozenset[str]) -> Iterator[Change]:
    best = _best(names)
    files = _default_files(facts)
    if not files:
        family = read_distribution(facts).family
        files = [{DEBIAN: _DEBIAN_DEFAULT, RHEL: _LOCALE_CONF}[family]] if family else []
    for path in files:
        text = facts.text(path) or ""
        variables = parse_variables(text)
        if best is None or _is_good(_effective(variables), names):
            continue
        for name in ("LC_ALL", "LC_CTYPE"):
            if name in variables and not _is_good(variables[name], names):
                text = without_variable(text, name)
        if not _is_good(variables.get("LANG", ""), names):
            text = with_variable(text, "LANG", best)
        yield FileChange(
            path,
            text,
            "The default locale of logins and services is one with UTF-8 that exists.",
            needs=f"a new login; for services: {_RELOAD}",
        )


def _has_systemd(facts: Facts) -> bool:
    return facts.text("/etc/systemd/system.conf") is not None or bool(
        facts.names("/run/systemd/system")
    )


def _service_variables(facts: Facts) -> dict[str, str]:
    """What a service is given now: by the running manager, else as its files say."""
    running = facts.run("systemctl", "show-environment")
    if running.is_ok:
        variables = parse_variables(running.stdout)
    else:
        variables = _written_variables(facts)
        first = facts.text("/proc/1/environ")
        if not variables and first is not None:
            variables = parse_variables(first.replace("\0", "\n"))
    kept = (*_VARIABLES, *_PYTHON_VARIABLES)
    return {name: variables[name] for name in kept if name in variables}


def _written_variables(facts: Facts) -> dict[str, str]:
    """What a service will be given once the manager has read its files again."""
    variables: dict[str, str] = {}
    for path in _default_files(facts):
        known = parse_variables(facts.text(path) or "")
        variables.update({name: known[name] for name in _VARIABLES if name in known})
    return {**variables, **_default_environment(facts)}


def _default_environment(facts: Facts) -> dict[str, str]:
    """DefaultEnvironment= of systemd-system.conf(5), drop-ins by name over the main file."""
    by_name: dict[str, str] = {}
    for folder in _SYSTEMD_FOLDERS:
        for name in facts.names(folder):
            if name.endswith(".conf"):
                by_name.setdefault(name, f"{folder}/{name}")
    paths = ["/etc/systemd/system.conf", *(path for _, path in sorted(by_name.items()))]
    variables: dict[str, str] = {}
    for path in paths:
        for line in (facts.text(path) or "").splitlines():
            name, equals, value = line.strip().partition("=")
            if name.strip() != "DefaultEnvironment" or not equals:
                continue
            if not value.strip():
                variables.clear()
            for word in value.replace('"', " ").replace("'", " ").split():
                variables.update(parse_variables(word))
    return variables


def _generated_finding(facts: Facts, names: frozenset[str] | None) -> Finding:
    subject, wanted, source = (
        "generated",
        f"{_PREFERRED} or {_BUILT_IN}",
        "locale(1), locale-gen(8)",
    )
    if names is None:
        return Finding(
            CHECK,
            subject,
            Verdict.UNKNOWN,
            "",
            wanted,
            "`locale -a` cannot be run and the archive of locales cannot be read without it.",
            source,
        )
    distribution = read_distribution(facts)
    if normalised(_PREFERRED) in names:
        reason = "Programs that are told this locale find it."
        return Finding(CHECK, subject, Verdict.OK, _PREFERRED, wanted, reason, source)
    if normalised(_BUILT_IN) in names:
        if not _can_generate(facts, names):
            reason = f"There is no tool to make {_PREFERRED}, and this one has UTF-8 as well."
            return Finding(CHECK, subject, Verdict.OK, _BUILT_IN, wanted, reason, source)
        return Finding(
            CHECK,
            subject,
            Verdict.WARN,
            f"{_BUILT_IN} only",
            _PREFERRED,
            "An ssh client that sends its LANG gets ASCII where that locale does not exist.",
            source,
            "pdctl node apply (runs locale-gen)",
        )
    install = distribution.install_line("locales", "glibc-langpack-en")
    return Finding(
        CHECK,
        subject,
        Verdict.FAIL,
        "no locale with UTF-8",
        wanted,
        "Every program falls back to ASCII and fails at the first other character.",
        source,
        "pdctl node apply (runs locale-gen)" if _can_generate(facts, names) else install,
    )


def _default_finding(facts: Facts, names: frozenset[str] | None) -> Finding:
    subject, source = "default", "locale.conf(5), update-locale(8)"
    wanted = f"{_PREFERRED} or {_BUILT_IN}"
    files = _default_files(facts)
    values = {path: _effective(parse_variables(facts.text(path) or "")) for path in files}
    measured = ", ".join(f"{value or 'nothing'} in {path}" for path, value in values.items())
    if files and all(_is_good(value, names) for value in values.values()):
        reason = "Logins and services start in UTF-8."
        return Finding(CHECK, subject, Verdict.OK, measured, wanted, reason, source)
    if any(value and is_utf8(value) for value in values.values()):
        reason = "The locale that is the default does not exist here, so programs fall to ASCII."
    else:
        reason = "Programs start in the C locale or in an old charset, not in UTF-8."
    return Finding(
        CHECK,
        subject,
        Verdict.FAIL if any(values.values()) else Verdict.WARN,
        measured or "no file sets it",
        wanted,
        reason,
        source,
        "pdctl node apply",
    )


def _service_finding(
    service: Mapping[str, str], written: Mapping[str, str], names: frozenset[str] | None
) -> Finding:
    value = _effective(service)
    subject, wanted, source = "service", "a locale with UTF-8", "systemd.exec(5)"
    if _is_good(value, names):
        reason = "systemd gives it to every service; a login shell says nothing about that."
        return Finding(CHECK, subject, Verdict.OK, value, wanted, reason, source)
    return Finding(
        CHECK,
        subject,
        Verdict.FAIL if value and not value.startswith(("C", "POSIX")) else Verdict.WARN,
        value or "no locale",
        wanted,
        "A service starts without a locale with UTF-8, whatever a shell shows; Python alone copes.",
        source,
        _RELOAD if _is_good(_effective(written), names) else f"set the default, then: {_RELOAD}",
    )


def _python_utf8_finding(service: Mapping[str, str], written: Mapping[str, str]) -> Finding:
    value = service.get("PYTHONUTF8")
    subject, source = "PYTHONUTF8 in a service", "Python: PEP 540"
    if value == "1":
        reason = "Python uses UTF-8 whatever the locale."
        return Finding(CHECK, subject, Verdict.OK, value, "1", reason, source)
    return Finding(
        CHECK,
        subject,
        Verdict.FAIL if value == "0" else Verdict.WARN,
        value if value is not None else "not set",
        "1",
        "A library that opens a file without an encoding reads it in the locale's.",
        source,
        _RELOAD
        if written.get("PYTHONUTF8") == "1"
        else "pdctl node apply, or Environment=PYTHONUTF8=1 in the unit",
    )


def _python_finding(facts: Facts, subject: str, variables: Mapping[str, str]) -> Finding:
    """What Python makes of these variables, by asking it: the child gets no others of the kind."""
    source = "Python: PEP 538, PEP 540"
    kept = (*_VARIABLES, *_PYTHON_VARIABLES)
    unset = [word for name in kept for word in ("-u", name)]
    pairs = [f"{name}={variables[name]}" for name in kept if name in variables]
    output = facts.run("env", *unset, *pairs, "python3", "-c", _ASK_PYTHON)
    encodings = output.stdout.split()
    if not output.is_ok or len(encodings) != 3:
        reason = "python3 cannot be asked here."
        return Finding(CHECK, subject, Verdict.UNKNOWN, "", "utf-8", reason, source)
    measured = "file names {}, streams {}, open() {}".format(*encodings)
    is_right = all(normalised(f".{name}") == ".utf8" for name in encodings)
    return Finding(
        CHECK,
        subject,
        Verdict.OK if is_right else Verdict.FAIL,
        measured,
        "utf-8 for all three",
        f"Asked with {', '.join(pairs) or 'none of the variables set'}.",
        source,
        "" if is_right else "set PYTHONUTF8=1 and a locale with UTF-8",
    )


def _ssh_findings(facts: Facts, names: frozenset[str] | None) -> Iterator[Finding]:
    """Nothing where there is no sshd."""
    config = [facts.text("/etc/ssh/sshd_config")]
    if config[0] is None:
        return
    folder = "/etc/ssh/sshd_config.d"
    config.extend(facts.text(f"{folder}/{name}") for name in facts.names(folder))
    lines = [line.split() for text in config if text for line in text.splitlines() if line.split()]
    subject, source = "ssh HOST COMMAND", "sshd_config(5), pam_env(8)"
    value, where = _ssh_locale(facts, lines)
    if _is_good(value, names):
        reason = "Also without a login shell a command starts in UTF-8."
        yield Finding(CHECK, subject, Verdict.OK, f"{value} from {where}", "UTF-8", reason, source)
    else:
        yield Finding(
            CHECK,
            subject,
            Verdict.WARN,
            f"{value} from {where}" if value else "no locale",
            "UTF-8",
            "A command over ssh has no login shell, so profile files do not count.",
            source,
            f"LANG={(_best(names) if names else None) or _BUILT_IN} in /etc/environment (PAM "
            "reads it), or SetEnv in sshd_config",
        )
    accepts = any(
        words[0].lower() == "acceptenv" and {"LANG", "LC_*"} & set(words[1:]) for words in lines
    )
    if accepts and names is not None and normalised(_PREFERRED) not in names:
        yield Finding(
            CHECK,
            "ssh AcceptEnv",
            Verdict.WARN,
            f"the client's LANG is taken; {_PREFERRED} does not exist here",
            f"{_PREFERRED} generated",
            "The caller's locale wins over the machine's; if it does not exist here, ASCII does.",
            source,
            "generate it, as above",
        )


def _ssh_locale(facts: Facts, lines: list[list[str]]) -> tuple[str, str]:
    """The locale of a command over ssh whose client sends none, and who sets it."""
    for words in lines:
        if words[0].lower() == "setenv":
            value = _effective(parse_variables("\n".join(words[1:])))
            if value:
                return value, "SetEnv in sshd_config"
    pam = [
        line
        for line in (facts.text("/etc/pam.d/sshd") or "").splitlines()
        if "pam_env.so" in line and not line.lstrip().startswith("#")
    ]
    # Debian names its file of the locale; /etc/environment is what pam_env reads by itself.
    files = [word.partition("=")[2] for line in pam for word in line.split() if "envfile=" in word]
    for path in (*files, "/etc/environment"):
        value = _effective(parse_variables(facts.text(path) or ""))
        if value:
            return value, path
    if read_distribution(facts).family == RHEL and facts.text("/etc/profile.d/lang.sh"):
        # bash reads /etc/bashrc for ssh commands, and that reads profile.d.
        value = _effective(parse_variables(facts.text(_LOCALE_CONF) or ""))
        if value:
            return value, "/etc/profile.d/lang.sh (bash only)"
    return "", ""


def _own_finding(own: Mapping[str, str], names: frozenset[str] | None) -> Finding:
    value = _effective(own)
    subject, source = "this shell", "locale(7)"
    wanted = "a locale with UTF-8 that exists"
    if _is_good(value, names):
        reason = "What is started from here runs in UTF-8."
        return Finding(CHECK, subject, Verdict.OK, value, wanted, reason, source)
    reason = (
        "It does not exist here, so programs fall to ASCII."
        if value and is_utf8(value)
        else "Programs that are started from here run in the C locale or an old charset."
    )
    cure = f"export LC_ALL={(_best(names) if names else None) or _BUILT_IN}"
    return Finding(CHECK, subject, Verdict.WARN, value or "no locale", wanted, reason, source, cure)
