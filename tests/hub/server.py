"""The part of the Hugging Face Hub's HTTP API that its libraries read with, over folders of files."""

import hashlib
import json
import re
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.*)")
TIME = "2024-01-01T00:00:00.000Z"


class Hub(ThreadingHTTPServer):
    """Serves root/<models or datasets>/<owner>/<name>, each at one commit, which `revisions` and `main` name."""

    daemon_threads = True

    def __init__(self, root: Path, revisions: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.revisions = root, revisions

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, repo_id: str) -> str:
        revision = self.revisions.get(repo_id, "")
        is_commit = re.fullmatch("[0-9a-f]{40}", revision)
        return revision if is_commit else hashlib.sha1(f"{repo_id}@{revision}".encode()).hexdigest()


class Failure(Exception):
    """An answer other than 200: status, and the code by which the libraries tell what is missing."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        try:
            self.answer()
        except Failure as failure:
            status, code = failure.args
            self.reply(status, json.dumps({"error": code}).encode(), {"X-Error-Code": code, "X-Error-Message": code})

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self) -> None:
        address = urlsplit(self.path)
        form = parse_qs(self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode())
        if address.path == "/":
            self.reply(200, b"a local hub")
        elif match := API.fullmatch(address.path):
            kind, repo_id, part, revision, place = match.groups()
            folder = self.folder(kind, repo_id, unquote(revision or "main"))
            self.reply(200, json.dumps(self.describe(folder, kind, repo_id, part, place, form)).encode())
        elif match := FILE.fullmatch(address.path):
            kind, repo_id, revision, place = match.groups()
            folder = self.folder("datasets" if kind else "models", repo_id, unquote(revision))
            self.send_file(folder / unquote(place), self.server.commit(repo_id))
        else:
            raise Failure(404, "RepoNotFound")

    def folder(self, kind: str, repo_id: str, revision: str) -> Path:
        folder = self.server.root / kind / repo_id
        if not folder.is_dir():
            raise Failure(401, "RepoNotFound")  # as the Hub, which does not tell missing from private
        if revision not in ("main", self.server.revisions.get(repo_id), self.server.commit(repo_id)):
            raise Failure(404, "RevisionNotFound")
        return folder

    def describe(self, folder: Path, kind: str, repo_id: str, part: str | None, place: str | None, form: dict) -> Any:
        """Answer a question about a repository: its files, those below a folder, or those of the form."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if part == "paths-info":
            named = [folder / path for path in form.get("paths", [])]
            return [describe_path(folder, path) for path in named if path.exists()]
        if part == "tree":
            below = folder / unquote(place or "")
            if not below.is_dir():
                raise Failure(404, "EntryNotFound")
            recursive = "true" in parse_qs(urlsplit(self.path).query).get("recursive", ["False"])[0].lower()
            return [describe_path(folder, path) for path in sorted(below.rglob("*") if recursive else below.iterdir())]
        return {
            "_id": repo_id, "id": repo_id, "modelId": repo_id, "sha": self.server.commit(repo_id), "private": False,
            "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": [], "lastModified": TIME,
            "createdAt": TIME, "siblings": [{"rfilename": path.relative_to(folder).as_posix()} for path in files],
        }  # fmt: skip

    def send_file(self, path: Path, commit: str) -> None:
        if not path.is_file():
            raise Failure(404, "EntryNotFound")
        content = path.read_bytes()
        headers = {"ETag": f'"{hash_file(path)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, end = int(match[1]), min(int(match[2] or len(content) - 1), len(content) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
            self.reply(206, content[begin : end + 1], headers)
        else:
            self.reply(200, content, headers)

    def reply(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def describe_path(root: Path, path: Path) -> dict[str, Any]:
    place = path.relative_to(root).as_posix()
    if path.is_dir():
        return {"type": "directory", "oid": hashlib.sha1(place.encode()).hexdigest(), "size": 0, "path": place}
    return {"type": "file", "oid": hash_file(path), "size": path.stat().st_size, "path": place}


@cache
def hash_file(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
