"""Reads replies with the parsers of the library renderers, and asks its bridges: cases as JSON in, answers as JSON out.

A case is {"renderer", "text", "tools"}; the answer is [status, name, arguments] of each call. With "prompt" and "messages"
the answer is the text of the next prompt, the reply in it as it was sampled; null where the bridge refuses. It
takes earlier thinking as kept, as our context is that only grows.
"""

import json
import re
import sys

from renderers import config_from_name, create_renderer


class Characters:
    """A tokenizer whose tokens are characters, and whatever mark a renderer asks for."""

    unk_token_id, unk_token = -1, "�"
    eos_token_id, name_or_path = 0x110000 - 1, "characters"

    def __init__(self):
        self.marks = {}

    def convert_tokens_to_ids(self, tokens):
        if isinstance(tokens, str):
            return self.marks.setdefault(tokens, 0x110000 + len(self.marks))
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def encode(self, text, add_special_tokens=False, **options):
        for mark in re.findall(r"<｜[^｜<>]*｜>", text):
            self.convert_tokens_to_ids(mark)
        ids, marks = [], sorted(self.marks, key=len, reverse=True)
        while text:
            mark = next((mark for mark in marks if text.startswith(mark)), text[0])
            ids.append(self.marks.get(mark, ord(text[0])))
            text = text[len(mark) :]
        return ids

    def decode(self, ids, skip_special_tokens=False, **options):
        names = {number: mark for mark, number in self.marks.items()}
        return "".join("" if skip_special_tokens and i in names else names.get(i) or chr(i) for i in ids)


def main():
    """Answers all cases."""
    readers, found = {}, []
    for case in json.load(sys.stdin):
        name = case["renderer"]
        if name not in readers:
            tokenizer = Characters()
            known = type(config_from_name(name))
            config = known(thinking_retention="all") if "prompt" in case else known()
            readers[name] = tokenizer, create_renderer(tokenizer, config)
        tokenizer, renderer = readers[name]
        if "prompt" in case:
            sampled = [tokenizer.encode(case[name]) for name in ("prompt", "text")]
            bridged = renderer.bridge_to_next_turn(*sampled, case["messages"], tools=case["tools"])
            found.append(None if bridged is None else tokenizer.decode(bridged.token_ids))
            continue
        parsed = renderer.parse_response(tokenizer.encode(case["text"]), tools=case["tools"])
        found.append([[str(call.status), call.name, call.arguments] for call in parsed.tool_calls])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
