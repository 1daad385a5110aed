"""Token ids to text, piece by piece, never cutting a character in two. Pure.

Theory of operation: the text of the last few tokens (the *window*) is decoded again with each
push. Trailing U+FFFD may be the beginning of a character whose rest is still to come, so they
are held back; the text before them is final. Once the window's text is complete the window
moves on, one step behind, so that decoders which treat the first token of a text differently
see some context.
"""

from collections.abc import Callable, Sequence
from typing import Final

_REPLACEMENT: Final = "�"
# A character has at most four bytes, so it spans at most four tokens: past this many, a clean
# border near the end of the window must exist, and the window is cut there.
_MAX_WINDOW_TOKENS: Final = 16
_MAX_CHARACTER_TOKENS: Final = 4


class Detokenizer:
    """One sequence's text. The pieces returned, joined, are ``detokenize(all token ids)``.

    `detokenize` maps token ids to text, skipping special tokens.
    """

    def __init__(self, detokenize: Callable[[Sequence[int]], str]) -> None:
        self._detokenize = detokenize
        self._window: list[int] = []
        self._num_context_tokens = 0
        # Characters of the window's text that were returned before.
        self._num_returned_chars = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that became final with `token_ids`, possibly empty."""
        self._window.extend(token_ids)
        text = self._detokenize(self._window)
        stable = text.rstrip(_REPLACEMENT)
        piece = stable[self._num_returned_chars :]
        # max: a decoder that drops trailing blanks may shorten the text; never return it twice.
        self._num_returned_chars = max(self._num_returned_chars, len(stable))
        if len(stable) == len(text):
            self._move_window()
        elif len(self._window) > _MAX_WINDOW_TOKENS:
            piece += self._cut_window(text)
        return piece

    def flush(self) -> str:
        """Return what was held back; the sequence has ended."""
        piece = self._detokenize(self._window)[self._num_returned_chars :]
        self._num_returned_chars += len(piece)
        return piece

    def _move_window(self) -> None:
        """Drop the old context; the tokens since then become the new one."""
        self._window = self._window[self._num_context_tokens :]
        self._num_context_tokens = len(self._window)
        self._num_returned_chars = len(self._detokenize(self._window))

    def _cut_window(self, text: str) -> str:
        """Cut a window that does not become complete; return the text that is final thereby.

        Decoding the two sides of a border apart gives the same text as together only if no
        character, whole or broken, spans it. Such a border stays clean whatever follows.
        """
        for num_tail_tokens in range(1, _MAX_CHARACTER_TOKENS + 1):
            head = self._detokenize(self._window[:-num_tail_tokens])
            tail = self._detokenize(self._window[-num_tail_tokens:])
            # An empty tail holds special tokens only, and a character may well span those.
            if tail and head + tail == text:
                piece = head[self._num_returned_chars :]
                self._window = self._window[-num_tail_tokens:]
                self._num_context_tokens = 0
                self._num_returned_chars = max(self._num_returned_chars - len(head), 0)
                return piece
        return ""
