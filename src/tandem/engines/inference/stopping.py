"""Stop strings: text is made from tokens only for requests that have some, and only as much as is new."""

from transformers import PreTrainedTokenizerBase

UNFINISHED = "�"
"""The character to which a tokenizer decodes the first bytes of a character."""


class StopText:
    """Watches the text of one completion for strings that end it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]):
        self._tokenizer = tokenizer
        self._stop = stop
        self._overlap = max(len(string) for string in stop) - 1
        self._tokens: list[int] = []
        self._read = 0
        """Tokens whose text was looked at and ended in a whole character."""

        self._context = 0
        """First token that is decoded: some before the new ones, since a tokenizer may write the first one differently."""

        self._tail = ""

    def add(self, token: int) -> bool:
        """Takes one token; True when a stop string has appeared."""
        self._tokens.append(token)
        known = self._decode(self._context, self._read)
        text = self._decode(self._context, len(self._tokens))
        new = self._tail + text[len(known) :]
        if any(string in new for string in self._stop):
            return True
        if not text.endswith(UNFINISHED):
            self._tail = new[-self._overlap :] if self._overlap else ""
            self._context, self._read = self._read, len(self._tokens)
        return False

    def _decode(self, start: int, stop: int) -> str:
        return str(self._tokenizer.decode(self._tokens[start:stop], skip_special_tokens=False))
