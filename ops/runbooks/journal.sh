# shellcheck shell=bash
# journal.sh: what the runbooks share. Sourced by them, never run by itself.
#
# A runbook names its concern, defines check (prints findings) and, if it changes something,
# changes (calls want_file, want_value, want_command), and ends with: run_verb "$@"
#
#   check     look and judge; exit code 1 if something is wrong
#   plan      show what apply would change; changes nothing
#   apply     save the originals, then change; asks unless --yes; a second time it changes nothing
#   verify    compare with what apply makes; exit code 1 if something differs
#   rollback  put back what was there before; asks unless --yes
#
# Exit codes: 0 all is well, 1 something is wrong or was not done, 2 wrong usage.
#
# ROOT=/some/tree works on the files below that folder: an image, a mounted disk, a test. The tools
# of this system are not asked then, because they tell about this machine; ROOT_TOOLS=yes asks them
# all the same, which is right in a container on the host's network with the host's tree in ROOT.
#
# How a change survives a kill: before anything is touched, the original is copied and a line is
# added to the journal, both whole or not at all; only then the new file is moved into place. So
# whatever the moment, rollback finds in the journal everything that may have been touched.
# Works with bash 4.2 (CentOS 7): no namerefs, no expansion of empty arrays.

ROOT=${ROOT:-}
ROOT=${ROOT%/}
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
STATE=$ROOT/var/lib/pdserve-runbooks/${CONCERN:?}
JOURNAL=$STATE/journal
VERB=
MODE=
ANSWER_IS_YES=no
IS_FORCED=no
NUM_FAILS=0
NUM_CHANGES=0
PEERS=

# --- saying -------------------------------------------------------------------------------------

stop() {
    printf '%s: %s\n' "$CONCERN" "$*" >&2
    exit 1
}

usage() {
    printf 'usage: %s %s\n' "$(basename "$0")" "$1" >&2
    exit 2
}

# finding VERDICT SUBJECT MEASURED WANTED REASON [CURE]
finding() {
    local line="$1 $CONCERN $2: ${3:-nothing}"
    if [ -n "$4" ]; then line="$line (wanted $4)"; fi
    line="$line: $5."
    if [ -n "${6:-}" ]; then line="$line $6."; fi
    printf '%s\n' "$line"
    if [ "$1" = FAIL ]; then NUM_FAILS=$((NUM_FAILS + 1)); fi
}

# --- looking ------------------------------------------------------------------------------------

# text PATH: the whole file
text() {
    cat "$ROOT$1" 2>/dev/null || return 1
}

# value PATH: the first line of a kernel file, tabs as blanks
value() {
    local line=
    line=$(raw_value "$1") || return 1
    printf '%s\n' "${line//$'\t'/ }"
}

raw_value() {
    local line=
    { IFS= read -r line <"$ROOT$1"; } 2>/dev/null || [ -n "$line" ] || return 1
    printf '%s\n' "$line"
}

# has_tool NAME: may the tool be asked?
has_tool() {
    if [ -n "$ROOT" ] && [ "${ROOT_TOOLS:-no}" != yes ]; then return 1; fi
    command -v "$1" >/dev/null 2>&1
}

# ask NAME ARGUMENTS...: what a tool prints; 127 if it is not here. No tool may hang the check.
ask() {
    has_tool "$1" || return 127
    LC_ALL=C timeout 3 "$@" 2>/dev/null </dev/null
}

# in_root COMMAND...: run where the changes are made
in_root() {
    if [ -z "$ROOT" ]; then "$@" 9>&-; else chroot "$ROOT" "$@" 9>&-; fi
}

# os_release KEY: a value of /etc/os-release, which is read and not run
os_release() {
    local line
    line=$(text /etc/os-release | grep "^$1=" | head -n 1) || return 0
    line=${line#*=}
    line=${line%\"}
    printf '%s\n' "${line#\"}"
}

# family: debian, rhel, or nothing if the distribution is not one we know
family() {
    local word
    for word in $(os_release ID) $(os_release ID_LIKE); do
        case $word in
        debian | ubuntu) printf 'debian\n' && return ;;
        rhel | centos | rocky | almalinux | fedora) printf 'rhel\n' && return ;;
        esac
    done
}

is_number() {
    case $1 in '' | *[!0-9]*) return 1 ;; esac
}

# --- the journal --------------------------------------------------------------------------------

add_entry() {
    {
        if [ -e "$JOURNAL" ]; then cat "$JOURNAL"; fi
        printf '%s\t%s\t%s\n' "$1" "$2" "$3"
    } >"$JOURNAL.new"
    settle "$JOURNAL.new"
    mv -f "$JOURNAL.new" "$JOURNAL"
}

# settle FILE: on the disk before we go on, so that a power cut cannot turn the order around
settle() {
    if [ -z "$ROOT" ]; then sync "$1" 2>/dev/null || sync; fi
}

has_entry() {
    [ -e "$JOURNAL" ] && awk -F '\t' -v kind="$1" -v path="$2" \
        '$1 == kind && $2 == path { found = 1 } END { exit !found }' "$JOURNAL"
}

open_journal() {
    [ -d "$ROOT/var/lib" ] || stop "$ROOT/var/lib is not there; is ROOT the right folder?"
    local error
    error=$(mkdir -p "$STATE/originals" 2>&1) ||
        stop "cannot keep the originals: $error. Nothing was changed"
    chmod 700 "$ROOT/var/lib/pdserve-runbooks" "$STATE"
    hold_lock
}

# One run at a time; the lock ends with the process, however it ends.
hold_lock() {
    command -v flock >/dev/null 2>&1 || return 0
    exec 9>"$STATE/lock"
    flock -n 9 || stop "another run works on $CONCERN; wait for it"
}

need_root() {
    if [ -z "$ROOT" ] && [ "$(id -u)" -ne 0 ]; then
        stop "$VERB changes this machine and needs root; run it with sudo. Nothing was changed"
    fi
}

digest() {
    sha256sum | cut -d ' ' -f 1
}

# real_path PATH: where a symbolic link at PATH leads, inside ROOT
real_path() {
    local path=$1 target turn
    for turn in 1 2 3 4 5 6 7 8; do
        [ -L "$ROOT$path" ] || break
        target=$(readlink "$ROOT$path")
        case $target in
        /*) path=$target ;;
        *) path=$(dirname "$path")/$target ;;
        esac
    done
    [ "$turn" -lt 8 ] || stop "$1 is a link that leads to links without end"
    printf '%s\n' "$path"
}

# make_folder PATH: with its parents, each noted in the journal
make_folder() {
    if [ -d "$ROOT$1" ]; then return 0; fi
    make_folder "$(dirname "$1")"
    add_entry folder "$1" -
    local error
    error=$(mkdir "$ROOT$1" 2>&1) || stop_halfway "cannot make the folder $ROOT$1: ${error##*: }"
}

stop_halfway() {
    stop "$*. What was done before is kept; take it back with: $0 rollback"
}

# save_file PATH KIND: copy the original and note it, once. KIND is file for one that we write, so
# that we know later what is ours, and touched for one that a command writes.
save_file() {
    if has_entry "$2" "$1"; then return 0; fi
    if [ ! -e "$ROOT$1" ]; then
        add_entry "$2" "$1" absent
        return
    fi
    local number=0
    while [ -e "$STATE/originals/$number" ]; do number=$((number + 1)); done
    cp -a "$ROOT$1" "$STATE/originals/$number" || stop_halfway "cannot save $ROOT$1"
    settle "$STATE/originals/$number"
    add_entry "$2" "$1" "$number"
}

# --- wanting: what is done depends on MODE, which is plan, apply or verify ------------------------

# want_file PATH TEXT REASON: the whole file shall be TEXT and a newline
want_file() {
    local path file error
    path=$(real_path "$1")
    file=$ROOT$path
    if [ -f "$file" ] && printf '%s\n' "$2" | cmp -s - "$file"; then
        if [ "$MODE" = verify ]; then finding OK "$path" "as applied" "" "$3"; fi
        return 0
    fi
    NUM_CHANGES=$((NUM_CHANGES + 1))
    case $MODE in
    verify) finding FAIL "$path" "differs" "as applied" "$3" "See what: $0 plan" ;;
    plan)
        printf '# %s\n' "$3"
        local old=$file
        [ -f "$file" ] || old=/dev/null
        printf '%s\n' "$2" | diff -u --label "$path" --label "$path (planned)" "$old" - || true
        ;;
    apply)
        make_folder "$(dirname "$path")"
        save_file "$path" file
        add_entry wrote "$path" "$(printf '%s\n' "$2" | digest)"
        # The copy brings owner, mode and security label of the file that is replaced.
        if [ -f "$file" ]; then error=$(cp -a "$file" "$file.pdserve-new" 2>&1) ||
            stop_halfway "cannot write beside $file: $error"; fi
        error=$( (printf '%s\n' "$2" >"$file.pdserve-new") 2>&1) ||
            stop_halfway "cannot write $file.pdserve-new: ${error##*: }"
        settle "$file.pdserve-new"
        mv -f "$file.pdserve-new" "$file" || stop_halfway "cannot replace $file"
        printf 'wrote %s\n' "$path"
        ;;
    esac
}

# want_value PATH VALUE REASON: a value of the running kernel, below /proc/sys or /sys
want_value() {
    local now
    now=$(value "$1") || return 0 # this kernel does not have it, or ROOT is not running
    if [ "$now" = "$2" ] || [ "$(chosen "$now")" = "$2" ]; then
        if [ "$MODE" = verify ]; then finding OK "$1" "$now" "" "$3"; fi
        return 0
    fi
    NUM_CHANGES=$((NUM_CHANGES + 1))
    case $MODE in
    verify) finding FAIL "$1" "$now" "$2" "$3" "Apply again: $0 apply" ;;
    plan) printf '# %s\n%s: %s -> %s\n' "$3" "$1" "$now" "$2" ;;
    apply)
        has_entry value "$1" || add_entry value "$1" "$(raw_value "$1")"
        write_value "$1" "$2" ||
            stop_halfway "cannot write $ROOT$1 (in a container it may be read-only)"
        printf 'set %s to %s\n' "$1" "$2"
        ;;
    esac
}

# chosen TEXT: the word in brackets, as in "always [madvise] never"
chosen() {
    local rest=${1#*\[}
    case $1 in *\[*\]*) printf '%s\n' "${rest%%\]*}" ;; esac
}

# restore_value PATH TEXT: make it show TEXT again. From a list the kernel takes the chosen word.
restore_value() {
    local word
    word=$(chosen "$2")
    if [ -n "$word" ] && write_value "$1" "$word" && [ "$(raw_value "$1")" = "$2" ]; then
        return 0
    fi
    write_value "$1" "$2"
}

write_value() {
    (printf '%s\n' "$2" >"$ROOT$1") 2>/dev/null
}

# want_command FILE REASON COMMAND...: COMMAND, which makes or changes FILE. The caller knows that it
# is needed; once FILE was made by us, verify is content.
want_command() {
    local path=$1 reason=$2
    shift 2
    NUM_CHANGES=$((NUM_CHANGES + 1))
    case $MODE in
    verify) finding FAIL "$path" "not made" "made by $*" "$reason" "Apply again: $0 apply" ;;
    plan) printf '# %s\nrun: %s\n' "$reason" "$*" ;;
    apply)
        make_folder "$(dirname "$path")"
        save_file "$path" touched
        in_root "$@" || stop_halfway "this failed: $*"
        printf 'ran %s\n' "$*"
        ;;
    esac
}

# --- taking back --------------------------------------------------------------------------------

# is_ours PATH: what is there now is what we wrote or what was there before; nobody edited it since
is_ours() {
    local now original
    if [ ! -e "$ROOT$1" ]; then return 0; fi
    now=$(digest <"$ROOT$1")
    if grep -q -F -x -e "$(printf 'wrote\t%s\t%s' "$1" "$now")" "$JOURNAL"; then return 0; fi
    original=$(awk -F '\t' -v path="$1" '$1 == "file" && $2 == path { print $3 }' "$JOURNAL")
    [ "$original" != absent ] && [ "$(digest <"$STATE/originals/$original")" = "$now" ]
}

put_back() {
    local kind=$1 path=$2 original=$3
    case $kind in
    file | touched)
        if [ "$original" = absent ]; then
            rm -f "$ROOT$path" "$ROOT$path.pdserve-new"
        else
            cp -a "$STATE/originals/$original" "$ROOT$path.pdserve-new" &&
                mv -f "$ROOT$path.pdserve-new" "$ROOT$path" || return 1
        fi
        ;;
    value)
        if ! restore_value "$path" "$original"; then
            printf '%s: cannot set %s back to %s\n' "$CONCERN" "$path" "$original" >&2
            return 1
        fi
        ;;
    folder) if [ -d "$ROOT$path" ]; then rmdir "$ROOT$path" 2>/dev/null || return 0; fi ;;
    package) remove_package "$path" ;;
    *) return 0 ;;
    esac
    printf 'put back %s\n' "$path"
}

drop_state() {
    rm -f "$JOURNAL" # first: without it the rest means nothing
    rm -rf "$STATE"
    rmdir "$ROOT/var/lib/pdserve-runbooks" 2>/dev/null || true
}

roll_back() {
    if [ ! -e "$JOURNAL" ]; then
        # An apply that was killed before it touched anything, or a rollback just before its end.
        if [ -d "$ROOT/var/lib/pdserve-runbooks" ] && [ -w "$ROOT/var/lib" ]; then drop_state; fi
        printf '%s: nothing to roll back\n' "$CONCERN"
        return
    fi
    need_root
    local kind path original edited=
    while IFS=$'\t' read -r kind path original; do
        if [ "$kind" = file ] && ! is_ours "$path"; then edited="$edited $path"; fi
    done <"$JOURNAL"
    if [ -n "$edited" ] && [ "$IS_FORCED" = no ]; then
        stop "somebody has edited$edited since; look at it, then: $0 rollback --force"
    fi
    while IFS=$'\t' read -r kind path original; do
        case $kind in
        value) printf 'will set %s back to %s\n' "$path" "$original" ;;
        file | touched | package) printf 'will put back %s\n' "$path" ;;
        esac
    done <"$JOURNAL"
    confirm
    hold_lock
    local reversed
    reversed=$(tac "$JOURNAL")
    while IFS=$'\t' read -r kind path original; do
        put_back "$kind" "$path" "$original" || NUM_FAILS=$((NUM_FAILS + 1))
    done <<<"$reversed"
    if [ "$NUM_FAILS" -gt 0 ]; then stop "$NUM_FAILS not put back; the journal is kept"; fi
    drop_state
}

# --- the verbs ----------------------------------------------------------------------------------

confirm() {
    local answer=
    if [ "$ANSWER_IS_YES" = yes ]; then return 0; fi
    printf 'Go on? [y/N] '
    read -r answer || true
    case $answer in
    y | Y | yes) ;;
    *) stop "not confirmed. Nothing was changed" ;;
    esac
}

# Overridden by a runbook whose changes count only later.
needs() { :; }
prepare() { :; }
remove_package() { :; }

apply_changes() {
    need_root
    MODE=plan
    changes
    if [ "$NUM_CHANGES" -eq 0 ]; then
        printf '%s: nothing to change\n' "$CONCERN"
        return
    fi
    confirm
    open_journal
    MODE=apply
    prepare
    changes
    MODE=verify
    changes
    needs
}

count_changes() {
    MODE=plan
    changes
    if [ "$NUM_CHANGES" -eq 0 ]; then
        printf '%s: nothing to change\n' "$CONCERN"
    else
        printf '%s: %d to change; do it with: %s apply\n' "$CONCERN" "$NUM_CHANGES" "$0"
        needs
    fi
}

# run_verb VERBS ARGUMENTS...: VERBS are those that the runbook has, joined by |
run_verb() {
    local verbs=$1
    shift
    while [ $# -gt 0 ]; do
        case $1 in
        --yes) ANSWER_IS_YES=yes ;;
        --force) IS_FORCED=yes ;;
        --peer)
            [ $# -gt 1 ] || usage "$verbs [--peer ADDRESS]..."
            PEERS="$PEERS $2"
            shift
            ;;
        -*) usage "$verbs [--yes] [--force]" ;;
        *)
            [ -z "$VERB" ] || usage "$verbs [--yes] [--force]"
            VERB=$1
            ;;
        esac
        shift
    done
    case "|$verbs|" in
    *"|$VERB|"*) [ -n "$VERB" ] || usage "$verbs [--yes] [--force]" ;;
    *) usage "$verbs [--yes] [--force]" ;;
    esac
    if [ -n "$ROOT" ] && [ ! -d "$ROOT" ]; then stop "ROOT=$ROOT is not a folder"; fi
    case $VERB in
    check) check ;;
    plan) count_changes ;;
    apply) apply_changes ;;
    verify)
        MODE=verify
        changes
        ;;
    rollback) roll_back ;;
    esac
    if [ "$NUM_FAILS" -gt 0 ]; then exit 1; fi
}
