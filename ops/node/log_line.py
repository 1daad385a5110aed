"""Why a log line about text and bytes was written, and what to do: ``pdctl node explain``."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_PYTHON_ERROR: Final = re.compile(
    r"'(?P<codec>[\w-]+)' codec can't (?P<verb>de|en)code "
    r"(?:bytes?|characters?)(?: (?P<what>0x[0-9a-fA-F]+|'[^']*'))?"
    r"(?: in position (?P<position>[\d-]+))?(?:: (?P<why>[^\n]*?))?\s*$",
    re.MULTILINE,
)
_NO_LOCALE: Final = re.compile(
    r"unsupported locale setting|cannot change locale|[Cc]annot set LC_\w+ to default locale"
)
_PYTHON_2: Final = re.compile(r"name 'reload' is not defined|has no attribute 'setdefaultencoding'")
_ASCII_NAMES: Final = frozenset({"ascii", "us-ascii", "ansi_x3.4-1968", "646"})
_UTF8_NAMES: Final = frozenset({"utf-8", "utf8", "utf_8"})
_CHINESE_NAMES: Final = frozenset({"gbk", "cp936", "gb2312", "gb18030", "big5", "cp950"})
# What is often met in UTF-8 behind the byte that is reported.
_GBK_BYTES: Final = {
    0x94: "the last of e2 80 94, a long dash: e2 and 80 make one character of gbk, 94 begins a "
    "second one that is none",
    0x99: "the last of e2 80 99, a curly apostrophe",
    0x9C: "the last of e2 80 9c, a curly quotation mark",
    0xA6: "the last of e2 80 a6, three dots in one character",
}
_FIRST_BYTES: Final = {
    0xC2: "the first of two bytes of UTF-8: a no-break space, a degree, copyright or pound sign",
    0xC3: "the first of two bytes of UTF-8: a letter with an accent",
    0xE2: "the first of three bytes of UTF-8: a dash, a curly quotation mark, three dots, a bullet",
    0xEF: "the first byte of a byte-order mark, or a full-width character",
    0xF0: "the first of four bytes of UTF-8: an emoji",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a line means.

    Attributes:
        line: the part of the log that was understood.
        cause: what happened.
        cure: what to do, in the order in which to try it.
        example: commands that show it.
    """

    line: str
    cause: str
    cure: str
    example: str

    def lines(self) -> tuple[str, ...]:
        """For a person."""
        return (
            f"line:  {self.line}",
            f"cause: {self.cause}",
            f"cure:  {self.cure}",
            f"see:   {self.example}",
        )


def explain(log: str) -> tuple[Explanation, ...]:
    """Every line of ``log`` that is known, each once; none if there is no such line."""
    found = [*_python_errors(log), *_other_lines(log)]
    return tuple(dict.fromkeys(found))


def _python_errors(log: str) -> Iterator[Explanation]:
    for match in _PYTHON_ERROR.finditer(log):
        line = match[0].strip()
        codec = match["codec"].lower()
        if match["verb"] == "de":
            what = match["what"] or ""
            byte = int(what, 16) if what.startswith("0x") else None
            yield _decoding(line, codec, byte)
        elif codec in _UTF8_NAMES:
            yield Explanation(
                line,
                "A text holds half a character (a surrogate): it came from a file name or an "
                "argument whose bytes are not UTF-8, read by a process that took them as such.",
                "Give the file a name in UTF-8, or write the text with errors='surrogateescape'.",
                "convmv -f gbk -t utf-8 FOLDER, or ls | cat -v",
            )
        else:
            yield Explanation(
                line,
                f"The process writes its output or a file in {codec}, which has no such "
                "character: its locale is not one with UTF-8.",
                "Set PYTHONUTF8=1 and LANG=C.UTF-8 for the process (Environment= in the unit of a "
                "service); in code, open(..., encoding='utf-8').",
                "pdctl node check",
            )


def _decoding(line: str, codec: str, byte: int | None) -> Explanation:
    see = "pdctl node check; locale; python3 -c 'import locale; print(locale.getencoding())'"
    if codec in _CHINESE_NAMES:
        note = _GBK_BYTES.get(byte or 0)
        return Explanation(
            line,
            f"The bytes are UTF-8 and were read as {codec}, the charset of the locale (or of a "
            "Chinese Windows): the file was opened without an encoding."
            + (f" Byte {byte:#04x} is {note}." if note else ""),
            "In code, open(..., encoding='utf-8'); for code that is not yours, PYTHONUTF8=1; for "
            "the machine, a locale with UTF-8 as the default. Only if the file really is Chinese "
            f"text in {codec}: encoding='gb18030'.",
            see,
        )
    if codec in _ASCII_NAMES:
        note = _FIRST_BYTES.get(byte or 0)
        return Explanation(
            line,
            "The process runs in the C or POSIX locale, where Python 2, or Python 3 with "
            "PYTHONUTF8=0, reads ASCII; services, cron and ssh commands start like that."
            + (f" Byte {byte:#04x} is {note}." if note else ""),
            "Set PYTHONUTF8=1 and LANG=C.UTF-8 for the process (Environment= in the unit of a "
            "service); in code, open(..., encoding='utf-8'). yum on CentOS 7 is Python 2: start it "
            "with LC_ALL=en_US.UTF-8.",
            see,
        )
    if codec in _UTF8_NAMES:
        return Explanation(
            line,
            "The reader is right and the bytes are not UTF-8: an older charset (gbk, latin-1), a "
            "compressed or binary file, or a file cut in the middle of a character.",
            "Find out what it is, convert it once, and keep it as UTF-8.",
            "file --mime-encoding FILE; iconv -f gb18030 -t utf-8 FILE > NEW",
        )
    return Explanation(
        line,
        f"The file was read as {codec}, the charset of the locale; the bytes are another one, "
        "most often UTF-8.",
        "In code, open(..., encoding='utf-8'); for code that is not yours, PYTHONUTF8=1.",
        see,
    )


def _other_lines(log: str) -> Iterator[Explanation]:
    for line in log.splitlines():
        if _NO_LOCALE.search(line):
            yield Explanation(
                line.strip(),
                "The process was told a locale that does not exist on this machine, often by an "
                "ssh client that sends its own; it goes on in the C locale.",
                "Generate it (pdctl node plan shows how), or use one of `locale -a`.",
                "locale -a; pdctl node check",
            )
        elif _PYTHON_2.search(line):
            yield Explanation(
                line.strip(),
                "reload(sys) and sys.setdefaultencoding are of Python 2; Python 3 has neither.",
                "Remove both lines; set PYTHONUTF8=1 and open files with encoding='utf-8'.",
                "grep -rn setdefaultencoding .",
            )
