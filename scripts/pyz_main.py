# The first code of the one-file executable. It is read by any Python there is, so that one that is too old gets words,
# and it decides where the file is unpacked when nobody said so with SHIV_ROOT.
# ruff: noqa: UP031, UP036
import os
import stat
import sys

if sys.version_info < (3, 11):
    sys.stderr.write(
        "error: llmgw needs Python 3.11 or newer, `%s` is %d.%d\n"
        "hint: start it with a newer interpreter, such as `python3.12 %s`\n"
        % (sys.executable, sys.version_info[0], sys.version_info[1], sys.argv[0])
    )
    sys.exit(1)


def _usable(path, owned=True):
    """Whether we may make things below `path`, libraries there can be loaded, and nobody else can put code there."""
    while not os.path.isdir(path):
        parent = os.path.dirname(path)
        if parent == path:
            return False
        path, owned = parent, owned and parent not in ("/", "/home", "/var", "/root")
    try:
        info, system = os.stat(path), os.statvfs(path)
    except OSError:
        return False
    if system.f_flag & (os.ST_RDONLY | getattr(os, "ST_NOEXEC", 8)) or not os.access(path, os.W_OK | os.X_OK):
        return False
    return not owned or info.st_uid == os.geteuid()


def _beside():
    """`unpacked/` beside the file, as an installation has it: everybody uses what its owner unpacked there."""
    name = os.path.realpath(sys.argv[0])
    root = os.path.join(os.path.dirname(name), "unpacked")
    try:
        info = os.stat(root)
        if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
            return ""
        there = any(each.startswith(os.path.basename(name) + "_") for each in os.listdir(root))
        return root if there or _usable(root) else ""
    except OSError:
        return ""


def _root():
    found = _beside()
    if found:
        return found
    home = os.environ.get("HOME") or os.path.expanduser("~")
    if home.startswith("/") and _usable(os.path.join(home, ".shiv")):
        return os.path.join(home, ".shiv")
    for variable in ("CACHE_DIRECTORY", "STATE_DIRECTORY", "RUNTIME_DIRECTORY", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        path = os.environ.get(variable, "").split(":")[0]
        if path.startswith("/") and os.path.isdir(path) and _usable(path):
            return os.path.join(path, "llmgw-unpacked")
    for base in ("/var/tmp", "/tmp"):
        path = os.path.join(base, "llmgw-unpacked-%d" % os.geteuid())
        try:
            os.mkdir(path, 0o700)
        except OSError:
            pass
        try:
            info = os.lstat(path)
        except OSError:
            continue
        # others may write to the directory above, so what is there counts only when it is ours and closed to them
        if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077 and _usable(path):
            _whole(path)
            return path
    sys.stderr.write(
        "error: llmgw has nowhere to unpack itself\n"
        "cause: neither the home directory nor /var/tmp nor /tmp can be written to and hold programs\n"
        "hint: set SHIV_ROOT to a directory of your own, in a service with `Environment=SHIV_ROOT=/var/lib/...`\n"
    )
    sys.exit(1)


def _whole(root):
    """What cleans temporary directories takes single files: a tree with a gap is put aside, to be unpacked anew."""
    import json
    import shutil
    import zipfile

    with zipfile.ZipFile(sys.argv[0]) as archive:
        names = [n for n in archive.namelist() if n.startswith("site-packages/")]
        build = json.loads(archive.read("environment.json").decode())["build_id"]
    tree = os.path.join(root, "%s_%s" % (os.path.basename(os.path.realpath(sys.argv[0])), build))
    if os.path.isdir(tree) and not all(os.path.exists(os.path.join(tree, name)) for name in names):
        aside = "%s.broken-%d" % (tree, os.getpid())
        try:
            os.rename(tree, aside)
        except OSError:
            return
        shutil.rmtree(aside, ignore_errors=True)


if not os.environ.get("SHIV_ROOT"):
    os.environ["SHIV_ROOT"] = _root()

from _bootstrap import bootstrap  # noqa: E402

bootstrap()
