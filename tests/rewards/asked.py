"""Rewards that ask a server, called as a workflow calls them; and a server whose answers a test writes."""

import asyncio
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tandem.rewards.build import build_reward

ROW = {"messages": [{"role": "user", "content": "What is 1 + 1?"}], "answer": "2"}


def judge(spec, *completions, messages=True, timeout_s=2.0):
    """The values of completions that are judged at the same time; of a single one, its value."""
    reward = build_reward(spec, timeout_s=timeout_s)

    async def one(completion):
        chat = [*ROW["messages"], {"role": "assistant", "content": completion}]
        given = {"messages": chat} if messages else {}
        result = await reward(prompt="Q: ", completion=completion, prompt_ids=(1,), completion_ids=(2,), row=ROW, **given)
        return result.value

    async def all_of_them():
        return await asyncio.gather(*map(one, completions), return_exceptions=len(completions) > 1)

    try:
        values = asyncio.run(all_of_them())
        return values if len(completions) > 1 else values[0]
    finally:
        reward.close()


@contextmanager
def server(answer):
    """A server whose answers are ``answer(body) -> (status, value)``; gives its URL and the bodies that it was sent."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            status, value = answer(body)
            raw = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *arguments):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", bodies
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
