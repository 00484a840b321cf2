"""Text of an answer as it grows: UTF-8 safe, cut before stop strings, never a part of a stop string too early.

Tokens are pushed one at a time, so the cut does not depend on how many a step revealed. A character whose bytes are
spread over several tokens appears when it is whole; text that could be the beginning of a stop string is held back
until it is known not to be.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what a decoder shows for the bytes of an unfinished character
WINDOW = 16  # tokens decoded again with each push, at most about this many


class TextTracker:
    """The text of one answer. `text` holds whole characters only, until `finish`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: tuple[str, ...] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stops = stop_strings
        self._longest = max(map(len, stop_strings), default=0)
        self._tokens: list[int] = []
        self._start = 0  # the window of tokens that is decoded
        self._seen = 0  # characters of the window that are in `text`
        self._whole = 0  # no character straddles this token boundary
        self._taken = 0

    def push(self, token: int) -> bool:
        """Add a token; True when its text completes a stop string, which ends the text before it."""
        assert not self.stopped, "the text has ended"
        self._tokens.append(token)
        window = self._decode()
        whole = window.rstrip(REPLACEMENT)
        self._extend(whole)
        if whole == window:
            self._move_window()
        return self.stopped

    def take(self) -> str:
        """The text that became final since the last call."""
        end = len(self.text) - self._held_back()
        delta, self._taken = self.text[self._taken : end], max(end, self._taken)
        return delta

    def finish(self) -> None:
        """Nothing follows: unfinished characters show as replacement characters, nothing is held back any more."""
        if not self.stopped:
            self._extend(self._decode())
            self.stopped = True

    def _decode(self) -> str:
        text = self._tokenizer.decode(
            self._tokens[self._start :], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _extend(self, window: str) -> None:
        """Take over what the window shows beyond `_seen`, up to the first stop string."""
        if len(window) <= self._seen:
            return
        searched = max(0, len(self.text) - self._longest + 1)
        self.text += window[self._seen :]
        self._seen = len(window)
        found = [i for i in (self.text.find(stop, searched) for stop in self._stops) if i >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _move_window(self) -> None:
        """Start the window at the last boundary known to be whole, once it has grown long."""
        if len(self._tokens) - self._start > WINDOW:
            self._start = self._whole
            self._seen = len(self._decode())
        self._whole = len(self._tokens)

    def _held_back(self) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        if self.stopped:
            return 0
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stops):
                return length
        return 0
