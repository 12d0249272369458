"""What users said about files, in attributes of the files: `set PATH {NAME: VALUE}` puts those in place of all that were there,
`get PATH DEPTH` prints those of a path, or of what is below it, as JSON by path."""

import json
import os
import sys

PREFIX = "user.e2b."


def names_of(path):
    try:
        return [name for name in os.listxattr(path) if name.startswith(PREFIX)]
    except OSError:
        return []


def metadata_of(path):
    return {name[len(PREFIX) :]: os.getxattr(path, name).decode("ascii", "replace") for name in names_of(path)}


def paths_below(path, depth):
    for entry in os.scandir(path) if os.path.isdir(path) else ():
        yield entry.path
        if depth > 1 and entry.is_dir(follow_symlinks=False):
            yield from paths_below(entry.path, depth - 1)


def main():
    verb, path, rest = sys.argv[1:]
    if verb == "set":
        for name in names_of(path):
            os.removexattr(path, name)
        for name, value in json.loads(rest).items():
            os.setxattr(path, PREFIX + name, value.encode("ascii"))
        return
    depth = int(rest)
    found = {one: metadata_of(one) for one in (paths_below(path, depth) if depth else [path])}
    sys.stdout.write(json.dumps({one: told for one, told in found.items() if told}))


main()
