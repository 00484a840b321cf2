"""Log-probabilities of an answer in OpenAI's two shapes, whole or piece by piece as the answer streams.

There is one entry for each token of the answer, the stop token included: as many as `usage.completion_tokens`. A token
that holds a part of a character has no text of its own; OpenAI writes its bytes, `bytes:\\xf0\\x9f`, and so does this.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from actors.protocol.calls import Kind
from model.decoding import TokenLogprob
from model.decoding.text import REPLACEMENT

Tokens = Sequence[int]
Logprobs = Sequence[TokenLogprob]
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece vocabularies write a single byte
WORD_START = "\u2581"  # and a space before a word


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """The UTF-8 bytes that a token stands for, a part of a character at times; b"" for an id that names no token."""
    written = tokenizer.convert_ids_to_tokens(token)
    if written is None:
        return b""
    text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    if REPLACEMENT not in text:
        lost_space = written.startswith(WORD_START) and not text.startswith(" ")
        return f" {text}".encode() if lost_space else text.encode()
    if single := BYTE_TOKEN.fullmatch(written):
        return bytes.fromhex(single[1])
    if all(character in _bytes_of_characters() for character in written):
        return bytes(_bytes_of_characters()[character] for character in written)
    return text.encode()


def token_text(token: int, data: bytes) -> str:
    """What a client reads: the text, the bytes of a part of a character, or the id where there is neither."""
    try:
        return data.decode() or f"token_id:{token}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@lru_cache(maxsize=1)
def _bytes_of_characters() -> dict[str, int]:
    """How byte-level vocabularies write each byte, the other way round."""
    return {character: byte for byte, character in bytes_to_unicode().items()}


class LogprobWriter:
    """One answer's log-probabilities. For a completion it counts where in the text each token begins."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kind: Kind) -> None:
        self._tokenizer = tokenizer
        self._kind = kind
        self._special = frozenset(tokenizer.all_special_ids)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, token_ids: Tokens, logprobs: Logprobs) -> dict[str, Any]:
        """The `logprobs` object of the next tokens of the answer."""
        return self._chat(token_ids, logprobs) if self._kind == "chat" else self._completion(token_ids, logprobs)

    def _chat(self, token_ids: Tokens, logprobs: Logprobs) -> dict[str, Any]:
        content = [
            {**self._entry(token, one.logprob), "top_logprobs": [self._entry(*top) for top in one.top]}
            for token, one in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(self._tokenizer, token)
        return {"token": token_text(token, data), "logprob": logprob, "bytes": list(data)}

    def _completion(self, token_ids: Tokens, logprobs: Logprobs) -> dict[str, Any]:
        """`top_logprobs` holds the chosen token too, as OpenAI's does."""
        both = list(zip(token_ids, logprobs, strict=True))
        return {
            "tokens": [self._text(token) for token in token_ids],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [
                dict([*((self._text(t), p) for t, p in one.top), (self._text(token), one.logprob)])
                for token, one in both
            ],
            "text_offset": [self._begin(token) for token in token_ids],
        }

    def _text(self, token: int) -> str:
        return token_text(token, token_bytes(self._tokenizer, token))

    def _begin(self, token: int) -> int:
        """Where the token begins, in characters of the text; special tokens take no room in it."""
        begin = self._offset
        if token not in self._special:
            self._offset += len(self._characters.decode(token_bytes(self._tokenizer, token)))
        return begin
