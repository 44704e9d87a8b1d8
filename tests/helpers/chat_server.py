"""A server with OpenAI's protocol that follows a script: it fails, stalls and answers as scripted."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What the server sends: a JSON value, or bytes as they are."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


Script = Callable[[dict[str, Any], int], Reply]
"""script(request, how many times this user's last message was asked before) -> reply"""


def completion(content: str | None, finish: str = "stop", **more: Any) -> dict[str, Any]:
    """The body of a chat completion. `more`: keys of the choice, or of the message where `message` is given."""
    message = {"role": "assistant", "content": content} | more.pop("message", {})
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish} | more]}


def echo(request: dict[str, Any], times: int) -> Reply:
    return Reply(completion(f"You said {request['messages'][-1]['content']}"))


class ChatServerScript:
    """The running server: its address, and the requests it got."""

    def __init__(self, script: Script, models: list[str]) -> None:
        self.script, self.models = script, models
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.running = self.most_running = 0
        self._asked: dict[str, int] = {}
        self._lock = threading.Lock()
        self.address = ""

    def get(self, path: str, key: str | None) -> Reply:
        self.keys.append(key)
        if path == "/v1/models":
            return Reply({"data": [{"id": name} for name in self.models]})
        return Reply({"detail": "Not Found"}, 404)

    def post(self, request: dict[str, Any]) -> Reply:
        last = request["messages"][-1]["content"]
        with self._lock:
            self.requests.append(request)
            times = self._asked.get(last, 0)
            self._asked[last] = times + 1
            self.running += 1
            self.most_running = max(self.running, self.most_running)
        try:
            reply = self.script(request, times)
            time.sleep(reply.delay_s)
            return reply
        finally:
            with self._lock:
                self.running -= 1


@contextmanager
def chat_server(script: Script = echo, models: list[str] | None = None) -> Iterator[ChatServerScript]:
    """Run the server in a thread while the body runs."""
    state = ChatServerScript(script, ["target"] if models is None else models)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.reply(state.get(self.path, self.headers.get("Authorization")))

        def do_POST(self) -> None:
            self.reply(state.post(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def reply(self, reply: Reply) -> None:
            body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            try:
                if reply.status == 0:  # hang up
                    self.close_connection = True
                    return
                self.send_response(reply.status)
                for name, value in ({"Content-Length": str(len(body))} | reply.headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
                self.close_connection = "Content-Length" in reply.headers  # a promise that is not kept
            except OSError:
                pass  # the client has left

    class Server(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 128  # by default, more than five at once are cut off

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    state.address = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
