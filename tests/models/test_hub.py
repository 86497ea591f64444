"""What is fetched from a hub: one copy of the weights. A small server speaks the part of the hub's protocol that is used."""

import hashlib
import http.server
import json
import subprocess
import sys
import threading

from tests.tiny import tiny_model_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves ``folder`` as the repository ``owner/name``; ``fetched`` are the files that were asked for."""

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        if self.path.startswith("/api/models/owner/name"):
            files = sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*") if p.is_file())
            if "/tree/" in self.path:  # newer clients ask for this, older ones read the siblings
                sizes = {file: (self.folder / file).stat().st_size for file in files}
                blobs = [{"type": "file", "path": file, "size": size, "oid": "0" * 40} for file, size in sizes.items()]
                return self.send({}, json.dumps(blobs))
            siblings = [{"rfilename": file} for file in files]
            return self.send({}, json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}))
        file = self.folder / self.path.partition(f"/resolve/{COMMIT}/")[2]
        if body:
            self.fetched.append(file.relative_to(self.folder).as_posix())
        content = file.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return self.send(headers, content, body)

    def send(self, headers, content, body=True):
        content = content.encode() if isinstance(content, str) else content
        self.send_response(200)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


def fetch(folder, cache):
    """Files that were fetched, and what the command said."""
    handler = type("Handler", (Hub,), {"folder": folder, "fetched": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "PATH": "/usr/bin",
        "PYTHONPATH": ":".join(path for path in sys.path if path),
    }
    code = "from tandem.models.catalog import resolve; print(sorted(p.name for p in resolve('owner/name').iterdir()))"
    try:
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert done.returncode == 0, done.stderr
    return set(handler.fetched), done.stdout


def test_a_second_copy_of_the_weights_is_not_fetched(tmp_path):
    folder = tiny_model_folder(tmp_path)
    (folder / "consolidated.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"")
    fetched, said = fetch(folder, tmp_path / "cache")
    assert "model.safetensors" in said and "consolidated" not in said
    assert {name for name in fetched if name.endswith(".safetensors")} == {"model.safetensors"}
