"""Replies for tests of dialects, and a loopback server that answers an SDK with one of them."""

import contextlib
import json
import string
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hypothesis import strategies as st

from tandem.api.requests import StopReason
from tandem.protocol.turns import Call, Reply

USAGE = {"prompt_tokens": 11, "completion_tokens": 7}

NAMES = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=8)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
CALLS = st.lists(st.builds(Call, NAMES, st.dictionaries(NAMES, JSON, max_size=3)), max_size=3)


@st.composite
def replies(draw):
    """A reply with any of text, thinking and calls, whose ids are its own."""
    calls = tuple(replace(call, call_id=f"call_{number}") for number, call in enumerate(draw(CALLS)))
    reason = draw(st.sampled_from([StopReason.STOP, StopReason.LENGTH]))
    return Reply(draw(WORDS), draw(WORDS), calls, reason)


def results_of(reply):
    """A result for each of its calls, as messages of a chat template."""
    return [
        {"role": "tool", "tool_call_id": call.call_id, "name": call.name, "content": f"result {number}"}
        for number, call in enumerate(reply.good_calls)
    ]


@contextlib.contextmanager
def answering(dialect):
    """A loopback server of one dialect that gives ``state['reply']``; yields the state, with its ``url``."""
    state = {"reply": None, "bodies": []}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state["bodies"].append(body)
            turn = dialect.read(body)
            made = turn, state["reply"]
            facts = {"response_id": f"r_{len(state['bodies'])}", "model": body["model"], "usage": USAGE}
            if turn.stream:
                kind, raw = "text/event-stream", b": alive\n\n" + b"".join(dialect.events(*made, **facts))
            else:
                kind, raw = "application/json", json.dumps(dialect.answer(*made, **facts)).encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    state["url"] = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)
