"""Adapters on the Hub, by huggingface_hub's protocol, with a server on this machine."""

import base64
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from huggingface_hub import ModelCard
from running import run, tiny

from focus_exp import UserError, attach, load_adapter, push_to_hub, save_adapter
from focus_exp.models import adapter
from focus_exp.models.adapter import ADAPTER_FILES, CARD, DESCRIPTION, WEIGHTS

REPO, COMMIT = "someone/focus-tiny", "0" * 39 + "1"


class Hub(BaseHTTPRequestHandler):
    """A Hub with one repository."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_POST(self):
        length = int(self.headers.get("Content-Length") or 0)
        lines = [json.loads(line) for line in self.rfile.read(length).splitlines() if line]
        if self.path.endswith("/preupload/main"):
            asked = [{"path": file["path"], "uploadMode": "regular"} for file in lines[0]["files"]]
            return self.answer({"files": [{**file, "shouldIgnore": False} for file in asked]})
        if self.path.endswith("/commit/main"):
            sent = [line["value"] for line in lines if line["key"] == "file"]
            self.files.update({file["path"]: base64.b64decode(file["content"]) for file in sent})
            url = f"http://{self.headers['Host']}/{REPO}/commit/{COMMIT}"
            return self.answer({"success": True, "commitOid": COMMIT, "commitUrl": url})
        return self.answer({"url": f"http://{self.headers['Host']}/{REPO}", "id": REPO, "name": REPO})

    def do_GET(self):
        if self.path.startswith(f"/api/models/{REPO}/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": "1" * 40}
                for name, content in self.files.items()
            ]
            return self.answer(listed)
        if self.path.startswith(f"/api/models/{REPO}"):
            return self.answer({"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]})
        if self.path.startswith(f"/{REPO}/resolve/") and (name := self.path.rpartition("/")[2]) in self.files:
            return self.send(200, self.files[name], {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
        return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, content):
        self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def send(self, code, body, headers):
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    Hub.files.clear()


def run_with_hub(endpoint, cache, code):
    """Run `code` in a process whose Hub is `endpoint`; returns what it prints."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    lines = ["import os", f"os.environ |= {settings!r}", "from focus_exp import *", *code]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def test_push_to_hub_then_fetch_gives_the_same_files(tiny_model, tmp_path, endpoint):
    folder = save_adapter(attach(tiny_model("llama"), groups=4), tmp_path / "adapter")
    (folder / CARD).write_text("# a router\n")
    (folder / "notes.txt").write_text("not meant for others\n")
    pushed = [f"print(push_to_hub({str(folder)!r}, {REPO!r}, token='hf_x'))"]
    fetched = ["from focus_exp.assets import find_adapter", f"print(find_adapter({REPO!r}))"]
    unknown = ["try:", "    find_adapter('no/body')", "except UserError as error:", "    print(error)"]
    said = run_with_hub(endpoint, tmp_path / "hub", [*pushed, *fetched, *unknown])
    assert REPO in said, said
    assert set(Hub.files) == set(ADAPTER_FILES)
    (weights,) = (tmp_path / "hub").rglob(f"snapshots/*/{WEIGHTS}")
    assert weights.parent.as_posix() == said.splitlines()[1]
    assert weights.read_bytes() == (folder / WEIGHTS).read_bytes()
    load_adapter(tiny_model("llama"), weights.parent)
    assert "adapter no/body not found" in said and "Traceback" not in said


def test_push_to_hub_offline_raises_user_error(tiny_model, tmp_path, monkeypatch):
    folder = save_adapter(attach(tiny_model("llama"), groups=4), tmp_path / "adapter")

    def refuse(*_, **__):
        raise adapter.HTTP_ERROR("nobody listens")

    monkeypatch.setattr(adapter.HfApi, "create_repo", refuse)
    with pytest.raises(UserError, match=f"{folder} was not uploaded to {REPO}: the Hub cannot be reached"):
        push_to_hub(folder, REPO)


def test_load_adapter_from_hub_offline_raises_user_error(tiny_model):
    with pytest.raises(UserError, match="adapter no/such-adapter.* not found"):
        load_adapter(tiny_model("llama"), "no/such-adapter@v2")


def test_evaluate_adapter_from_hub_is_fetched(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: fetched.append(name) or tmp_path)
    result = run(*tiny(tmp_path), "job=evaluate", f"adapter={REPO}@v1")
    assert fetched == [REPO] and DESCRIPTION in result.err and result.code == 2


def test_train_writes_a_card_with_the_adapter(tmp_path):
    assert run(*tiny(tmp_path), "recipe.steps=2").code == 0
    (path,) = (tmp_path / "runs").rglob(f"adapter/{CARD}")
    card = ModelCard.load(path)
    assert card.data.library_name == "focus_exp" and card.data.base_model is None  # which no hub has
    assert "| focus_hard |" in card.text and '"groups": 2' in card.text
    assert run(*tiny(tmp_path), "job=evaluate", f"adapter={path.parent}", "eval.seq_len=24").code == 0
