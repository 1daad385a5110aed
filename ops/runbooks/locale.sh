#!/usr/bin/env bash
# locale.sh: UTF-8 for logins, for services and for Python, not only for this shell.
#
#   locale.sh check | plan | apply [--yes] | verify | rollback [--yes]
#   locale.sh explain 'a line of a log'      what an encoding error means and what cures it
set -eu
CONCERN="locale"
# The journal asks tools in the C locale; what this shell has is looked at first.
SHELL_LOCALE=${LC_ALL:-${LC_CTYPE:-${LANG:-}}}
# shellcheck source=ops/runbooks/journal.sh
. "$(dirname "${BASH_SOURCE[0]}")/journal.sh"

PREFERRED=en_US.UTF-8
BUILT_IN=C.UTF-8
DROP_IN=/etc/systemd/system.conf.d/90-pdserve.conf
ARCHIVE=/usr/lib/locale/locale-archive

# normal NAME: one spelling; glibc takes en_US.UTF-8 and en_US.utf8 alike
normal() {
    sed 's/\(\..*\)/\L\1/; s/[.]utf-8/.utf8/' <<<"$1"
}

is_utf8() {
    case $(normal "$1") in *.utf8 | *.utf8@*) ;; *) return 1 ;; esac
}

# names: the locales that exist, one a line; nothing if that cannot be seen
names() {
    local name
    if name=$(ask locale -a); then
        while read -r name; do normal "$name"; done <<<"$name"
    elif [ ! -e "$ROOT$ARCHIVE" ]; then
        for name in "$ROOT"/usr/lib/locale/*; do
            if [ -d "$name" ]; then normal "$(basename "$name")"; fi
        done
    elif [ "$(family)" = rhel ] && [[ $(os_release VERSION_ID) = 7* ]]; then
        normal "$PREFERRED" # the archive that glibc-common brings has it
    fi
}

NAMES=$(names)

exists() {
    grep -q -x -F -e "$(normal "$1")" <<<"$NAMES"
}

is_good() {
    is_utf8 "$1" && { [ -z "$NAMES" ] || exists "$1"; }
}

best() {
    local name
    for name in "$PREFERRED" "$BUILT_IN"; do
        if exists "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
}

# variable FILE NAME: the last value that the file gives it, without quotes
variable() {
    text "$1" | sed -n "s/^[[:space:]]*\(export[[:space:]]\{1,\}\)\{0,1\}$2=//p" | tail -n 1 |
        sed "s/[[:space:]]*$//; s/^\([\"']\)\(.*\)\1$/\2/"
}

# effective FILE: the locale that it means; the first that is set decides, see locale(7)
effective() {
    local name found
    for name in LC_ALL LC_CTYPE LANG; do
        found=$(variable "$1" "$name")
        if [ -n "$found" ]; then
            printf '%s\n' "$found"
            return
        fi
    done
}

# default_files: those that set the default; newer Debian links the old name to the new one
default_files() {
    if [ -e "$ROOT/etc/locale.conf" ]; then printf '/etc/locale.conf\n'; fi
    if [ -e "$ROOT/etc/default/locale" ] && [ ! -L "$ROOT/etc/default/locale" ]; then
        printf '/etc/default/locale\n'
    fi
}

has_systemd() {
    [ -e "$ROOT/etc/systemd/system.conf" ] || [ -d "$ROOT/run/systemd/system" ]
}

# service_python_utf8: PYTHONUTF8 as systemd's files give it to services
service_python_utf8() {
    local file found=
    for file in "$ROOT"/etc/systemd/system.conf "$ROOT"/etc/systemd/system.conf.d/*.conf; do
        if [ -f "$file" ] && grep -q '^[[:space:]]*DefaultEnvironment=.*PYTHONUTF8=' "$file"; then
            found=$(sed -n 's/^[[:space:]]*DefaultEnvironment=.*PYTHONUTF8=\([0-9]*\).*/\1/p' "$file")
        fi
    done
    printf '%s\n' "$found"
}

ask_python() {
    ask env -u LC_ALL -u LC_CTYPE -u LANG -u PYTHONUTF8 -u PYTHONIOENCODING "$@" python3 -c \
        'import locale, sys
print(sys.getfilesystemencoding(), sys.stdout.encoding, locale.getpreferredencoding(False))'
}

check() {
    local file found files utf8 shown
    if exists "$PREFERRED"; then
        finding OK generated "$PREFERRED" "" "programs that are told this locale find it"
    elif exists "$BUILT_IN"; then
        finding WARN generated "$BUILT_IN only" "$PREFERRED" \
            "an ssh client that sends its LANG gets ASCII where that locale does not exist" \
            "$0 apply"
    elif [ -n "$NAMES" ]; then
        finding FAIL generated "no locale with UTF-8" "$PREFERRED or $BUILT_IN" \
            "every program falls back to ASCII and fails at the first other character" \
            "packages.sh apply, then $0 apply"
    else
        finding UNKNOWN generated "" "$PREFERRED or $BUILT_IN" \
            "locale -a cannot be asked and the archive cannot be read without it"
    fi
    files=$(default_files)
    if [ -z "$files" ]; then
        finding WARN default "no file sets it" "$PREFERRED or $BUILT_IN" \
            "logins and services start in the C locale" "$0 apply"
    fi
    for file in $files; do
        found=$(effective "$file")
        if is_good "$found"; then
            finding OK default "$found in $file" "" "logins and services start in UTF-8"
        else
            finding "$([ -n "$found" ] && printf FAIL || printf WARN)" default \
                "${found:-nothing} in $file" "$PREFERRED or $BUILT_IN" \
                "programs start in the C locale or an old charset, not in UTF-8" "$0 apply"
        fi
    done
    utf8=$(service_python_utf8)
    case $utf8 in
    1) finding OK "PYTHONUTF8 in a service" 1 "" "Python uses UTF-8 whatever the locale" ;;
    0) finding FAIL "PYTHONUTF8 in a service" 0 1 "it turns Python's UTF-8 mode off" "$0 apply" ;;
    *) finding WARN "PYTHONUTF8 in a service" "not set" 1 \
        "a library that opens a file without an encoding reads it in the locale's" \
        "$0 apply, or Environment=PYTHONUTF8=1 in the unit" ;;
    esac
    if shown=$(ask_python ${utf8:+PYTHONUTF8="$utf8"}); then
        if [ "$(tr '[:upper:]' '[:lower:]' <<<"${shown//-/}")" = "utf8 utf8 utf8" ]; then
            finding OK "python in a service" "$shown" "" "file names, streams, open()"
        else
            finding FAIL "python in a service" "$shown" "utf-8 for all three" \
                "file names, streams, open() of a service without a locale" "$0 apply"
        fi
    else
        finding UNKNOWN "python in a service" "" "utf-8" "python3 cannot be asked here"
    fi
    if [ -z "$ROOT" ]; then
        if is_good "$SHELL_LOCALE"; then
            finding OK "this shell" "$SHELL_LOCALE" "" "what is started from here runs in UTF-8"
        else
            finding WARN "this shell" "${SHELL_LOCALE:-no locale}" "UTF-8" \
                "programs started from here run in ASCII or an old charset" \
                "export LC_ALL=$(best | grep . || printf '%s' "$BUILT_IN")"
        fi
    fi
}

# generated_text: locale.gen with our locale's line active
generated_text() {
    text /etc/locale.gen | awk -v wanted="$PREFERRED UTF-8" '
        {
            line = $0
            sub(/^[# \t]+/, "", line)
            sub(/[ \t]+$/, "", line)
            if (line == wanted && !is_done) { print wanted; is_done = 1 } else print
        }
        END { if (!is_done) print wanted }'
}

# default_text FILE LANG: the file with LANG set, its other good lines kept
default_text() {
    local file=$1 wanted=$2 line name is_set=no
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in
        LC_ALL=* | LC_CTYPE=*)
            name=${line%%=*}
            if is_good "$(variable "$file" "$name")"; then printf '%s\n' "$line"; fi
            ;;
        LANG=*)
            if [ "$is_set" = no ]; then
                if is_good "$(variable "$file" LANG)"; then
                    printf '%s\n' "$line"
                else
                    printf 'LANG=%s\n' "$wanted"
                fi
            fi
            is_set=yes
            ;;
        *) printf '%s\n' "$line" ;;
        esac
    done < <(text "$file" || true)
    if [ "$is_set" = no ]; then printf 'LANG=%s\n' "$wanted"; fi
}

changes() {
    local file files wanted
    if [ -n "$NAMES" ] && ! exists "$PREFERRED" && [ -e "$ROOT/etc/locale.gen" ]; then
        want_file /etc/locale.gen "$(generated_text)" \
            "locale-gen makes $PREFERRED now and after every update of the C library"
        want_command "$ARCHIVE" "ssh clients ask for $PREFERRED" locale-gen
        if [ "$MODE" = apply ]; then NAMES=$(names); fi
        wanted=$PREFERRED
    else
        wanted=$(best)
    fi
    files=$(default_files)
    if [ -z "$files" ]; then
        case $(family) in
        debian) files=/etc/default/locale ;;
        rhel) files=/etc/locale.conf ;;
        *) stop "this distribution ($(os_release ID)) is not one we know; set LANG=$BUILT_IN by hand" ;;
        esac
    fi
    for file in $files; do
        if [ -z "$wanted" ]; then break; fi
        if [ "$MODE" = verify ] || ! is_good "$(effective "$file")"; then
            want_file "$file" "$(default_text "$file" "$wanted")" \
                "the default locale of logins and services is one with UTF-8 that exists"
        fi
    done
    if has_systemd && { [ -z "$(service_python_utf8)" ] || [ -e "$ROOT$DROP_IN" ]; }; then
        want_file "$DROP_IN" '# Written by pdserve (pdctl node, or ops/runbooks); its rollback takes it back.
[Manager]
DefaultEnvironment=PYTHONUTF8=1' "Python in every service uses UTF-8 whatever the locale"
    fi
}

needs() {
    printf 'locale: counts for new logins; for services: systemctl daemon-reexec, then restart them\n'
}

# explain LINE: the two classic errors, and what they come from
explain() {
    case $1 in
    *"codec can't decode byte"*)
        local codec byte
        codec=${1%%\' codec can\'t decode byte*}
        codec=${codec##*\'}
        byte=${1##*decode byte }
        byte=${byte%% *}
        printf 'Python read UTF-8 as if it were %s and met byte %s.\n' "$codec" "$byte"
        case $codec in
        ascii) printf 'The process has no UTF-8 locale: a service, cron or ssh command.\n' ;;
        gbk | gb2312 | cp936) printf 'The locale is a Chinese one with GBK, often sent by an ssh client.\n' ;;
        *) printf 'The locale of the process has the charset %s.\n' "$codec" ;;
        esac
        printf 'Cure: PYTHONUTF8=1 for the process; encoding="utf-8" where the file is opened;\n'
        printf 'for the machine: %s apply. (sys.setdefaultencoding was Python 2 and is gone.)\n' "$0"
        ;;
    *) stop "this is no encoding error that is known here" ;;
    esac
}

if [ "${1:-}" = explain ] && [ $# -eq 2 ]; then
    explain "$2"
    exit
fi
run_verb 'check|plan|apply|verify|rollback' "$@"
