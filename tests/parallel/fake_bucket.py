"""A server with the part of the JSON API of Google Cloud Storage that fsspec and TensorStore use, for one bucket.

Every write of an object gets a new generation, and conditions on generations hold, as TensorStore's database relies on.
"""

import base64
import hashlib
import json
import re
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c

NAME = "training"


Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and content."""


class Stored(NamedTuple):
    """An object: its content, generation and time."""

    content: bytes
    generation: int
    time: str


class Refused(Exception):
    """A request fails with this HTTP status."""

    def __init__(self, status: int) -> None:
        self.status = status


class FakeBucket(ThreadingHTTPServer):
    """The server. `objects` maps names to contents; every request fails with the status `broken`, if it is not 0."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, tuple[str, bytes]] = {}
        self.broken = 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: the tests kill clients."""

    def put(self, name: str, content: bytes) -> None:
        stored = Stored(content, time.time_ns(), datetime.now(UTC).isoformat().replace("+00:00", "Z"))
        self.objects[name] = stored

    def text(self, name: str) -> str:
        return self.objects[name].content.decode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeBucket

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            if self.server.broken:
                raise Refused(self.server.broken)
            status, headers, content = self.answer(self.command, self.path, dict(self.headers.items()), body)
        except Refused as refused:
            status, headers, content = refused.status, {}, b"" if refused.status == 304 else b"{}"
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = handle_request

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        headers = {name.lower(): value for name, value in headers.items()}
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        if url.path.startswith("/batch"):
            return self.batch(body)
        if url.path.startswith("/upload"):
            return self.upload(query, headers, body)
        found = re.fullmatch(rf"(?:/download)?/storage/v1/b/{NAME}(?:/o(?:/(.*))?)?", url.path)
        if not found:
            raise Refused(404)
        name = unquote(found[1] or "")
        if not name:
            return 200, {}, json.dumps(self.listing(query) if url.path.endswith("/o") else {"name": NAME}).encode()
        with self.server.lock:
            self.check(name, query)
            stored = self.server.objects.get(name)
            if stored is None:
                raise Refused(404)
            if method == "DELETE":
                del self.server.objects[name]
                return 204, {}, b""
        if query.get("alt") != "media":
            return 200, {}, json.dumps(describe(name, stored)).encode()
        extra = {"x-goog-generation": str(stored.generation)}
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", "")):
            first, last = int(part[1]), min(int(part[2] or len(stored.content)), len(stored.content) - 1)
            extra["Content-Range"] = f"bytes {first}-{last}/{len(stored.content)}"
            return 206, extra, stored.content[first : last + 1]
        return 200, extra, stored.content

    def check(self, name: str, query: dict[str, str]) -> None:
        stored = self.server.objects.get(name)
        generation = str(stored.generation if stored else 0)
        if query.get("ifGenerationMatch", generation) != generation:
            raise Refused(412)
        if query.get("ifGenerationNotMatch") == generation:
            raise Refused(304)

    def listing(self, query: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items, folders = [], set()
        for name, stored in sorted(self.server.objects.copy().items()):
            if name.startswith(prefix) and query.get("startOffset", "") <= name < query.get("endOffset", "\U0010ffff"):
                rest = name[len(prefix) :]
                if delimiter and delimiter in rest:
                    folders.add(prefix + rest.split(delimiter)[0] + delimiter)
                else:
                    items.append(describe(name, stored))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}

    def upload(self, query: dict[str, str], headers: dict[str, str], body: bytes) -> Answer:
        name = query.get("name", "")
        match query["uploadType"]:
            case "multipart":
                description, body = parts_of(headers["content-type"], body)
                name = json.loads(description)["name"]
            case "resumable" if "upload_id" not in query:
                number = f"{len(self.server.uploads)}"
                self.server.uploads[number] = (json.loads(body or b"{}").get("name", name), b"")
                where = f"{self.server.url}/upload/storage/v1/b/{NAME}/o?uploadType=resumable&upload_id={number}"
                return 200, {"Location": where}, b""
            case "resumable":
                name, before = self.server.uploads[query["upload_id"]]
                body = before + body
                self.server.uploads[query["upload_id"]] = name, body
                if headers["content-range"].endswith("/*"):
                    return 308, {"Range": f"bytes=0-{len(body) - 1}"}, b""
        with self.server.lock:
            self.check(name, query)
            self.server.put(name, body)
            return 200, {}, json.dumps(describe(name, self.server.objects[name])).encode()

    def batch(self, body: bytes) -> Answer:
        answers = []
        for request in re.findall(rb"(?m)^(GET|DELETE|POST|PATCH) (\S+)", body):
            try:
                status, _, content = self.answer(request[0].decode(), request[1].decode(), {}, b"")
            except Refused as refused:
                status, content = refused.status, b"{}"
            answers.append(
                b"--batch\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s\r\n"
                % (status, len(content), content)
            )
        return 200, {"Content-Type": "multipart/mixed; boundary=batch"}, b"".join([*answers, b"--batch--\r\n"])


def parts_of(content_type: str, body: bytes) -> list[bytes]:
    """Returns the contents of the parts of a multipart message."""
    boundary = re.search("boundary=[\"']?([^\"';]+)", content_type)
    assert boundary
    parts = re.split(rb"(?:^|\r?\n)--" + re.escape(boundary[1]).encode() + rb"(?:--)?\r?\n?", body)
    return [re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in parts if part]


def describe(name: str, stored: Stored) -> dict[str, Any]:
    return {
        "kind": "storage#object",
        "name": name,
        "bucket": NAME,
        "generation": str(stored.generation),
        "metageneration": "1",
        "size": str(len(stored.content)),
        "timeCreated": stored.time,
        "updated": stored.time,
        "md5Hash": base64.b64encode(hashlib.md5(stored.content).digest()).decode(),
        "crc32c": base64.b64encode(google_crc32c.Checksum(stored.content).digest()).decode(),
        "etag": str(stored.generation),
    }
