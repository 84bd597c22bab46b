"""A local server that speaks the part of the Hub's HTTP API that pushing and downloading a model needs."""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


LFS_ENDINGS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


@dataclass
class Repo:
    """
    Args:
        private (`bool`, *optional*): As asked for when the repository was created; `None` if nothing was said.
        commits (`list[dict]`): Per commit its id, its message, and all files after it, name to content.
    """

    private: bool | None
    commits: list[dict] = field(default_factory=lambda: [{"id": "0" * 40, "message": "initial commit", "files": {}}])

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1]["files"]


@dataclass
class Failure:
    """The next `times` requests whose "METHOD path" the pattern is found in get `status` after `skip` have passed."""

    pattern: str
    status: int
    times: int
    skip: int


class HubServer:
    """
    `with HubServer() as hub:` serves at `hub.url` until the block ends.

    Attributes:
        users (`dict[str, str]`): Tokens that are known, and whose they are.
        repos (`dict[str, Repo]`): By "owner/name".
        requests (`list[str]`): "METHOD path" of each request, in order.
        uploads (`list[str]`): The sha256 of each object that was uploaded, again if it was uploaded again.
        tokens (`set[str]`): Every token that came with a request.
    """

    def __init__(self):
        self.users = {"hf_writetoken": "someone"}
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.uploads: list[str] = []
        self.tokens: set[str] = set()
        self.failures: list[Failure] = []
        self.lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            server_state = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fail(self, pattern: str, status: int, times: int = 1, skip: int = 0) -> None:
        """Answer requests with `status`; see `Failure`."""
        with self.lock:
            self.failures.append(Failure(pattern, status, times, skip))

    def failure_of(self, request: str) -> int | None:
        with self.lock:
            for failure in self.failures:
                if failure.times and re.search(failure.pattern, request):
                    if failure.skip:
                        failure.skip -= 1
                        continue
                    failure.times -= 1
                    return failure.status
        return None

    def commit(self, repo: Repo, message: str, changes: list[tuple[str, bytes | None]]) -> str:
        files = dict(repo.files)
        for path, content in changes:
            if content is None:
                files = {name: kept for name, kept in files.items() if name != path}
            else:
                files[path] = content
        digest = hashlib.sha1(f"{message}{len(repo.commits)}{sorted(files)}".encode()).hexdigest()
        repo.commits.append({"id": digest, "message": message, "files": files})
        return digest


def blob_id(content: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: HubServer

    ROUTES = (
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/[^/]+", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/[^/]+", "add_commit"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs_batch"),
        ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "lfs_upload"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)", "tree"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?", "info"),
        ("(GET|HEAD)", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    )

    def log_message(self, *args):
        pass

    def answer(self, status: int, body: dict | list | bytes = b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_GET(self):
        hub, path = self.server_state, unquote(urlsplit(self.path).path)
        request = f"{self.command} {path}"
        self.body = self.read_body()
        hub.requests.append(request)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token:
            hub.tokens.add(token)
        self.user = hub.users.get(token)
        if (status := hub.failure_of(request)) is not None:
            self.answer(status, {"error": "made to fail"})
            return
        for method, pattern, name in self.ROUTES:
            match = re.fullmatch(pattern, path)
            if match is None or not re.fullmatch(method, self.command):
                continue
            values = {key: value for key, value in match.groupdict().items() if value is not None}
            writes = self.command == "POST" and name != "validate"
            private = "repo" in values and values["repo"] in hub.repos and hub.repos[values["repo"]].private
            if self.user is None and (writes or private or name == "whoami"):
                self.answer(401, {"error": "Invalid username or password."})
            elif "repo" in values and values["repo"] not in hub.repos:
                self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            else:
                with hub.lock:
                    getattr(self, name)(hub, **values)
            return
        self.answer(404, {"error": f"this server has no {request}"})

    do_HEAD = do_POST = do_PUT = do_GET

    def whoami(self, hub: HubServer):
        self.answer(200, {"name": self.user, "type": "user", "orgs": [], "auth": {"type": "access_token"}})

    def create(self, hub: HubServer):
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or self.user}/{asked['name']}"
        url = {"url": f"{hub.url}/{name}", "name": name, "id": name}
        if name in hub.repos:
            self.answer(409, url | {"error": "You already created this model repo"})
            return
        # huggingface_hub 2 says "visibility", earlier versions "private"
        private = {"private": True, "public": False}.get(asked.get("visibility"), asked.get("private"))
        hub.repos[name] = Repo(private)
        self.answer(200, url)

    def validate(self, hub: HubServer):
        content = json.loads(self.body)["content"]
        base = re.search(r"^base_model:\s*(\S.*)$", content, re.M)
        if base and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base[1].strip()):
            self.answer(400, {"errors": [{"message": f'"base_model" with value "{base[1]}" is not valid.'}]})
        else:
            self.answer(200, {"errors": [], "warnings": []})

    def preupload(self, hub: HubServer, repo: str):
        made = []
        for file in json.loads(self.body)["files"]:
            binary = file["path"].endswith(LFS_ENDINGS) or b"\0" in base64.b64decode(file["sample"])
            entry = {"path": file["path"], "uploadMode": "lfs" if binary else "regular", "shouldIgnore": False}
            content = hub.repos[repo].files.get(file["path"])
            if content is not None:
                entry["oid"] = hashlib.sha256(content).hexdigest() if binary else blob_id(content)
            made.append(entry)
        self.answer(200, {"files": made})

    def lfs_batch(self, hub: HubServer, repo: str):
        objects = []
        for asked in json.loads(self.body)["objects"]:
            entry = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in hub.objects:
                entry["actions"] = {"upload": {"href": f"{hub.url}/lfs/{asked['oid']}", "header": {}}}
            objects.append(entry)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def lfs_upload(self, hub: HubServer, oid: str):
        if hashlib.sha256(self.body).hexdigest() != oid:
            self.answer(400, {"error": "the content has another sha256"})
            return
        hub.objects[oid] = self.body
        hub.uploads.append(oid)
        self.answer(200)

    def add_commit(self, hub: HubServer, repo: str):
        message, changes = "", []
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                changes.append((value["path"], base64.b64decode(value["content"])))
            elif entry["key"] == "lfsFile":
                changes.append((value["path"], hub.objects[value["oid"]]))
            elif entry["key"] == "deletedFile":
                changes.append((value["path"], None))
        oid = hub.commit(hub.repos[repo], message, changes)
        self.answer(200, {"commitUrl": f"{hub.url}/{repo}/commit/{oid}", "commitOid": oid, "hookOutput": ""})

    def at(self, hub: HubServer, repo: str, revision: str) -> dict:
        commits = hub.repos[repo].commits
        return next((commit for commit in commits if commit["id"] == revision), commits[-1])

    def info(self, hub: HubServer, repo: str, revision: str = "main"):
        commit = self.at(hub, repo, revision)
        siblings = [{"rfilename": name} for name in sorted(commit["files"])]
        private = bool(hub.repos[repo].private)
        self.answer(200, {"id": repo, "sha": commit["id"], "private": private, "siblings": siblings, "tags": []})

    def tree(self, hub: HubServer, repo: str, revision: str):
        files = self.at(hub, repo, revision)["files"]
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": blob_id(content)}
            for name, content in sorted(files.items())
        ]
        self.answer(200, entries)

    def resolve(self, hub: HubServer, repo: str, revision: str, path: str):
        commit = self.at(hub, repo, revision)
        content = commit["files"].get(path)
        if content is None:
            self.answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit["id"])
            return
        self.answer(200, content, ETag=f'"{blob_id(content)}"', X_Repo_Commit=commit["id"])
