"""A server in this process that speaks the protocol of vLLM or SGLang, as far as a sampler uses it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch


class TextServer(ThreadingHTTPServer):
    """Draws from a table of logits, which it loads from FOLDER/table.pt when it is asked to.

    Args:
        api: "vllm" or "sglang".
        folder: that it was started with.
        vocabulary: the size of the table.
    """

    daemon_threads = True

    def __init__(self, api: str, folder: Path, vocabulary: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.api, self.folder = api, folder
        self.table = torch.zeros(vocabulary, vocabulary)
        self.requests: list[tuple[str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {}  # of a path, in place of the right one
        self.delay = 0.0  # seconds before an answer
        self.reloads = self.resets = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def load(self, folder: Path) -> None:
        self.table = torch.load(folder / "table.pt")
        self.reloads += 1

    def drawn(self, prompt: list[int], most: int, options: dict[str, Any]) -> list[tuple[int, float]]:
        generator = torch.Generator().manual_seed(options.get("seed", 0))
        text, found = list(prompt), []
        while len(found) < most:
            likely = (self.table[text[-1]].double() / options["temperature"]).log_softmax(-1)
            token = int(torch.multinomial(likely.exp(), 1, generator=generator))
            text.append(token)
            found.append((token, float(likely[token])))
            if token in options["stop_token_ids"]:
                break
        return found

    def answer(self, path: str, given: Any) -> tuple[int, Any]:
        self.requests.append((path, given))
        time.sleep(self.delay)
        if path in self.answers:
            return self.answers[path]
        return self._vllm(path, given) if self.api == "vllm" else self._sglang(path, given)

    def _vllm(self, path: str, given: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy", "root": str(self.folder)}]}
        if path == "/v1/completions":
            assert given["model"] == "policy"
            assert given["return_token_ids"]
            found = self.drawn(given["prompt"], given["max_tokens"], given)
            log_probs = {"token_logprobs": [each for _, each in found]}
            return 200, {"choices": [{"token_ids": [token for token, _ in found], "logprobs": log_probs}]}
        if path == "/collective_rpc" and given == {"method": "reload_weights"}:
            self.load(self.folder)
            return 200, {"results": [None]}
        if path == "/reset_prefix_cache":
            self.resets += 1
            return 200, None
        return 404, {"detail": "Not Found"}

    def _sglang(self, path: str, given: Any) -> tuple[int, Any]:
        if path == "/get_model_info":
            return 200, {"model_path": "policy"}
        if path == "/generate":
            assert given["return_logprob"]
            options = given["sampling_params"]
            found = self.drawn(given["input_ids"], options["max_new_tokens"], options)
            return 200, {"meta_info": {"output_token_logprobs": [[each, token, None] for token, each in found]}}
        if path == "/update_weights_from_disk":
            self.load(Path(given["model_path"]))
            return 200, {"success": True, "message": "Succeeded to update model weights."}
        return 404, {"detail": "Not Found"}


class _Handler(BaseHTTPRequestHandler):
    server: TextServer

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, given: Any) -> None:
        status, found = self.server.answer(self.path, given)
        body = b"" if found is None else found if isinstance(found, bytes) else json.dumps(found).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:  # the client did not wait
            pass

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def text_server(api: str, folder: Path, vocabulary: int) -> Iterator[TextServer]:
    """A running server, which ends with the block."""
    server = TextServer(api, folder, vocabulary)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
