#!/bin/sh
# seal_repository.sh DIR: of each git repository in DIR nothing is left but HEAD, what it grew from, and the index.
#
# A repository is rebuilt rather than cleaned: one new pack of what HEAD, the tags on its way and the index need, and of the git
# directory only files that are known to hold no commits. So it does not matter by which name a later commit was kept.
set -eu
root=$1
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
export GIT_NO_REPLACE_OBJECTS=1

fail() {
    echo "seal_repository: $1" >&2
    exit 1
}

seal() { # the git directory
    cd "$1"
    export GIT_DIR="$1" GIT_WORK_TREE=/
    [ ! -e commondir ] || fail "$1 is a linked worktree of $(cat commondir); seal the repository it belongs to"
    [ ! -d reftable ] || fail "$1 keeps its refs in tables, which cannot be sealed; convert it with git refs migrate"
    rm -f info/grafts
    for name in * .[!.]*; do
        case $name in
            HEAD | config | config.worktree | description | hooks | index | sharedindex.* | info | objects | packed-refs) ;;
            refs | shallow | modules | lfs) ;;
            *) rm -rf "./$name" ;;
        esac
    done
    head=$(git rev-parse -q --verify 'HEAD^{commit}' || true)
    branch=$(git symbolic-ref -q HEAD || true)
    [ ! -e index ] || git update-index --clear-resolve-undo
    mkdir sealed
    if [ -n "$head" ]; then
        git for-each-ref --merged "$head" --format='%(objectname) %(refname)' refs/tags > sealed/refs
        { echo "$head"; cut -d' ' -f1 sealed/refs; } > sealed/wanted
        git grep -hI -e '^oid sha256:' "$head" -- > sealed/large 2> /dev/null || true
    else
        : > sealed/refs
        : > sealed/wanted
        : > sealed/large
    fi
    git pack-objects -q --revs --indexed-objects "$1/sealed/pack" < sealed/wanted > sealed/names

    rm -rf objects refs packed-refs
    mkdir -p objects/pack objects/info refs/heads refs/tags
    mv sealed/pack-*.pack sealed/pack-*.idx objects/pack/ 2> /dev/null || true
    [ ! -s sealed/refs ] || mv sealed/refs packed-refs
    if [ -n "$head" ] && [ -n "$branch" ]; then
        mkdir -p "$(dirname "$branch")"
        echo "$head" > "$branch"
    fi
    if [ -e shallow ]; then
        while read -r commit; do
            if git cat-file -e "$commit" 2> /dev/null; then echo "$commit"; fi
        done < shallow > sealed/shallow
        mv sealed/shallow shallow
    fi
    if [ -d lfs ]; then
        find lfs -type f | while read -r file; do
            grep -q "$(basename "$file")" sealed/large || rm -f "$file"
        done
    fi
    for section in $(git config --local --name-only --get-regexp '^(remote|branch)\.' | sed 's/\.[^.]*$//' | sort -u); do
        git config --local --remove-section "$section"
    done
    rm -rf sealed
    [ -z "$head" ] || git fsck --connectivity-only --no-dangling "$head" > /dev/null || fail "$1 lost a part of HEAD"
}

root=$(cd "$root" && pwd)
above=$root # a repository that the folder is only a part of
while [ "$above" != / ]; do
    above=$(dirname "$above")
    [ ! -d "$above/.git" ] || (seal "$above/.git")
done
find "$root" \( -name .git -o -path '*/.git/modules/*' -name HEAD \) -print > /tmp/repositories.$$
while read -r found; do
    case $found in
        */HEAD) [ ! -d "${found%/HEAD}/objects" ] || (seal "${found%/HEAD}") ;;
        *) [ ! -d "$found" ] || (seal "$found") ;;
    esac
    if [ -f "$found" ] && [ ! -d "${found%/.git}/.git" ] && [ "${found##*/}" = .git ]; then
        place=$(cd "${found%/.git}" && git rev-parse --absolute-git-dir)
        case $place in
            "$root"/*) ;; # a submodule's, sealed by its own name
            *) (seal "$place") ;;
        esac
    fi
done < /tmp/repositories.$$
rm -f /tmp/repositories.$$
