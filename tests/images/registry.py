"""Debian's `docker-registry` on the loopback, and images made of this machine's files that `skopeo` pushes to it."""

import base64
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

USER, PASSWORD = "tester", "the-registry-password"
_HTPASSWD = "tester:$2b$04$3dkciHk1SORGEnFRKAILOOnnkTnwpYzrXVMb1flf/zoS0TD3EkZOm\n"  # bcrypt of PASSWORD
_OCI = "application/vnd.oci.image"
_PACK = {
    "gzip": lambda data: gzip.compress(data, 1, mtime=0),
    "zstd": lambda data: subprocess.run(["zstd", "-cq"], input=data, capture_output=True, check=True).stdout,
}


def require_registry():
    for program, package in (
        ("docker-registry", "docker-registry"),
        ("skopeo", "skopeo"),
        ("busybox", "busybox-static"),
    ):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install {package}")


@dataclass
class Registry:
    host: str  # HOST:PORT
    folder: Path
    secure: bool = False

    def blob(self, digest):
        """The registry's own file of a blob."""
        name = digest.removeprefix("sha256:")
        return self.folder / "data/docker/registry/v2/blobs/sha256" / name[:2] / name / "data"

    def push(self, layout, name, *options):
        """By a foreign tool."""
        push(layout, f"{self.host}/{name}", *options)


def push(layout, reference, *options):
    command = [
        "skopeo",
        "--insecure-policy",
        "copy",
        "-q",
        "--dest-tls-verify=false",
        *options,
        f"oci:{layout}",
        f"docker://{reference}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@contextmanager
def running_registry(*, auth=None, tls=None):
    """`auth` is the registry's own setting; `tls` a folder with `cert.pem` and `key.pem`."""
    require_registry()
    folder = Path(tempfile.mkdtemp(prefix="ry-registry-"))
    config = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": "127.0.0.1:0"},
    }
    if tls is not None:
        config["http"]["tls"] = {"certificate": str(tls / "cert.pem"), "key": str(tls / "key.pem")}
    if auth == "basic":
        (folder / "htpasswd").write_text(_HTPASSWD)
        config["auth"] = {"htpasswd": {"realm": "tests", "path": str(folder / "htpasswd")}}
    elif auth is not None:
        config["auth"] = auth
    (folder / "config.yml").write_text(json.dumps(config))  # JSON is YAML
    log = (folder / "log").open("wb")
    process = subprocess.Popen(["docker-registry", "serve", str(folder / "config.yml")], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 60
        while (found := re.search(r"listening on 127\.0\.0\.1:(\d+)", (folder / "log").read_text())) is None:
            assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.02)
        yield Registry(f"127.0.0.1:{found[1]}", folder, secure=tls is not None)
    finally:
        process.terminate()
        process.wait(30)
        log.close()
        shutil.rmtree(folder)


def tar_of(files):
    """`files` are name -> bytes, a text for a link, None for a directory."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.mode = 0o755
            if isinstance(content, bytes):
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
            else:
                member.type = tarfile.DIRTYPE if content is None else tarfile.SYMTYPE
                member.linkname = content or ""
                archive.addfile(member)
    return out.getvalue()


def sha256(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Layout:
    """An OCI layout folder, to which images are added."""

    def __init__(self, folder):
        self.folder = Path(folder)
        (self.folder / "blobs/sha256").mkdir(parents=True)
        (self.folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self._index([])

    def blob(self, data, kind):
        (self.folder / "blobs/sha256" / sha256(data).removeprefix("sha256:")).write_bytes(data)
        return {"mediaType": kind, "digest": sha256(data), "size": len(data)}

    def image(self, layers, *, config=None, architecture="amd64", diff_ids=None, packing="gzip"):
        """`layers` are tars. Gives the image's entry for an index; it is the layout's one image until another is added."""
        packed = [self.blob(_PACK[packing](layer), f"{_OCI}.layer.v1.tar+{packing}") for layer in layers]
        document = {
            "architecture": architecture,
            "os": "linux",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": diff_ids or [sha256(layer) for layer in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{_OCI}.manifest.v1+json",
            "config": self.blob(json.dumps(document).encode(), f"{_OCI}.config.v1+json"),
            "layers": packed,
        }
        entry = self.blob(json.dumps(manifest).encode(), f"{_OCI}.manifest.v1+json")
        entry["platform"] = {"os": "linux", "architecture": architecture}
        self._index([entry])
        return entry

    def index(self, entries):
        document = {"schemaVersion": 2, "mediaType": f"{_OCI}.index.v1+json", "manifests": entries}
        self._index([self.blob(json.dumps(document).encode(), f"{_OCI}.index.v1+json")])

    def _index(self, entries):
        (self.folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))


def shell_files():
    """This machine's bash with its libraries, and busybox for all else: a small root that agents and tests run in."""
    files = {"bin/busybox": Path(shutil.which("busybox")).read_bytes(), "tmp": None, "etc": None, "app": None}
    for name in (
        "sh",
        "cat",
        "echo",
        "ls",
        "mkdir",
        "grep",
        "chmod",
        "cp",
        "rm",
        "env",
        "id",
        "head",
        "tail",
        "sleep",
        "tr",
        "wc",
        "test",
        "find",
        "sed",
    ):
        files[f"bin/{name}"] = "busybox"
    bash = shutil.which("bash")
    files["bin/bash"] = Path(bash).read_bytes()
    return files | libraries_of(bash)


def docker_config(folder, auths):
    """A `config.json` as `docker login` writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    packed = {
        host: {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}
        for host, (user, password) in auths.items()
    }
    (folder / "config.json").write_text(json.dumps({"auths": packed}))
    return str(folder)


def make_certificate(folder):
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder


class AnsweringServer:
    """A small HTTP server for answers that no working registry gives. `answer(path, headers)` gives (status, headers, body)."""

    def __init__(self, answer, address="127.0.0.1"):
        seen = self.seen = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                status, headers, body = answer(self.path, self.headers)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                return

        self._server = ThreadingHTTPServer((address, 0), Handler)
        self.host = f"{address}:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


def token_server(folder):
    """Gives tokens that the real registry checks, as the token specification of Docker's registry has them: to all who ask for
    `pull`, and `push` to USER. `rootcertbundle` is the certificate that signs them."""
    make_certificate(folder)

    def answer(path, headers):
        query = parse_qs(urlsplit(path).query)
        sent = headers.get("Authorization", "")
        known = sent == "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if not known:
            return 401, {}, b'{"errors": [{"code": "UNAUTHORIZED", "message": "who are you"}]}'
        kind, _, rest = query["scope"][0].partition(":")
        name, _, actions = rest.rpartition(":")
        now = int(time.time())
        claims = {
            "iss": "tests", "aud": query["service"][0], "sub": USER, "exp": now + 300, "nbf": now - 60, "iat": now,
            "jti": os.urandom(8).hex(),
            "access": [{"type": kind, "name": name, "actions": actions.split(",")}],
        }  # fmt: skip
        certificate = re.sub(r"-----[^-]+-----|\s", "", (folder / "cert.pem").read_text())
        head = {"typ": "JWT", "alg": "RS256", "x5c": [certificate]}
        text = b".".join(_base64url(json.dumps(part).encode()) for part in (head, claims))
        signed = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", str(folder / "key.pem")],
            input=text,
            capture_output=True,
            check=True,
        ).stdout
        token = (text + b"." + _base64url(signed)).decode()
        return 200, {"Content-Type": "application/json"}, json.dumps({"token": token}).encode()

    return AnsweringServer(answer)


def _base64url(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def python_files():
    """The Python that runs this, without what no small program needs."""
    home = Path(sys.base_prefix)
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": str(home), "base": str(home)}))
    files = {}
    program = Path(sys.executable).resolve()
    left_out = {
        "site-packages",
        "dist-packages",
        "test",
        "idlelib",
        "tkinter",
        "ensurepip",
        "__pycache__",
        "lib2to3",
        "pydoc_data",
    }
    for path in sorted(library.rglob("*")):
        inner = path.relative_to(library)
        if path.is_file() and not left_out & set(inner.parts) and not inner.parts[0].startswith("config-"):
            files[str(path).lstrip("/")] = path.read_bytes()
    files[str(program).lstrip("/")] = program.read_bytes()
    files["bin/python3"] = str(program)
    return files | libraries_of(program, *(library / "lib-dynload").glob("*.so"))


def libraries_of(*programs):
    said = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False).stdout
    return {path.lstrip("/"): Path(path).resolve().read_bytes() for path in set(re.findall(r"(/\S+\.so\S*) \(", said))}
