"""Listens with the application."""

from door import option

from sglang.srt.entrypoints.http_server import app

if __name__ == "__main__":
    print(f"server_args={option('--port')}")
    app.serve(int(option("--port")))
