# SPDX-License-Identifier: MIT
"""A Hugging Face Hub on this machine: the endpoints that downloading a model takes."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from unittest import mock
from urllib.parse import unquote, urlsplit

from pyhobbit.model.gguf_file import pack_header, string_entry

_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)")
_CHUNK = 1 << 16


@dataclass
class Hub:
    """Its files: by name, by repository. errors: an X-Error-Code, by repository.

    break_after: bytes of a file after which its first download breaks off.  served: (file, first byte).
    heads: files whose first bytes were asked for.
    sizes: that are announced in place of the true ones.  answers: in place of what a repository holds.
    endless: files whose body comes in chunks and has no end.
    """

    repos: Mapping[str, Mapping[str, bytes]]
    errors: Mapping[str, str] = field(default_factory=dict)
    break_after: dict[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    answers: Mapping[str, bytes] = field(default_factory=dict)
    endless: tuple[str, ...] = ()
    served: list[tuple[str, int]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    endpoint: str = ""

    def run(self, folder: Path, *arguments: object) -> "subprocess.CompletedProcess[str]":
        """A command of pyhobbit in a folder, which is HF_HOME as well."""
        environment = {**os.environ, "HF_ENDPOINT": self.endpoint, "HF_HOME": str(folder)}
        return subprocess.run(
            [sys.executable, "-m", "pyhobbit", *map(str, arguments)],
            env=environment, cwd=folder, capture_output=True, text=True, timeout=300, input="",
        )  # fmt: skip


def gguf(name: str, architecture: str = "llama") -> bytes:
    """A file that begins like a model, and holds nothing else."""
    keys = [string_entry("general.architecture", architecture), string_entry("general.name", name)]
    return pack_header(keys, [], 32)


@contextmanager
def at(endpoint: str) -> Iterator[None]:
    """Within it, this process asks there, as others do by HF_ENDPOINT."""
    from huggingface_hub import constants  # reads the environment

    url = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    with mock.patch.multiple(constants, ENDPOINT=endpoint, HUGGINGFACE_CO_URL_TEMPLATE=url):
        yield


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serves it on a free port, which hub.endpoint names."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that reads a header leaves before the end
            super().handle()

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        file = _RESOLVE.fullmatch(path)
        repo = file[1] if file else path.removeprefix("/api/models/").partition("/revision/")[0]
        if repo in self.hub.errors or repo not in self.hub.repos:
            self._send(401, b"", {"X-Error-Code": self.hub.errors.get(repo, "RepoNotFound")})
        elif file is None:
            self._send(
                200, self.hub.answers.get(repo) or self._info(repo), {"Content-Type": "application/json"}
            )
        elif file[2] not in self.hub.repos[repo]:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            self._send_file(file[2], self.hub.repos[repo][file[2]], with_body)

    def _info(self, repo: str) -> bytes:
        files = self.hub.repos[repo]
        siblings = [
            {"rfilename": name, "size": self.hub.sizes.get(name, len(data))} for name, data in files.items()
        ]
        return json.dumps({"id": repo, "sha": _commit(files), "siblings": siblings}).encode()

    def _send_file(self, name: str, data: bytes, with_body: bool) -> None:
        repo = next(files for files in self.hub.repos.values() if files.get(name) is data)
        match = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(match[1]) if match else 0
        part = data[first : int(match[2]) + 1] if match and match[2] else data[first:]
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": _commit(repo),
            "Accept-Ranges": "bytes",
        }
        if match:
            headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        if with_body and name in self.hub.endless and not (match and match[2]):
            self._send_for_ever(data, headers)
            return
        if with_body and match and match[2]:
            self.hub.heads.append(name)
        elif with_body:
            self.hub.served.append((name, first))
        is_head = match and match[2]
        self._send(206 if match else 200, part, headers, "" if is_head else name, with_body)

    def _send_for_ever(self, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(200)
        for key, value in {**headers, "Transfer-Encoding": "chunked"}.items():
            self.send_header(key, value)
        self.end_headers()
        self.close_connection = True
        with suppress(ConnectionError):
            while True:
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str], name: str = "", with_body: bool = True
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not with_body or self.command == "HEAD":
            return
        limit = self.hub.break_after.pop(name, None)
        for start in range(0, len(body), _CHUNK):
            if limit is not None and start >= limit:
                self.close_connection = True
                return
            self.wfile.write(body[start : start + _CHUNK])


def _commit(files: Mapping[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files)).encode()).hexdigest()
