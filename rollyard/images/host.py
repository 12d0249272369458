"""The `host` image: this machine's own programs, by allow-list.

Shown are `/usr` (with a private overlay over it), interpreters that live elsewhere (read-only, at their own path), what is
mounted below these (read-only), and a synthesised skeleton with the few files of `/etc` that programs need. Not shown,
because they are not on the list: homes, the project, `/etc/shadow`, keys, volumes mounted elsewhere. A deny-list would be
wrong as soon as a disk is mounted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollyard.core.cache import make_once
from rollyard.core.errors import ConfigError
from rollyard.core.home import private_dir
from rollyard.core.sandbox import DEFAULT_PATH
from rollyard.images import mount_table
from rollyard.images.rootfs import HostTree, Rootfs

SKELETON_FORMAT = "3"
SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
DIRECTORIES = {
    "dev": 0o755, "etc": 0o755, "home": 0o755, "home/agent": 0o755, "media": 0o755, "mnt": 0o755, "opt": 0o755,
    "proc": 0o555, "root": 0o711, "run": 0o755, "run/lock": 0o1777, "srv": 0o755, "sys": 0o555, "tmp": 0o1777,
    "usr": 0o755, "var": 0o755, "var/cache": 0o755, "var/lib": 0o755, "var/log": 0o755, "var/spool": 0o755,
    "var/tmp": 0o1777, "workspace": 0o777,
}  # fmt: skip
# What programs look up in /etc and that holds no secret on any distribution.
ETC_FILES = (
    "bash.bashrc", "bindresvport.blacklist", "ca-certificates.conf", "debian_version", "gai.conf", "host.conf", "inputrc",
    "issue", "ld.so.cache", "ld.so.conf", "locale.alias", "localtime", "login.defs", "magic", "mailcap", "manpath.config",
    "mime.types", "nanorc", "networks", "os-release", "profile", "protocols", "rpc", "services", "shells", "timezone",
    "alpine-release", "redhat-release",
)  # fmt: skip
ETC_TREES = (
    "alternatives", "ca-certificates", "fonts", "gss", "java-8-openjdk", "java-11-openjdk", "java-17-openjdk",
    "java-21-openjdk", "ld.so.conf.d", "locale.conf.d", "perl", "php", "pki/ca-trust", "pki/tls/certs", "profile.d",
    "python3", "python3.11", "python3.12", "python3.13", "R", "ruby", "skel", "ssl/certs", "terminfo", "vim",
)  # fmt: skip
ETC_SSL_FILES = ("ssl/openssl.cnf",)


def describe_hosts(names: Sequence[str] = ()) -> str:
    """`/etc/hosts` of a sandbox whose loopback has these names too."""
    own = " ".join(("localhost", "sandbox", *names))
    return f"127.0.0.1\t{own}\n::1\tlocalhost ip6-localhost ip6-loopback\n"


WRITTEN = {
    "passwd": (
        "root:x:0:0:root:/root:/bin/sh\n"
        "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
        "bin:x:2:2:bin:/bin:/usr/sbin/nologin\n"
        "sys:x:3:3:sys:/dev:/usr/sbin/nologin\n"
        "mail:x:8:8:mail:/var/mail:/usr/sbin/nologin\n"
        "www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin\n"
        "_apt:x:42:65534::/nonexistent:/usr/sbin/nologin\n"
        "agent:x:1000:1000:agent:/home/agent:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": (
        "root:x:0:\ndaemon:x:1:\nbin:x:2:\nsys:x:3:\nadm:x:4:\ntty:x:5:\ndisk:x:6:\nmail:x:8:\nshadow:x:42:\nwww-data:x:33:\n"
        "utmp:x:43:\nstaff:x:50:\nusers:x:100:\nagent:x:1000:\nnogroup:x:65534:\n"
    ),
    "hosts": describe_hosts(),
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nprotocols: files\nservices: files\n",
    "resolv.conf": "",
    "environment": "",
    "fstab": "",
}


def host_rootfs(root: Path) -> Rootfs:
    """The host image with its skeleton under `root`. Made once per state of the files it is made from; then only looked up."""
    prefixes = tuple(host_prefixes())
    skeleton = _skeleton(root, prefixes)
    system = [name for name in ("usr", *SYSTEM_LINKS) if Path("/", name).is_dir() and not Path("/", name).is_symlink()]
    trees = [HostTree(target=f"/{name}", source=f"/{name}", writable=True) for name in system]
    trees += [HostTree(target=prefix, source=prefix) for prefix in prefixes]
    path = ":".join([*(f"{prefix}/bin" for prefix in prefixes), DEFAULT_PATH])
    env = {"PATH": path, "LANG": "C.UTF-8"}
    if bundle := _certificates():
        env["SSL_CERT_FILE"] = bundle
    return Rootfs(lowers=(str(skeleton),), trees=tuple(trees), env=env, workdir="/workspace", image="host")


def host_prefixes() -> Iterator[str]:
    """Prefixes outside `/usr` that hold this interpreter, and the `python3`, `node` and `git` of the search path; then
    those named in `$ROLLYARD_HOST_PREFIXES`."""
    seen: set[str] = set()
    found = [sys.base_prefix]
    for program in ("python3", "node", "git"):
        located = shutil.which(program)
        if located is not None and "/shims/" not in located:
            found.append(str(Path(located).resolve().parent.parent))
    for prefix in found:
        if prefix not in seen and _showable(Path(prefix)):
            seen.add(prefix)
            yield prefix
    for prefix in filter(None, os.environ.get("ROLLYARD_HOST_PREFIXES", "").split(os.pathsep)):
        if not Path(prefix).is_absolute() or not Path(prefix).is_dir():
            raise ConfigError(f"ROLLYARD_HOST_PREFIXES names {prefix!r}, which is not an absolute directory")
        if prefix not in seen:
            seen.add(prefix)
            yield prefix


def _showable(prefix: Path) -> bool:
    """A prefix is a program's own directory: it has `bin`, it is not part of `/usr`, and it holds no home, no working
    directory and not the file system itself."""
    if not prefix.is_absolute() or not (prefix / "bin").is_dir() or not os.access(prefix / "bin", os.R_OK | os.X_OK):
        return False
    if prefix.parts[:2] == ("/", "usr") or (len(prefix.parts) == 2 and prefix.name in SYSTEM_LINKS):
        return False
    private = [Path.home(), Path.home() / ".local", Path("/opt"), Path("/home"), Path("/etc"), Path("/var"), Path.cwd()]
    return not any(place == prefix or place.is_relative_to(prefix) for place in private)


def _certificates() -> str | None:
    """The CA bundle by the path that exists inside."""
    candidates = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
    return next((path for path in candidates if Path(path).is_file()), None)


def _skeleton(root: Path, prefixes: tuple[str, ...]) -> Path:
    return make_once(private_dir(root / "host") / _fingerprint(prefixes), lambda tree: _write_skeleton(tree, prefixes))


def _fingerprint(prefixes: tuple[str, ...]) -> str:
    """Changes when a file or directory of the list changes, by what `stat` says: looking it up costs well under a ms."""
    mounted = [row[2:] for row in mount_table.read() if row.point.startswith("/etc/")]
    digest = hashlib.sha256(repr((SKELETON_FORMAT, prefixes, sorted(WRITTEN.items()), DIRECTORIES, mounted)).encode())
    for name in (*ETC_FILES, *ETC_SSL_FILES, *ETC_TREES):
        try:
            status = Path("/etc", name).stat()
        except OSError:
            continue
        digest.update(f"{name}\0{status.st_mtime_ns}\0{status.st_size}\0".encode())
    return digest.hexdigest()[:24]


def _write_skeleton(root: Path, prefixes: tuple[str, ...]) -> None:
    root.mkdir()
    root.chmod(0o755)
    for name, mode in DIRECTORIES.items():
        (root / name).mkdir()
        (root / name).chmod(mode)
    with contextlib.suppress(PermissionError):  # only root with that right has other users in its sandboxes
        os.chown(root / "home/agent", 1000, 1000)
    for name in SYSTEM_LINKS:
        source = Path("/", name)
        if source.is_symlink():
            (root / name).symlink_to(source.readlink())
        elif source.is_dir():
            _make_dirs(root / name)
    for prefix in prefixes:
        _make_dirs(root / prefix.lstrip("/"))
    for name in (*ETC_FILES, *ETC_SSL_FILES):
        _copy(Path("/etc", name), root / "etc" / name)
    for name in ETC_TREES:
        _copy(Path("/etc", name), root / "etc" / name)
    for name, text in WRITTEN.items():
        (root / "etc" / name).write_text(text)
        (root / "etc" / name).chmod(0o644)
    (root / "etc/mtab").symlink_to("/proc/self/mounts")
    (root / "var/run").symlink_to("/run")
    (root / "var/lock").symlink_to("/run/lock")


def _copy(source: Path, target: Path) -> None:
    """World-readable files and directories, and links as links. What others may not read stays out, whatever its name."""
    try:
        status = source.lstat()
    except OSError:
        return
    if stat.S_ISLNK(status.st_mode):
        _make_dirs(target.parent)
        target.symlink_to(source.readlink())
    elif stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IROTH:
        _make_dirs(target.parent)
        shutil.copyfile(source, target)
        target.chmod(0o755 if status.st_mode & 0o111 else 0o644)
    elif stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_IROTH:
        _make_dirs(target)
        for name in sorted(os.listdir(source)):
            _copy(source / name, target / name)


def _make_dirs(path: Path) -> None:
    """`mkdir -p` whose result does not depend on the umask."""
    if not path.is_dir():
        _make_dirs(path.parent)
        path.mkdir()
        path.chmod(0o755)
